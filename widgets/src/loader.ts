/** The `_esm` of every widget: finds the bundle and hands the model to it. Small, since each widget's state carries a copy.
 *
 * Order: what this page has already; the labextension's static file; the bundle's text from the kernel's session model.
 * A bundle of another version is not taken. If there is none, the view says so in plain words.
 */

import type { AnyModel, RenderProps } from "@anywidget/types";

declare const __VERSION__: string;
declare const __BUNDLE__: string;

type Bundle = Pick<typeof import("./bundle"), "version" | "renderLive" | "setAssetSource">;

const SLOT = Symbol.for("mlxnb.bundle");
const EXTENSION = "mlxnb";
const WITHIN_MS = 20_000;
/** The first pause before a file is asked for again; each is three times the one before. */
const AGAIN_MS = 300;

const page = globalThis as { [SLOT]?: { version: string; hash: string; ready: Promise<Bundle>; bundle?: Bundle } };

/** Where JupyterLab serves our labextension's files; null elsewhere, or where it is not installed. */
export function extensionUrl(): string | null {
  try {
    const config = JSON.parse(document.getElementById("jupyter-config-data")?.textContent ?? "null");
    const installed = config.federated_extensions.some((one: { name?: unknown }) => one.name === EXTENSION);
    if (!installed) return null;
    const base: string = config.fullLabextensionsUrl ?? `${config.baseUrl}lab/extensions`;
    return new URL(`${base}/${EXTENSION}/static/mlxnb/bundle.js?v=${__BUNDLE__}`, location.href).href;
  } catch {
    return null;
  }
}

async function sessionOf(model: AnyModel): Promise<AnyModel> {
  const named: unknown = model.get("session");
  return typeof named === "string" && named.startsWith("IPY_MODEL_") ? model.widget_manager.get_model(named.slice(10)) : model;
}

/** The text of a built file, by one command to the kernel. */
function ask(session: AnyModel, name: string): Promise<string> {
  const id = `asset-${Math.random().toString(36).slice(2)}`;
  return new Promise((resolve, reject) => {
    let over = false;
    let again: ReturnType<typeof setTimeout> | undefined;
    const end = (settle: () => void) => {
      over = true;
      clearTimeout(timer);
      clearTimeout(again);
      session.off("msg:custom", take);
      settle();
    };
    const take = (message: { type?: unknown; id?: unknown; ok?: unknown; result?: { text?: unknown }; error?: unknown } | null) => {
      if (message?.type !== "answer" || message.id !== id) return;
      const text = message.result?.text;
      end(() => (message.ok === true && typeof text === "string" ? resolve(text) : reject(new Error(String(message.error ?? "no text")))));
    };
    const timer = setTimeout(() => end(() => reject(new Error("the kernel did not answer"))), WITHIN_MS);
    const fail = (error: unknown) => end(() => reject(error instanceof Error ? error : new Error(String(error))));
    session.on("msg:custom", take);
    // Again until it is answered: what leaves before the comm's subshell is known waits for the end of the cell.
    const send = (pause: number) => {
      if (over) return;
      again = setTimeout(() => send(3 * pause), pause);
      try {
        const sent: unknown = session.send({ type: "command", id, key: "", name: "asset", args: { name } });
        if (sent instanceof Promise) sent.catch(fail);
      } catch (error) {
        fail(error);
      }
    };
    send(AGAIN_MS);
  });
}

async function fromText(text: string): Promise<Bundle> {
  const url = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
  try {
    return await import(/* @vite-ignore */ url);
  } finally {
    URL.revokeObjectURL(url);
  }
}

function checked(bundle: Bundle): Bundle {
  if (bundle.version !== __VERSION__) throw new Error(`version ${bundle.version} is not ${__VERSION__}`);
  return bundle;
}

async function find(model: AnyModel): Promise<Bundle> {
  const url = extensionUrl();
  if (url) {
    try {
      return checked(await import(/* @vite-ignore */ url));
    } catch {
      // Another version, or not served: the kernel has the right one.
    }
  }
  const session = await sessionOf(model);
  const bundle = checked(await fromText(await ask(session, "bundle.js")));
  bundle.setAssetSource((name) => ask(session, name));
  return bundle;
}

function bundleFor(model: AnyModel): Promise<Bundle> {
  const had = page[SLOT];
  if (had?.version === __VERSION__ && had.hash === __BUNDLE__) return had.ready;
  const ready = find(model);
  const slot: NonNullable<(typeof page)[typeof SLOT]> = { version: __VERSION__, hash: __BUNDLE__, ready };
  page[SLOT] = slot;
  ready.then(
    (bundle) => (slot.bundle = bundle),
    () => page[SLOT] === slot && delete page[SLOT],
  );
  return ready;
}

/** Starts fetching before there is anything to draw into. */
function initialize({ model }: { model: AnyModel }): void {
  bundleFor(model).catch(() => undefined);
}

async function render({ model, el, signal }: Pick<RenderProps, "model" | "el"> & { signal?: AbortSignal }): Promise<() => void> {
  try {
    const bundle = await bundleFor(model);
    if (signal?.aborted) return () => undefined;
    return await bundle.renderLive(model, el);
  } catch (error) {
    const reason = error instanceof Error ? error.message : String(error);
    el.textContent = `mlxnb cannot draw this view here (${reason.slice(0, 200)}). The answer is kept: see the run object, or run the cell again.`;
    return () => undefined;
  }
}

export default { initialize, render };
