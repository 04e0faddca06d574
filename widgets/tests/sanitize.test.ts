import { describe, expect, it } from "vitest";

import { safeUrl, sanitize } from "../src/sanitize";
import { faults, PAYLOADS } from "./corpus";

const html = (markup: string): string => {
  const box = document.createElement("div");
  box.append(sanitize(markup));
  return box.innerHTML;
};

describe("the sink", () => {
  it("lets no payload of the corpus through", () => {
    expect(PAYLOADS.length).toBeGreaterThan(250);
    const leaks = PAYLOADS.flatMap(([kind, text]) => faults(sanitize(text)).map((fault) => `${kind}: ${text} -> ${fault}`));
    expect(leaks).toEqual([]);
  });

  it("would be caught by the check if it let a payload through", () => {
    const open = document.createElement("template");
    open.innerHTML = PAYLOADS.map(([, text]) => text).join("\n");
    expect(faults(open.content).length).toBeGreaterThan(100);
    for (const bad of ["<img src=x>", "<b id=x>", '<a href="javascript:1">x</a>', "<p style='x'>", "<span class=jp-Toolbar>x</span>"]) {
      open.innerHTML = bad;
      expect(faults(open.content), bad).not.toEqual([]);
    }
  });

  it("keeps what Markdown and the highlighter make", () => {
    const kept = '<p>a <strong>b</strong> <code class="language-c++">c</code></p><table><tbody><tr><td align="right">1</td></tr></tbody></table><ol start="3"><li>x</li></ol>';
    expect(html(kept)).toBe(kept);
    expect(html('<span class="hljs-title function_">f</span>')).toBe('<span class="hljs-title function_">f</span>');
  });

  it("opens links beside the page and gives them no handle on it", () => {
    expect(html('<a href="https://ok.example/x" title="t" rel="opener" target="_top">x</a>')).toBe(
      '<a href="https://ok.example/x" title="t" rel="noopener noreferrer" target="_blank">x</a>',
    );
  });

  it("drops attributes that JupyterLab gives a meaning", () => {
    expect(html('<span data-commandlinker-command="x" id="a" name="b" slot="c" class="jp-Toolbar">x</span>')).toBe("<span>x</span>");
  });

  it("drops the content of scripts and styles with them", () => {
    expect(html("a<script>alert(1)</script><style>p{}</style>b")).toBe("ab");
  });
});

describe("addresses", () => {
  it("may be http, https and mailto alone", () => {
    for (const good of ["http://a.example", "HTTPS://a.example/x?y#z", "mailto:a@b.example"]) expect(safeUrl(good)).toBe(good);
    const bad = ["javascript:alert(1)", "java\tscript:alert(1)", "\u0001javascript:x", "data:text/html,x", "//evil.example", "/tree", "../x", "#x", "?x", "", "https:", "http:///", "blob:https://x", "vbscript:x"];
    for (const url of bad) expect(safeUrl(url), url).toBeNull();
  });
});
