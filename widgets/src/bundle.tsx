/** The one bundle: every view registers itself, and both hosts come in here. The loader and the MIME renderer import this file. */

import type { AnyModel } from "@anywidget/types";

import { signal } from "@preact/signals";

import "./views";
import { setAssetSource, type AssetSource } from "./chunks";
import { applyDelta, liveHost, savedHost, type Host, type LiveHost, type Setting } from "./host";
import { kinds, mount } from "./mount";
import { dict, field, parseRecord, short } from "./parse";
import { kindOf, openViews, textOf } from "./stored";

declare const __VERSION__: string;

/** A loader takes a bundle only if this is its own version. */
export const version: string = __VERSION__;

// A host made elsewhere needs this `signal`: the views do not see that of another copy of the library.
export { applyDelta, kindOf, kinds, liveHost, mount, parseRecord, savedHost, setAssetSource, signal };
export type { AssetSource, Host, LiveHost, Setting };

/** The session model of a view's model: trait `session` is "IPY_MODEL_<id>"; a model without one is its own session. */
export async function sessionOf(model: AnyModel): Promise<AnyModel> {
  const named: unknown = model.get("session");
  if (typeof named !== "string" || !named.startsWith("IPY_MODEL_")) return model;
  return model.widget_manager.get_model(named.slice("IPY_MODEL_".length));
}

const live = new WeakMap<AnyModel, { host: LiveHost; users: number }>();

/** Draws the view of an anywidget model. Several views of one model share one host. Returns what takes it away. */
export async function renderLive(model: AnyModel, el: HTMLElement): Promise<() => void> {
  const session = await sessionOf(model);
  const shared = live.get(model) ?? { host: liveHost(model, session), users: 0 };
  live.set(model, shared);
  shared.users++;
  const key: unknown = model.get("key");
  if (typeof key === "string" && key) openViews().set(key, { record: () => model.get("record"), text: () => textOf(model.get("record")) });
  const kind: unknown = model.get("kind");
  const unmount = mount(el, typeof kind === "string" ? kind : short(kind), shared.host);
  let over = false;
  return () => {
    if (over) return;
    over = true;
    unmount();
    if (--shared.users === 0) {
      shared.host.dispose();
      live.delete(model);
      if (typeof key === "string") openViews().delete(key);
    }
  };
}

/** Draws a stored record in the view that it is of. Returns what takes it away. */
export function renderSaved(record: unknown, el: HTMLElement, setting: Partial<Setting> = {}): () => void {
  const parsed = parseRecord(record);
  const named = parsed.kind === "notice" ? undefined : field(dict(record), "view");
  const view = typeof named === "string" ? { view: named } : {};
  return mount(el, kindOf(record), savedHost(record, { ...view, ...setting }));
}
