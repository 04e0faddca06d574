/** Parts of dependencies that a browser has already, by the small modules that stand in for them. The tests use the same. */

import { fileURLToPath } from "node:url";

const at = (name) => fileURLToPath(new URL(`src/slim/${name}.ts`, import.meta.url));

export const SLIM = { "linkify-it": at("linkify"), "uc.micro": at("uc"), entities: at("entities") };
