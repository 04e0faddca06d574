/** What the on-demand views share with the bundle, so that a page has one Preact, one registry and one of every part.
 *
 * build.mjs puts the reads of this object in place of the imports; its list of names is `SHARED`, from here.
 */

import * as signals from "@preact/signals";
import * as preact from "preact";
import * as hooks from "preact/hooks";
import * as jsx from "preact/jsx-runtime";

import * as answer from "./answer";
import * as chunks from "./chunks";
import * as foot from "./foot";
import * as format from "./format";
import * as inspector from "./inspector";
import * as more from "./more";
import * as mount from "./mount";
import * as parse from "./parse";
import * as parts from "./parts";
import * as read from "./read";
import * as state from "./state";

declare const __VERSION__: string;

const SHARED = {
  preact, "preact/hooks": hooks, "preact/jsx-runtime": jsx, "@preact/signals": signals,
  "./answer": answer, "./chunks": chunks, "./foot": foot, "./format": format, "./inspector": inspector, "./more": more, "./mount": mount,
  "./parse": parse, "./parts": parts, "./read": read, "./state": state,
};

(globalThis as Record<symbol, unknown>)[Symbol.for(`mlxnb.core.${__VERSION__}`)] = SHARED;
