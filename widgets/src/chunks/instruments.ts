/** On demand: the views that are instruments of their own, not answers. Their shared parts come from the bundle (core.ts). */

import "../monitor";
import "../playground";
import "../stepper";
