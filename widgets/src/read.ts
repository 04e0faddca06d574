/** Two more safe readers beside those of parse.ts, for records in which an absent part and an empty one differ. */

import type { Host } from "./host";
import { dict, type Dict } from "./parse";

/** An object, or null where there is none. */
export function maybe(raw: unknown): Dict | null {
  return typeof raw === "object" && raw !== null && !Array.isArray(raw) ? dict(raw) : null;
}

export function oneOf<T extends string>(raw: unknown, allowed: readonly T[], fallback: T): T {
  return allowed.find((value) => value === raw) ?? fallback;
}

/** The tab that the cell asked for: what the page says, else the record, so that every host opens the same one. "" for none. */
export function wantedView(host: Host): string {
  const named = host.setting.view ?? maybe(host.record.peek())?.view;
  return typeof named === "string" ? named : "";
}
