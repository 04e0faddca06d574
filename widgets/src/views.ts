/** The views of answers, imported for their registration. The instruments are a chunk: see mount.tsx. */

import "./run";
import "./compare";
import "./chat";
import "./core";
