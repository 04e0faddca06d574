/// <reference types="node" />
import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

import { beforeAll, describe, expect, it, vi } from "vitest";

import { typeset } from "../src/chunks/math";
import { MarkdownView, renderMarkdown } from "../src/markdown";
import { MAX_FORMULAS } from "../src/math";
import { sanitizeMath } from "../src/sanitize";
import { faults, PAYLOADS } from "./corpus";

vi.mock("../src/chunks", async (original) => ({
  ...(await original<typeof import("../src/chunks")>()),
  chunk: (name: string) => (name === "math" ? import("../src/chunks/math") : Promise.reject(new Error("not here"))),
}));

const here = dirname(fileURLToPath(import.meta.url));
const CASES = JSON.parse(readFileSync(join(here, "..", "..", "tests", "math_cases.json"), "utf8")) as { text: string; math: string[] }[];

function render(text: string): HTMLElement {
  const box = document.createElement("div");
  box.append(renderMarkdown(text));
  return box;
}

function sealed(markup: string): HTMLElement {
  const box = document.createElement("div");
  box.append(sanitizeMath(markup));
  return box;
}

const made = (tex: string, display = false) => sealed(typeset(tex, display) ?? "").innerHTML;

describe("TeX", () => {
  // The chunk comes with the first formula; from then on formulas are drawn at once.
  beforeAll(async () => {
    render("$x$");
    await vi.waitFor(() => expect(render("$x$").querySelector("math")).not.toBeNull());
  });

  it("becomes MathML without its delimiters, in its line or on its own", () => {
    const line = render("a $x^2$ b").firstElementChild as Element;
    expect(line.outerHTML).toBe('<p dir="auto">a <span class="mlxnb-formula"><math><msup><mi>x</mi><mn class="tml-sml-pad">2</mn></msup></math></span> b</p>');
    const own = render("$$\n\\frac{1}{2}\n$$").firstElementChild as Element;
    expect(own.className).toBe("mlxnb-formula mlxnb-math-block");
    expect(own.querySelector("math")?.getAttribute("display")).toBe("block");
    expect(own.querySelector("mfrac")?.textContent).toBe("12");
    expect(own.textContent).not.toContain("$");
  });

  it("that is wrong, unknown or not trusted stays as it was written", () => {
    for (const source of ["$\\frac{1$", "$\\nosuchmacro x$", "$\\href{https://a.example}{x}$", "$\\includegraphics{https://a.example/x.png}$", "$x \\tag{1}$"]) {
      const el = render(`a ${source} b`);
      expect(el.querySelector("math"), source).toBeNull();
      expect(el.textContent).toBe(`a ${source} b`);
    }
  });

  it("keeps what carries meaning: fences, matrices, cases, rules, boxes", () => {
    expect(made("\\begin{pmatrix}a&b\\\\c&d\\end{pmatrix}", true).match(/<mtd/g)).toHaveLength(4);
    expect(made("\\begin{aligned}a&=b\\\\&=c\\end{aligned}", true)).toContain('class="tml-right"');
    expect(made("\\left(\\frac ab\\right)")).toContain('stretchy="true"');
    expect(made("\\boxed{42}")).toContain('class="tml-box"');
    expect(made("\\begin{array}{c|c}1&2\\\\\\hline 3&4\\end{array}")).toMatch(/class="tml-b[trbl]/);
    expect(made("\\mathbb{R}\\text{ if }x")).toContain("ℝ");
  });

  it("takes colour, style, id and any size that reaches over the page from nobody", () => {
    for (const tex of ["\\color{red}x", "\\textcolor{#ffffff}{x}", "\\colorbox{black}{x}", "\\rule{2em}{1em}", "\\label{a}x", "\\boxed{x}"]) {
      expect(made(tex, true), tex).not.toMatch(/color|background|\bstyle=|\bid=/);
    }
    for (const tex of ["\\hspace{900em}x", "\\hspace{-900em}x", "\\raisebox{900em}{x}", "\\kern-999pt x"]) expect(made(tex), tex).not.toMatch(/="[+-]?\d{3}/);
  });

  it("lets no payload of the corpus through: as text, as TeX, and as markup in its place", { timeout: 120_000 }, () => {
    const carriers = (text: string) => [`\\(${text}\\)`, `$$\n${text}\n$$`, `$\\text{${text}}$`];
    const near = (kind: string) => /tex|math|together/.test(kind);
    expect(PAYLOADS.filter(([kind]) => near(kind)).length).toBeGreaterThan(40);
    const leaks = PAYLOADS.flatMap(([kind, text]) => {
      const tex = near(kind) ? typeset(text, true) : null;
      const made = [renderMarkdown(`${text} and $x$`), sanitizeMath(`<math><mtext>${text}</mtext></math>`), ...(near(kind) ? [...carriers(text).map(renderMarkdown), sanitizeMath(text)] : [])];
      return [...made, ...(tex ? [sanitizeMath(tex)] : [])].flatMap((root) => faults(root).map((fault) => `${kind}: ${text} -> ${fault}`));
    });
    expect(leaks).toEqual([]);
  });

  it("has no HTML, no link, no handler and nothing that fetches in what it lets through", () => {
    const hostile = [
      '<math href="javascript:alert(1)"><mi>x</mi></math>',
      '<math><mi xlink:href="javascript:alert(1)" xml:base="javascript:alert(1)//">x</mi></math>',
      '<math><maction actiontype="statusline" xlink:href="javascript:alert(1)"><mi>x</mi></maction></math>',
      '<math><mtext><img src=x onerror=alert(1)><a href="https://a.example">y</a></mtext></math>',
      '<math><annotation-xml encoding="text/html"><img src=x onerror=alert(1)></annotation-xml></math>',
      '<math><semantics><mi>x</mi><annotation encoding="application/x-tex">\\href{javascript:alert(1)}{x}</annotation></semantics></math>',
      '<math><mglyph src="https://a.example/x.png"></mglyph><mi style="position:fixed" mathbackground="url(//a.example)" id="x" class="jp-Toolbar" onclick="alert(1)">x</mi></math>',
      '<form><math><mtext></form><form><mglyph><style></math><img src onerror=alert(1)>',
      '<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=1 onerror=alert(1)&gt;">',
      "<svg><script>alert(1)</script></svg><math><mtext><svg onload=alert(1)></svg></mtext></math>",
    ];
    for (const markup of hostile) {
      const box = sealed(markup);
      expect(faults(box), markup).toEqual([]);
      expect(box.innerHTML, markup).not.toMatch(/javascript|onerror|onclick|onload|href|src=|style|alert/i);
    }
  });

  it("holds the page for no text", { timeout: 60_000 }, () => {
    for (const text of ["$" + "{".repeat(3000) + "}".repeat(3000) + "$", `$$${"\\frac{".repeat(600)}x${"}{y}".repeat(600)}$$`, `$\\def\\a{\\b\\b}\\def\\b{\\a\\a}\\a$`, "$x$ ".repeat(5000)]) {
      const started = performance.now();
      expect(render(text).textContent?.length).toBeGreaterThan(0);
      expect(performance.now() - started).toBeLessThan(5000);
    }
    const many = Array.from({ length: MAX_FORMULAS + 20 }, (_, i) => `$x_{${i}}$`).join("\n\n");
    const box = render(many);
    expect(box.querySelectorAll("math")).toHaveLength(MAX_FORMULAS);
    expect(box.textContent?.endsWith(`$x_{${MAX_FORMULAS + 19}}$`)).toBe(true);
  });

  describe("as it grows", () => {
    const steps = (text: string): string[] => {
      const box = document.createElement("div");
      const view = new MarkdownView(box);
      const seen: string[] = [];
      for (let end = 1; end <= text.length; end++) {
        view.update(text.slice(0, end), true);
        seen.push([...box.querySelectorAll("em, strong, li, h2, br, math")].map((el) => el.nodeName.toLowerCase()).join(" "));
      }
      return seen;
    };

    it("an open formula is never read as Markdown, and is drawn once, when it closes", () => {
      for (const formula of ["$a_1 * b_2 * c_3$", "\\(a*b*c\\)", "$$a*b*c$$", "\\[a*b*c\\]", "$$\na\n- b\n- c\n===\n$$"]) {
        const seen = steps(`So${formula.includes("\n") ? "\n\n" : " "}${formula}${formula.includes("\n") ? "\n\n" : " "}is`);
        const first = seen.indexOf("math");
        expect(first, formula).toBeGreaterThan(0);
        expect(seen.slice(0, first).filter(Boolean), formula).toEqual([]);
        expect(seen.slice(first).every((one) => one === "math"), formula).toBe(true);
      }
    });

    it("prices stay text all the time", () => {
      expect(steps("It costs $5 and $6, not $7-$8 or US$9.").filter(Boolean)).toEqual([]);
      expect(steps("Set $HOME$PATH now").filter(Boolean)).toEqual([]);
    });

    it("what is never closed is Markdown again once its paragraph is over", () => {
      const box = document.createElement("div");
      const view = new MarkdownView(box);
      view.update("a $x *b*", true);
      expect(box.querySelector("em")).toBeNull();
      view.update("a $x *b*\n\nnext", true);
      expect(box.querySelector("em")?.textContent).toBe("b");
      view.update("a $x *b*", false);
      expect(box.querySelector("em")?.textContent).toBe("b");
    });

    it("ends as the whole text does", () => {
      const text = CASES.map((one) => one.text).join("\n\n");
      for (const step of [1, 3, 7]) {
        const box = document.createElement("div");
        const view = new MarkdownView(box);
        for (let end = step; end < text.length; end += step) view.update(text.slice(0, end), true);
        view.update(text, true);
        box.querySelectorAll(".mlxnb-caret").forEach((caret) => caret.remove());
        expect(box.innerHTML, `step ${step}`).toBe(render(text).innerHTML);
      }
    });
  });
});
