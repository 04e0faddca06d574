/** Samples of loom and cache map, invented. */

type Json = Record<string, unknown>;
const MODEL = "mlx-community/Qwen3-4B-4bit";
const PROMPT = "Once the tide had gone out, the lighthouse keeper";

/** Texts of samples, how many went that way; a last "…" is still being written, a last "~" was cut at the limit. */
const WAYS: readonly (readonly [string, number])[] = [
  [" found a bottle wedged between two stones, its cork sealed with green wax.", 3],
  [" found a bottle wedged between two stones, and inside it a map of the harbour, drawn by a hand that had never seen it from the land but knew each rock by its name and the depth of the water over it.", 2],
  [" found the boat already gone.", 3],
  [" found that the lamp was still burning.", 1],
  [" walked down to the rocks with a lantern in each hand…", 1],
  [" walked down to the rocks with a lantern in each…", 1],
  [" walked down to the rocks and counted the seals.", 2],
  [" walked out past the last marker~", 1],
  [" never spoke of it again.", 2],
];
const OTHERS: readonly string[] = [" climbed", " sat", " old", " a", " slowly", " red", "\n", " を"];

const idOf = (text: string): number => [...text].reduce((sum, letter) => (sum * 31 + letter.codePointAt(0)!) % 49_999, 7);

function tokensOf(text: string, at0: number): Json[] {
  const words = text.match(/\s*[^\s]+/g) ?? [];
  return words.map((word, at) => {
    const p = at === 0 ? (word === " found" ? 0.55 : word === " walked" ? 0.31 : 0.09) : 0.25 + ((idOf(word) * 13 + at) % 70) / 100;
    const top = [
      { id: idOf(word), text: word, logprob: Math.log(p) },
      ...OTHERS.filter((other) => other !== word).slice(0, 5).map((other, rank) => ({ id: idOf(other), text: other, logprob: Math.log(((1 - p) * 0.5) / 2 ** rank) })),
    ].sort((a, b) => b.logprob - a.logprob);
    return { id: idOf(word), text: word, origin: "sampled", t: at0 + at * 0.02, logprob: Math.log(p), rank: 0, top };
  });
}

function runOf(raw: string, index: number, over: Json = {}): Json {
  const live = raw.endsWith("…");
  const cut = raw.endsWith("~");
  const text = raw.replace(/[…~]$/, "");
  const tokens = tokensOf(text, 0.1);
  return {
    schema: "mlxnb.run/1",
    id: `c21.${index}`,
    status: live ? "running" : "done",
    model: MODEL,
    labels: { sample: index },
    text,
    tokens,
    usage: { prompt_tokens: 11, prompt_tokens_details: { cached_tokens: index ? 10 : 0 }, completion_tokens: tokens.length },
    seed: { value: 1204 + index, explicit: true },
    finish_reason: live ? null : cut ? "length" : "stop",
    stop: null,
    error: null,
    timing: { started: 0.01, first_token: 0.1, ended: live ? null : 0.8 },
    phases: [],
    request: { max_tokens: 64 },
    prompt: { messages: null, text: index ? null : PROMPT, prefill: "" },
    ...over,
  };
}

const RUNS = WAYS.flatMap(([text, count]) => Array<string>(count).fill(text)).map((text, index) => runOf(text, index));
const place = (run: number, at: number, token: number | null = null): Json => ({ run, at, token });
const base = { schema: "mlxnb.loom/1", key: "k1", epoch: 0, model: MODEL, growing: 0, temp: 1, kept: [], pruned: [], opened: [] };
const rows = (count: number): Json[] => Array.from({ length: count }, () => ({ kind: "sample", given: 0 }));

export const loomLive: Json = {
  ...base,
  runs: RUNS,
  rows: rows(RUNS.length),
  kept: [place(0, 7)],
  pruned: [place(RUNS.length - 1, 1)],
};

/** Cut, continued by hand, and opened at its start. */
const CONTINUED = runOf(" walked out past the last marker and did not look back.", 16, { labels: { loom: "more" } });
const PROBE = runOf(" climbed the", 17, { labels: { loom: "look" }, finish_reason: "length" });
export const loomGrown: Json = {
  ...base,
  runs: [...RUNS.map((run) => ({ ...run, status: "done", finish_reason: run.finish_reason ?? "length" })), CONTINUED, PROBE],
  rows: [...rows(RUNS.length), { kind: "more", given: 6 }, { kind: "probe", given: 1 }],
  opened: [{ ...place(0, 0), ids: [idOf(" climbed"), idOf(" sat"), idOf(" found")] }, { ...place(17, 1), ids: [idOf(" the"), idOf(" old")] }],
};
export const loomOne: Json = { ...base, temp: 0, runs: RUNS.slice(0, 3), rows: rows(3) };
export const loomEmpty: Json = { ...base, runs: [runOf("…", 0, { status: "prefill", tokens: [], text: "" })], rows: rows(1) };
/** As saved where the token tables were too large. */
export const loomPoor: Json = { ...base, runs: RUNS.slice(0, 9).map((run) => ({ ...run, tokens: null, tokens_note: "The tokens were too many to save with this output: more than 192 kB." })), rows: rows(9) };

const edge = (over: Json): Json => ({ parent: null, root: 0, at: 0, tail: 0, bytes: Number(over.blocks ?? 1) * 9_400_000, states: `r${String(over.blocks)}`, users: [], user_count: 0, shares: 1, head: "", ...over });
export const cacheTree: Json = {
  schema: "mlxnb.cache/1",
  key: "k2",
  epoch: 3,
  state: "ready",
  models: [MODEL],
  ram: { used: 444_000_000, budget: 1_500_000_000, leased: 311_000_000, blocks: 47, tails: 3 },
  disk: { used: 179_000_000, budget: 8_000_000_000, records: 19, pending: 0 },
  counts: { hits: 71, misses: 6, hit_tokens: 31_104, asked_tokens: 37_020, evictions: 17, spilled: 15, refused: 0 },
  edges: [
    edge({ id: "a", blocks: 16, states: "m16", shares: 5, users: ["garden", "[12]", "[14]", "drier-bed"], user_count: 5, head: "<|im_start|>system\nYou look after a garden. You have six tools: soil, water, light, prune," }),
    edge({ id: "b", parent: 0, at: 16, blocks: 10, states: "l10", shares: 3, users: ["garden", "drier-bed", "[17]"], user_count: 3, head: " the north bed lost its mulch in the wind." }),
    edge({ id: "c", parent: 1, at: 26, blocks: 6, tail: 37, states: "l6", users: ["garden"], user_count: 1, head: " What should I do first?" }),
    edge({ id: "d", parent: 1, at: 26, blocks: 4, states: "s4", users: ["drier-bed"], user_count: 1, head: " And if the bed were drier?" }),
    edge({ id: "e", parent: 0, at: 16, blocks: 5, states: "r3s2", shares: 2, users: ["[12]", "[14]"], user_count: 2, head: " Look at every bed of the list." }),
    edge({ id: "f", parent: 4, at: 21, blocks: 2, tail: 11, users: ["[14]"], user_count: 1, head: " Row 3: leeks" }),
    edge({ id: "g", blocks: 7, root: 1, shares: 2, users: ["lab"], user_count: 1, head: "Fill in this form as JSON: {\"name\"" }),
    edge({ id: "h", parent: 6, at: 7, blocks: 2, root: 1, users: ["lab"], user_count: 1, head: ", \"sample\": " }),
  ],
  users: [
    { name: "garden", shared: 245_000_000, own: 66_000_000, blocks: 33, stored: 16 },
    { name: "drier-bed", shared: 245_000_000, own: 38_000_000, blocks: 30, stored: 20 },
    { name: "[14]", shared: 198_000_000, own: 19_000_000, blocks: 24, stored: 18 },
    { name: "lab", shared: 66_000_000, own: 19_000_000, blocks: 9, stored: 0 },
  ],
  gone: [
    { t: "14:02:51", blocks: 4, stored: 4, users: ["drier-bed"] },
    { t: "14:02:51", blocks: 2, stored: 0, users: ["[14]"] },
    { t: "13:40:07", blocks: 13, stored: 11, users: [] },
  ],
  left_out: { edges: 0, blocks: 0 },
};
export const cacheEmpty: Json = {
  ...cacheTree,
  ram: { used: 0, budget: 1_500_000_000, leased: 0, blocks: 0, tails: 0 },
  disk: null,
  edges: [],
  users: [],
  gone: [],
};
export const cacheOff: Json = { schema: "mlxnb.cache/1", key: "k2", epoch: 0, state: "off" };
/** Ten thousand blocks: 160 branches of them are told. */
export const cacheLarge: Json = {
  ...cacheTree,
  ram: { used: 1_498_000_000, budget: 1_500_000_000, leased: 0, blocks: 10_000, tails: 900 },
  edges: Array.from({ length: 160 }, (_, index) =>
    index === 0
      ? edge({ id: "r", blocks: 400, states: "s400", shares: 159, head: "A long document about the sea. " })
      : edge({ id: `e${index}`, parent: index < 40 ? 0 : 1 + (index % 39), at: index < 40 ? 400 : 400 + 30 + ((index % 39) % 7), blocks: 30 + (index % 7), tail: index % 60, users: [`cell ${index}`], user_count: 1, head: ` Question ${index} about it` }),
  ),
  left_out: { edges: 740, blocks: 4_310 },
};
