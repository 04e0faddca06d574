/** Negative controls of the one HTML sink: without the library behind it, or without our lists, the check of the corpus fails. */

import { afterEach, describe, expect, it, vi } from "vitest";

import { faults, PAYLOADS } from "./corpus";

/** The payloads of each kind, all in one text; sanitize.test.ts holds the real sink to every one of them. */
const WHOLE = PAYLOADS.filter(([kind]) => kind.endsWith("together"));
const leaks = (sanitize: (markup: string) => DocumentFragment) => WHOLE.flatMap(([, text]) => faults(sanitize(text)));

/** The sink over another library. */
async function sinkOver(purifier: object): Promise<(markup: string) => DocumentFragment> {
  vi.resetModules();
  vi.doMock("dompurify", () => ({ default: () => ({ addHook: () => undefined, ...purifier }) }));
  return (await import("../src/sanitize")).sanitize;
}

const parsed = (markup: string) => {
  const box = document.createElement("template");
  box.innerHTML = markup;
  return box.content;
};

afterEach(() => vi.doUnmock("dompurify"));

describe("the check of the sink catches", () => {
  it("something at all", () => expect(WHOLE.length).toBeGreaterThan(5));

  it("a sink that parses and cleans nothing", async () => {
    const found = leaks(await sinkOver({ sanitize: parsed }));
    for (const what of ["<SCRIPT>", "onerror=", "href=javascript:", "style=", "<IFRAME>", "<FORM>"]) {
      expect(found.some((fault) => fault.toLowerCase().includes(what.toLowerCase())), what).toBe(true);
    }
  });

  it("a sink with the library's own lists instead of ours", async () => {
    const { default: real } = await vi.importActual<typeof import("dompurify")>("dompurify");
    const found = leaks(await sinkOver({ sanitize: (markup: string) => real(window).sanitize(markup, { RETURN_DOM_FRAGMENT: true }) }));
    for (const what of ["<IMG>", "<SVG>", "<FORM>", "style=", "data-commandlinker", "id=", "a link that keeps a handle"]) {
      expect(found.some((fault) => fault.toLowerCase().includes(what.toLowerCase())), what).toBe(true);
    }
    expect(found.some((fault) => fault.includes("<SCRIPT>")), "the library itself takes scripts out").toBe(false);
  });
});
