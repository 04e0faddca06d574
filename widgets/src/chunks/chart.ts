/** On demand: the chart library of the engine monitor, with its style sheet as text. */

import uPlot from "uplot";
import css from "uplot/dist/uPlot.min.css";

export { css, uPlot };
