/// <reference types="node" />
import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

import { beforeAll, describe, expect, it } from "vitest";

import { highlight } from "../src/chunks/highlight";
import { setAssetSource } from "../src/chunks";
import { MarkdownView, MAX_MARKDOWN, renderMarkdown, visibleText } from "../src/markdown";
import { sanitize } from "../src/sanitize";
import { faults, PAYLOADS } from "./corpus";

function html(text: string): string {
  const box = document.createElement("div");
  box.append(renderMarkdown(text));
  return box.innerHTML.replaceAll(' dir="auto"', "");
}

/** The text as it grows by `step` characters, and then whole. */
function grown(text: string, step: number): HTMLElement {
  const box = document.createElement("div");
  const view = new MarkdownView(box);
  for (let end = step; end < text.length; end += step) view.update(text.slice(0, end), true);
  view.update(text, true);
  return box;
}

const noCaret = (box: HTMLElement): string => {
  const copy = box.cloneNode(true) as HTMLElement;
  copy.querySelectorAll(".mlxnb-caret").forEach((caret) => caret.remove());
  copy.normalize();
  return copy.innerHTML.replaceAll(' dir="auto"', "");
};

beforeAll(() => setAssetSource(() => Promise.reject(new Error("no chunks here"))));

const TEXT = `# Title

A *paragraph* with \`code\`, **bold**, ~~struck~~ and a [link](https://ok.example "t").
Second line.

1. one
2. two
   - inner

   more of two

| a | b |
|---|--:|
| 1 | 2 |

> quote
> goes on

\`\`\`python
x = 1

y = 2
\`\`\`

Last $a_1 * b_1$ and \\(x_2\\) words.`;

describe("Markdown", () => {
  it("has the dialect of the Python side", () => {
    expect(html("a\nb")).toBe("<p>a<br>b</p>");
    expect(html("~~a~~ **b** *c* `d`")).toBe("<p><s>a</s> <strong>b</strong> <em>c</em> <code>d</code></p>");
    expect(html("- a\n- b")).toBe("<ul><li>a</li><li>b</li></ul>");
    expect(html("- a\n\n- b")).toBe("<ul><li><p>a</p></li><li><p>b</p></li></ul>");
    expect(html("3. a")).toBe('<ol start="3"><li>a</li></ol>');
    expect(html("|a|b|\n|-|-:|\n|1|2|")).toBe('<table><thead><tr><th>a</th><th align="right">b</th></tr></thead><tbody><tr><td>1</td><td align="right">2</td></tr></tbody></table>');
    expect(html("&copy; &#65; &nosuch; &amp;")).toBe("<p>© A &amp;nosuch; &amp;</p>");
    expect(html("***")).toBe("<hr>");
  });

  it("shows an empty block as its mark", () => {
    expect(html("42.")).toBe("<p>42.</p>");
    expect(html("1)\n2)")).toBe("<p>1)<br>2)</p>");
    expect(html("- 42.")).toBe("<ul><li><p>42.</p></li></ul>");
    for (const mark of ["-", "#", "##", ">", "007."]) expect(renderMarkdown(mark).textContent).toBe(mark);
    expect(html("1. a\n2.")).toBe("<ol><li>a</li><li></li></ol>");
    expect(noCaret(grown("42. is it", 3))).toBe('<ol start="42"><li>is it</li></ol>');
  });

  it("shows HTML as text, and an image as its alternative text", () => {
    expect(html("<b>x</b>")).toBe("<p>&lt;b&gt;x&lt;/b&gt;</p>");
    expect(html("![a **b** c](https://evil.example/x.png)")).toBe("<p><span>a b c</span></p>");
    expect(html("![](https://evil.example/x.png)")).toBe("<p><span>image</span></p>");
  });

  const folder = dirname(fileURLToPath(import.meta.url));
  const CASES = JSON.parse(readFileSync(join(folder, "..", "..", "tests", "math_cases.json"), "utf8")) as { text: string; math: string[] }[];

  it.each(CASES)("both sides say what a formula is: $text", ({ text, math }) => {
    const box = document.createElement("div");
    box.append(renderMarkdown(text));
    expect([...box.querySelectorAll(".mlxnb-math")].map((el) => el.textContent)).toEqual(math);
  });

  it("makes no list and no heading of a formula with lines of its own", () => {
    expect(html("Let\n$$\na = b\n- c\n===\n$$\nbe")).toBe('<p>Let</p><p class="mlxnb-math mlxnb-math-block">$$\na = b\n- c\n===\n$$</p><p>be</p>');
  });

  it("leaves formulas as they are while it cannot draw them", () => {
    expect(html("$a_1 * b_1$ costs $5 and $10")).toBe('<p><span class="mlxnb-math">$a_1 * b_1$</span> costs $5 and $10</p>');
    expect(html("\\[a*b*c\\]")).toBe('<p class="mlxnb-math mlxnb-math-block">\\[a*b*c\\]</p>');
  });

  it("links to http, https and mailto alone", () => {
    expect(html("[x](https://ok.example)")).toBe('<p><a href="https://ok.example" rel="noopener noreferrer" target="_blank">x</a></p>');
    expect(html("[x](/tree)")).toBe("<p><span>x</span></p>");
    expect(html("[x](ftp://a.example)")).toBe("<p><span>x</span></p>");
  });

  it("lets each block take its own direction", () => {
    const box = document.createElement("div");
    box.append(renderMarkdown("مرحبا\n\n- שלום\n\n```\nx\n```"));
    expect([...box.querySelectorAll("p, li")].map((el) => el.getAttribute("dir"))).toEqual(["auto", "auto"]);
    expect(box.querySelector("pre")?.hasAttribute("dir")).toBe(false);
  });

  it("lets no payload of the corpus through, whole or growing", () => {
    const leaks = PAYLOADS.flatMap(([kind, text]) => [renderMarkdown(text), grown(text, 7)].flatMap((root) => faults(root).map((fault) => `${kind}: ${text} -> ${fault}`)));
    expect(leaks).toEqual([]);
  });

  it("survives hostile nesting and length", () => {
    for (const text of ["[".repeat(30_000), ">".repeat(20_000) + "x", "- ".repeat(5_000) + "x", "`x ``".repeat(5_000), "*a ".repeat(10_000), "$".repeat(20_000), "|".repeat(5000) + "\n" + "|-".repeat(2500)]) {
      expect(renderMarkdown(text).textContent?.length).toBeGreaterThan(0);
    }
    expect(html("x".repeat(MAX_MARKDOWN + 1))).toContain('class="mlxnb-plain"');
  });
});

describe("a growing text", () => {
  it("looks the same at the end, however it was cut", () => {
    const whole = html(TEXT).replace(' class="language-python"', "");
    for (const step of [1, 2, 3, 5, 11, 64]) expect(noCaret(grown(TEXT, step)).replace(' class="language-python"', ""), `step ${step}`).toBe(whole);
  });

  it("becomes exactly the whole text when it stops growing", () => {
    const box = document.createElement("div");
    const view = new MarkdownView(box);
    const text = "[late][r] and more\n\npara two\n\npara three\n\npara four\n\n[r]: https://ok.example";
    for (let end = 1; end <= text.length; end++) view.update(text.slice(0, end), true);
    view.update(text, false);
    expect(box.innerHTML.replaceAll(' dir="auto"', "")).toBe(html(text));
    expect(box.querySelector("a")?.getAttribute("href")).toBe("https://ok.example");
  });

  it("keeps the elements of settled blocks and the text nodes of the block at the end", () => {
    const box = document.createElement("div");
    const view = new MarkdownView(box);
    view.update("one\n\ntwo\n\nthree\n\nfour", true);
    const first = box.children[0];
    const last = box.lastElementChild?.firstChild;
    view.update("one\n\ntwo\n\nthree\n\nfour and five", true);
    expect(box.children[0]).toBe(first);
    expect(box.lastElementChild?.firstChild).toBe(last);
    expect(last?.textContent).toBe("four and five");
  });

  it("has one caret, at the end of the last words, and none once it is over", () => {
    for (const [text, parent] of [["a b", "P"], ["- a\n- b", "LI"], ["```\ncode", "CODE"], ["a `b`", "P"], ["|a|\n|-|\n|b|", "TD"]] as const) {
      const box = document.createElement("div");
      const view = new MarkdownView(box);
      view.update(text, true);
      expect([...box.querySelectorAll(".mlxnb-caret")].map((caret) => caret.parentElement?.nodeName), text).toEqual([parent]);
      view.update(text, false);
      expect(box.querySelector(".mlxnb-caret")).toBeNull();
    }
  });

  it("starts again when the text is another one", () => {
    const box = document.createElement("div");
    const view = new MarkdownView(box);
    view.update("one\n\ntwo\n\nthree\n\nfour", true);
    view.update("other", true);
    expect(noCaret(box)).toBe("<p>other</p>");
  });
});

describe("visible text", () => {
  it("shows controls, overrides of direction and halves of characters", () => {
    expect(visibleText("a\x1b[2J\x07\r\nb\rc\x7f")).toBe("a␛[2J␇\nb\nc␡");
    expect(visibleText("\u202egnp.exe")).toBe("<U+202E>gnp.exe");
    expect(visibleText("x\ud800y\ud83d\ude00")).toBe("x\ufffdy\ud83d\ude00");
    expect(visibleText("\u{e0041}tag")).toBe("<U+E0041>tag");
    expect(visibleText("tab\tnew\nline")).toBe("tab\tnew\nline");
  });
});

describe("highlighting", () => {
  it("colours a known language and leaves an unknown one alone", () => {
    expect(highlight("x = 1", "python")).toContain("hljs-number");
    expect(highlight("x = 1", "nosuch")).toBeNull();
    expect(highlight("x".repeat(50_000), "python")).toBeNull();
  });

  it("makes markup that passes the sink unchanged", () => {
    for (const [language, code] of [["python", "def f(x: int) -> str:\n  return '<b>' # no"], ["javascript", "class A { m() { return `a${1}` } }"], ["c", "#include <stdio.h>\nint main(void) { return 0; }"], ["xml", "<a b='c'>d</a>"]] as const) {
      const markup = highlight(code, language) ?? "";
      const box = document.createElement("div");
      box.append(sanitize(markup));
      expect(box.textContent).toBe(code);
      expect(box.innerHTML.match(/class=/g)?.length).toBe(markup.match(/class=/g)?.length);
      expect(faults(box)).toEqual([]);
    }
  });
});
