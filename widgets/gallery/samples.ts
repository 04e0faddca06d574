/** Sample records of RunView for the gallery and for screenshots. Figures are made up. */

export type Json = Record<string, unknown>;
type Origin = "sampled" | "filled" | "echo" | "drafted" | "forced";

const MODEL = "SmolLM2-135M-Instruct";

/** Numbers that are the same on every page load. */
function random(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state * 1664525 + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

/** Text cut about as a tokenizer cuts it. */
function cut(text: string): string[] {
  return text.match(/\n+| ?[\p{L}\p{M}]{1,7}|\d| ?[^\s\p{L}\p{M}\d]{1,2}|\s/gu) ?? [];
}

function token(text: string, t: number, draw: () => number, top: number, origin: Origin = "sampled"): Json {
  const id = [...text].reduce((hash, c) => (hash * 31 + (c.codePointAt(0) ?? 0)) % 49152, 7);
  const base = { id, text, origin, t };
  if (top === 0) return base;
  const p = Math.min(0.9999, Math.max(0.01, draw() ** 0.25));
  const others = [" the", " a", "\n", " its", " of", " deep"].filter((other) => other !== text).slice(0, top - 1);
  let rest = 1 - p;
  const list = others.map((other, i) => {
    const q = Math.max(1e-4, rest * 0.5);
    rest -= q;
    return { id: 200 + i, text: other, logprob: Math.log(q) };
  });
  const all = [{ id, text, logprob: Math.log(p) }, ...list].sort((a, b) => b.logprob - a.logprob);
  return { ...base, logprob: Math.log(p), rank: all.findIndex((one) => one.id === id), top: all };
}

export function sample(text: string, over: Json & { top?: number; seconds?: number } = {}): Json {
  const { top = 0, seconds = 0.068, ...rest } = over;
  const draw = random(text.length + 3);
  let t = 0.074;
  const tokens = cut(text).map((part) => token(part, (t += seconds * (0.7 + draw() ** 6 * 6)), draw, top));
  const status = String(rest.status ?? "done");
  const over_ = ["done", "stopped", "failed"].includes(status);
  return {
    schema: "mlxnb.run/1", id: `s${text.length}`, status, model: MODEL, labels: {}, text, tokens,
    usage: {
      prompt_tokens: 36, prompt_tokens_details: { cached_tokens: 35 }, ...(over_ ? { completion_tokens: tokens.length + (status === "done" ? 1 : 0) } : {}),
      execution: { steps: tokens.length, declined: [], codec: "bf16", kv_bytes: 4_100_000 },
    },
    seed: { value: 7, explicit: true }, finish_reason: status === "done" ? "stop" : status === "stopped" ? "cancelled" : null, stop: null, error: null,
    timing: { started: 0.004, first_token: 0.074, ended: over_ ? t : null },
    phases: [], request: { max_tokens: 512 }, prompt: { messages: [{ role: "user", content: "Why is the sky blue?" }], text: null, prefill: "" },
    ...rest,
  };
}

const SKY = `The sky looks blue because of **Rayleigh scattering**. Sunlight holds every colour; on its way through the atmosphere, gas molecules scatter short wavelengths far more than long ones. The strength goes as \`1/λ⁴\`.

- Blue light (about 450 nm) is scattered roughly **four times** as much as red light (about 650 nm).
- Violet is scattered more still, but the sun emits less of it and our eyes are less sensitive to it.
- At sunset the light crosses more air. Most of the blue is gone, and red remains.`;

const RICH = `## Reading a table of temperatures

The file has one row per hour. Load it, then *resample*:

\`\`\`python
import pandas as pd

def daily(path: str) -> pd.Series:
    """Mean temperature of each day, in degrees."""
    frame = pd.read_csv(path, parse_dates=["time"])
    return frame.set_index("time")["celsius"].resample("D").mean()  # NaN where a day has no row
\`\`\`

| day | mean | rows | remark |
|:----|-----:|-----:|:-------|
| Monday | 21.4 | 24 | complete |
| Tuesday | 21.9 | 23 | one row is missing at 03:00 |
| Wednesday | 19.0 | 24 | a front came through |

1. Check the missing hour first.
2. Then compare with \`df.describe()\`:
   - the *median* is robust,
   - the ~~maximum~~ 99th percentile says more.

> A mean of means is not a mean, unless every day has as many rows.

See the [documentation](https://pandas.pydata.org/docs/ "pandas") for more.`;

const FORMULAS = String.raw`## The normal distribution

A variable $x$ with mean $\mu$ and deviation $\sigma > 0$ has the density

$$
f(x) = \frac{1}{\sigma\sqrt{2\pi}}
- 0 \cdot e^{-\frac{1}{2}\left(\frac{x-\mu}{\sigma}\right)^2}
$$

so that \(P(|x-\mu| < 2\sigma) \approx 0.954\), at a price of $5 to $6. The mean of $n$ draws is \[ \bar{x} = \frac{1}{n}\sum_{i=1}^{n} x_i \qquad \operatorname{Var}(\bar x) = \frac{\sigma^2}{n} \] and with a matrix:

$$\begin{aligned} A &= \begin{pmatrix} a & b \\ c & d \end{pmatrix}, \quad \det A = ad - bc \\ |x| &= \begin{cases} x & \text{if } x \ge 0 \\ -x & \text{otherwise} \end{cases} \end{aligned}$$

1. In a list $\hat\beta = (X^\top X)^{-1}X^\top y$ as well,
2. $\lim_{h\to 0}\frac{f(x+h)-f(x)}{h}$, $\mathbb{R}^n$, $\vec{v}$, $\overline{ab}$, $\cancel{x}$, $\boxed{42}$.

| symbol | meaning |
|:--|:--|
| $\nabla \cdot E = \frac{\rho}{\varepsilon_0}$ | Gauss |
| $\oint_{\partial\Sigma} B\,d\ell = \mu_0 I$ | Ampère |

Wrong TeX stays: $\frac{1$ and $\nosuch{x}$.`;

const SCRIPTS = `مرحبا! السماء زرقاء لأن جزيئات الهواء تبعثر الضوء الأزرق أكثر من الأحمر.

- النقطة الأولى: **الضوء** ينتشر.
- שמיים כחולים בגלל פיזור ריילי.

空が青いのは、空気の分子が短い波長の光をより強く散乱するためです。👩🏽‍🔬🌈🇺🇳

ท้องฟ้าเป็นสีฟ้า and a very long word: Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft_${"x".repeat(120)}`;

/** A run with every origin, and a grammar that masks. */
function everyOrigin(): Json {
  const draw = random(5);
  const parts: readonly (readonly [string, Origin])[] = [
    ['{"', "forced"], ["sensor", "forced"], ['":', "forced"], [' "', "forced"], ["tank", "sampled"], [" ", "sampled"], ["3", "sampled"], ['",', "sampled"],
    [' "', "forced"], ["value", "forced"], ['":', "forced"], [" ", "sampled"], ["2", "sampled"], ["1", "sampled"], [".", "sampled"], ["4", "sampled"], [",", "sampled"],
    ["\n", "filled"], ['  "', "filled"], ["unit", "filled"], ['":', "filled"], [' "', "filled"], ["c", "sampled"], ["elsius", "drafted"], ['",', "drafted"], ["\n", "drafted"],
    ["  ", "sampled"], ["\t", "sampled"], ["Bed", "echo"], [" 4", "echo"], [" north", "echo"], [":", "echo"], [" mulch", "echo"], [" is", "echo"], [" thin", "echo"], ['"}', "forced"],
  ];
  let t = 0.214;
  const tokens = parts.map(([text, origin], i) => {
    if (origin !== "echo" && origin !== "filled") t += 0.05 + draw() * 0.03 + (i === 22 ? 0.2 : 0);
    return token(text, t, draw, 5, origin);
  });
  tokens[22] = {
    ...tokens[22], text: "c", id: 99, logprob: Math.log(0.297), rank: 1, by_hand: true,
    top: [
      { id: 34, text: "C", logprob: Math.log(0.412), masked: "not allowed by Reading.unit" }, { id: 99, text: "c", logprob: Math.log(0.297) },
      { id: 176, text: "°", logprob: Math.log(0.118), masked: "not allowed by Reading.unit" }, { id: 7, text: " degrees", logprob: Math.log(0.064), masked: "not allowed by Reading.unit" },
      { id: 74, text: "k", logprob: Math.log(0.021) },
    ],
  };
  const text = parts.map(([part]) => part).join("");
  return { ...sample(text), tokens, usage: { prompt_tokens: 481, prompt_tokens_details: { cached_tokens: 448 }, completion_tokens: 36, execution: { steps: 22, declined: ["jump_with_logprobs"], codec: "bf16", kv_bytes: 11_900_000 } } };
}

const LONG = Array.from({ length: 40 }, (_, i) => `${SKY.replace("sky", `sky of day ${i}`)}\n\n`).join("");

export interface Sample {
  readonly title: string;
  readonly kind: string;
  readonly record: unknown;
  readonly live?: boolean;
  readonly setting?: { readonly view?: string };
  /** Records that come one after the other once the view is drawn, as from a kernel. */
  readonly feed?: readonly unknown[];
}

const run = (title: string, record: unknown, live = false, view = "answer"): Sample => ({ title, kind: "run", record, live, setting: { view } });

export const RUNS: Readonly<Record<string, Sample>> = {
  answer: run("Answer, finished", sample(SKY), true),
  tokens: run("Tokens, by probability", sample(SKY, { top: 5 }), true, "tokens"),
  origins: run("Tokens of every origin", everyOrigin(), true, "tokens"),
  latency: run("Tokens without probabilities", sample(SKY), false, "tokens"),
  streaming: run("Answer, streaming", sample(SKY.slice(0, 260), { status: "running" }), true),
  streaming_tokens: run("Tokens, streaming", sample(SKY.slice(0, 160), { status: "running", top: 3 }), true, "tokens"),
  rich: run("Code, table, list, quote, link", sample(RICH)),
  formulas: run("Formulas", sample(FORMULAS)),
  formulas_growing: run("A formula that is not closed yet", sample(FORMULAS.slice(0, 165), { status: "running" }), true),
  scripts: run("Any script, emoji, a very long word", sample(SCRIPTS)),
  scripts_tokens: run("The same as tokens", sample(SCRIPTS, { top: 3 }), false, "tokens"),
  raw: run("Raw", sample(RICH.slice(0, 400)), false, "raw"),
  stopped: run("Stopped", sample(SKY.slice(0, 300), { status: "stopped" }), true),
  length: run("Cut at the limit", sample(SKY.slice(0, 240), { finish_reason: "length", request: { max_tokens: 64 } })),
  failed: run("Failed with a partial answer", sample(SKY.slice(0, 90), {
    status: "failed", finish_reason: "error",
    error: { kind: "RequestError", message: "The context of this model is full at 8,192 tokens.", hint: "Start a new chat with --chat, or shorten the prompt." },
  }), true),
  empty: run("No text at all", sample("")),
  waiting: run("Waiting", sample("", { status: "waiting", phases: [] }), true),
  loading: run("Loading", sample("", { status: "loading", phases: [{ kind: "load", phase: "download", t: 0, until: 3, done: 63_000_000, total: 92_000_000 }] }), true),
  prefill: run("Reading the prompt", sample("", { status: "prefill", phases: [{ kind: "prefill", t: 0.1, until: 1, done: 1536, total: 2310 }] }), true),
  long: run("A very long answer as tokens", sample(LONG, { top: 3 }), false, "tokens"),
  notice: run("Another version", { schema: "mlxnb.run/9", tokens: 3 }),
  damaged: run("Damaged", { schema: "mlxnb.run/1", text: 5, tokens: "x", usage: [], error: 3, timing: null, labels: 4 }),
};
