/** On demand: the views that are trees. Their shared parts come from the bundle (core.ts). */

import "../cache";
import "../loom";
