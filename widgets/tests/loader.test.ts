import type { AnyWidget } from "@anywidget/types";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";

import loader, { extensionUrl } from "../src/loader";
import { FakeModel, soon } from "./records";

// The module is what anywidget expects: this line fails to compile if it is not.
const widget: AnyWidget = loader;

const SLOT = Symbol.for("mlxnb.bundle");
const slot = globalThis as { [SLOT]?: unknown };

/** A bundle as text, as the kernel sends it. It notes what it was asked to draw. */
const bundle = (version: string) => `
  export const version = ${JSON.stringify(version)};
  export const setAssetSource = (from) => { globalThis.assetSource = from };
  export const renderLive = async (model, el) => { el.textContent = "drawn " + model.get("kind"); return () => { el.textContent = "gone" } };`;

function widgetOf(session: FakeModel, over: object = {}) {
  return new FakeModel({ kind: "run", session: "IPY_MODEL_s1", ...over }, { s1: session });
}
const draw = async (model: FakeModel, signal?: AbortSignal) => {
  const el = document.createElement("div");
  const end = await loader.render({ model: model.any, el, ...(signal ? { signal } : {}) });
  return { el, end };
};

beforeEach(() => {
  delete slot[SLOT];
  document.body.replaceChildren();
  // jsdom has no object URLs; Node imports data URLs instead.
  vi.stubGlobal("Blob", class { constructor(readonly parts: string[]) {} });
  URL.createObjectURL = (blob) => `data:text/javascript;base64,${Buffer.from((blob as unknown as { parts: string[] }).parts.join("") + `\n//${Math.random()}`).toString("base64")}`;
  URL.revokeObjectURL = () => undefined;
});
afterEach(() => vi.unstubAllGlobals());

describe("the loader", () => {
  it("is an anywidget module", () => {
    expect(Object.keys(widget).sort()).toEqual(["initialize", "render"]);
  });

  it("asks the kernel's session for the bundle, draws, and takes the view away again", async () => {
    const session = new FakeModel();
    session.answerWith((name, args) => ({ ok: name === "asset", result: { text: (args as { name: string }).name === "bundle.js" ? bundle("test") : "chunk" } }));
    const { el, end } = await draw(widgetOf(session));
    expect(el.textContent).toBe("drawn run");
    end();
    expect(el.textContent).toBe("gone");
    await expect((globalThis as unknown as { assetSource: (name: string) => Promise<string> }).assetSource("diff.js")).resolves.toBe("chunk");
  });

  it("fetches once for all widgets of a page, also when they start together", async () => {
    const session = new FakeModel();
    session.answerWith(() => ({ ok: true, result: { text: bundle("test") } }));
    loader.initialize({ model: widgetOf(session).any });
    const all = await Promise.all([draw(widgetOf(session)), draw(widgetOf(session, { kind: "compare" }))]);
    expect(all.map(({ el }) => el.textContent)).toEqual(["drawn run", "drawn compare"]);
    expect(session.sent).toHaveLength(1);
    expect(session.listening()).toBe(0);
  });

  it("asks again until it is answered: what leaves before a comm's subshell is known is read after the cell only", async () => {
    vi.useFakeTimers();
    try {
      const session = new FakeModel();
      const drawn = draw(widgetOf(session));
      await vi.advanceTimersByTimeAsync(250);
      expect(session.sent).toHaveLength(1);
      await vi.advanceTimersByTimeAsync(100);
      expect(session.sent).toHaveLength(2);
      const { id } = session.sent[0]!;
      expect(session.sent[1]).toEqual(session.sent[0]);
      session.emit("msg:custom", { type: "answer", id, ok: true, result: { text: bundle("test") } }, []);
      vi.useRealTimers();
      expect((await drawn).el.textContent).toBe("drawn run");
      expect(session.listening()).toBe(0);
    } finally {
      vi.useRealTimers();
    }
  });

  it("takes no bundle of another version, says so, and tries again next time", async () => {
    const session = new FakeModel();
    session.answerWith(() => ({ ok: true, result: { text: bundle("other") } }));
    expect((await draw(widgetOf(session))).el.textContent).toContain("version other is not test");
    session.answerWith(() => ({ ok: true, result: { text: bundle("test") } }));
    expect((await draw(widgetOf(session))).el.textContent).toBe("drawn run");
  });

  it("says in plain text what went wrong, whatever it was", async () => {
    const refused = new FakeModel();
    refused.answerWith(() => ({ ok: false, error: "<img src=x onerror=alert(1)>" }));
    const broken = new FakeModel();
    broken.answerWith(() => ({ ok: true, result: { text: "this is not a module" } }));
    const empty = new FakeModel();
    empty.answerWith(() => ({ ok: true, result: null }));
    for (const session of [refused, broken, empty]) {
      delete slot[SLOT];
      const { el, end } = await draw(widgetOf(session));
      expect(el.textContent).toMatch(/^mlxnb cannot draw this view here/);
      expect(el.children).toHaveLength(0);
      end();
    }
    expect((await draw(new FakeModel({ kind: "run", session: "IPY_MODEL_gone" }))).el.textContent).toContain("no such model");
  });

  it("draws nothing into a view that is gone by then", async () => {
    const session = new FakeModel();
    session.answerWith(() => ({ ok: true, result: { text: bundle("test") } }));
    const gone = new AbortController();
    gone.abort();
    expect((await draw(widgetOf(session), gone.signal)).el.textContent).toBe("");
  });

  it("finds the labextension only where it is installed", async () => {
    const config = (text: string) => {
      document.body.replaceChildren();
      const script = document.createElement("script");
      script.id = "jupyter-config-data";
      script.type = "application/json";
      script.textContent = text;
      document.body.append(script);
      return extensionUrl();
    };
    expect(extensionUrl()).toBeNull();
    for (const bad of ["", "{", "null", "{}", '{"federated_extensions": 3}', '{"federated_extensions": [{"name": "other"}]}']) expect(config(bad), bad).toBeNull();
    const installed = { federated_extensions: [{ name: "mlxnb" }], fullLabextensionsUrl: "/user/x/lab/extensions" };
    expect(config(JSON.stringify(installed))).toBe("http://localhost:3000/user/x/lab/extensions/mlxnb/static/mlxnb/bundle.js?v=test");
    // It is not served here, so the kernel's bundle is taken.
    const session = new FakeModel();
    session.answerWith(() => ({ ok: true, result: { text: bundle("test") } }));
    expect((await draw(widgetOf(session))).el.textContent).toBe("drawn run");
    await soon();
  });
});
