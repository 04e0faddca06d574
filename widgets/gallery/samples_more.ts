/** Sample records of compare, chat, monitor, playground and stepper for the gallery and for screenshots. Figures are made up. */

const MODEL = "SmolLM2-135M-Instruct";
export type Json = Record<string, unknown>;

/** Numbers that are the same on every page load. */
function random(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state * 1664525 + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

export function run(over: Json & { text?: string; p?: number; rate?: number } = {}): Json {
  const { text = "", p = 0.8, rate = 14, ...rest } = over;
  const draw = random(text.length + 1);
  const words = text.match(/\s*\S+|\s+$/g) ?? [];
  const tokens = words.map((word, i) => {
    const logprob = Math.log(Math.min(0.99, p + (draw() - 0.5) * 0.3));
    return {
      id: [...word].reduce((hash, c) => (hash * 31 + c.charCodeAt(0)) % 49152, 7),
      text: word,
      origin: "sampled",
      t: 0.08 + i / rate,
      logprob,
      rank: 0,
      top: [],
    };
  });
  const ended = Number((0.08 + tokens.length / rate).toFixed(2));
  const status = String(rest.status ?? "done");
  return {
    schema: "mlxnb.run/1",
    id: "r",
    status,
    model: MODEL,
    labels: {},
    text,
    tokens,
    seed: { value: 7, explicit: true },
    usage: {
      prompt_tokens: 39,
      completion_tokens: tokens.length,
      prompt_tokens_details: { cached_tokens: 38 },
      execution: { steps: tokens.length, kv_bytes: 5.4e6, codec: "bf16" },
    },
    finish_reason: status === "done" ? "stop" : null,
    stop: null,
    error: null,
    phases: [],
    timing: {
      submitted: 0,
      admitted: 0.01,
      first_token: tokens.length ? 0.081 : null,
      ended: ["done", "stopped", "failed"].includes(status) ? ended : null,
    },
    request: { max_tokens: 128, sampling: { temp: 0.7 } },
    prompt: { messages: [{ role: "user", content: "Explain why ice floats." }], text: null, prefill: "" },
    ...rest,
  };
}

const ICE = [
  [
    "0",
    0.83,
    "Ice floats because it is lighter than the water around it. When water freezes, its tiny pieces line up in a pattern with gaps between them, so ice takes up more room than the same amount of water.",
  ],
  [
    "0.7",
    0.76,
    "Ice floats because it is lighter than the water it pushes aside. When water freezes, its tiny pieces hold hands in a pattern with gaps between them, so a block of ice takes up more room than the same amount of water.",
  ],
  [
    "1",
    0.64,
    "Ice floats because water grows when it freezes. Its tiny pieces line up like people holding hands at arm’s length, so there are gaps between them and the ice weighs less than the same amount of water.",
  ],
  [
    "1.3",
    0.41,
    "Think of a crowded dance floor: when the music slows and everyone stretches out their arms, fewer fit. Freezing water does just that, so ice gets roomy, light for its size, and bobs on top.",
  ],
] as const;

export const compareDone: Json = {
  schema: "mlxnb.group/1",
  runs: ICE.map(([temp, p, text], i) => run({ id: `ice.${i}`, labels: { temp: Number(temp) }, text, p, rate: 12 })),
};
export const compareLive: Json = {
  schema: "mlxnb.group/1",
  runs: [
    run({ id: "n.0", text: "Ice floats because it is less dense than liquid water. Freezing pushes the tiny pieces apart." }),
    run({
      id: "n.1",
      status: "running",
      seed: { value: 8, explicit: true },
      text: "Water is odd: it swells when it freezes, so each scoop of ice weighs",
    }),
    run({
      id: "n.2",
      status: "running",
      seed: { value: 9, explicit: true },
      text: "When water turns to ice, its pieces spread out and leave little",
    }),
    run({ id: "n.3", status: "waiting", seed: { value: 10, explicit: true }, text: "" }),
  ],
};
export const compareVotes: Json = {
  schema: "mlxnb.group/1",
  runs: ["42", "42.", "41", "42", " 42", "forty-two", "42", "54"].map((text, i) =>
    run({ id: `v.${i}`, text, seed: { value: 20 + i, explicit: true } }),
  ),
};
export const compareMixed: Json = {
  schema: "mlxnb.group/1",
  runs: [
    run({
      id: "m.0",
      labels: { city: "Oslo" },
      prompt: { messages: [{ role: "user", content: "Where is Oslo?" }], text: null, prefill: "" },
      text: "Norway.\n\n```python\nprint({'country': 'Norway'})\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |",
    }),
    run({
      id: "m.1",
      labels: { city: "القاهرة" },
      prompt: { messages: [{ role: "user", content: "Where is القاهرة?" }], text: null, prefill: "" },
      text: "القاهرة هي عاصمة جمهورية مصر العربية وأكبر مدنها. 🏺 تقع على نهر النيل.",
    }),
    run({
      id: "m.2",
      labels: { city: "Xanadu" },
      prompt: { messages: [{ role: "user", content: "Where is Xanadu?" }], text: null, prefill: "" },
      status: "failed",
      text: "",
      error: { kind: "request", message: "The prompt has 9,310 tokens, but the context holds 8,192.", hint: "Shorten the prompt." },
    }),
    run({
      id: "m.3",
      labels: { city: "Lima" },
      prompt: { messages: [{ role: "user", content: "Where is Lima?" }], text: null, prefill: "" },
      status: "stopped",
      text: "Peru. Lima lies on the coast, and the river Rímac",
    }),
  ],
};

// -- chat --------------------------------------------------------------------------------------------------------------

const GARDEN =
  "Rake the leaves from the path over the bed, **5 cm deep**, and clear emitters 2 and 5 with a pin. Both cost nothing.\n\n- Water early, before 09:00\n- Check the probe again on Friday";
/** A row of a tree: id, the row it hangs on, whether lines go on beside it, and what else is true of it. */
const row = (id: string, parent: number, lines: boolean[], text: string, cell: string, tokens: number, over: Json = {}): Json => ({
  ...{ id, parent, lines, text, cell, tokens, branch: false, stale: false, on_path: true, head: false },
  ...over,
});
const aside = { on_path: false, branch: true };
export const chatDone: Json = {
  schema: "mlxnb.chat/1",
  epoch: 4,
  name: "garden",
  model: MODEL,
  error: null,
  turns: [
    { id: "s", role: "system", text: "You help in a small kitchen garden. Answer briefly." },
    { id: "u1", turn: "t1", role: "user", text: "Bed 4 lost its mulch. What should I do first, with no budget this week?", cell: "[7]" },
    { id: "a1", turn: "t1", role: "assistant", run: 0 },
    { id: "u2", turn: "t5", role: "user", text: "And the week after, with 40 to spend?", cell: "[17]", others: ["t4", "t5"] },
    { id: "a2", turn: "t5", role: "assistant", run: 1, others: ["t5", "t6", "t7"] },
  ],
  tree: [
    row("t1", -1, [], "Bed 4 lost its mulch. What should I do first, with no budget this week?", "[7]", 62),
    row("t2", 0, [true], "Check bed 4. If it is too dry, order what we need for Friday.", "[9]", 209, { ...aside, stale: true }),
    row("t3", 1, [true], "Thank you. And bed 5?", "[10]", 41, { on_path: false, stale: true }),
    row("t4", 0, [true], "What if it does not rain until April?", "[11]", 188, aside),
    row("t6", 0, [true], "And the week after, with 40 to spend?", "", 104, aside),
    row("t5", 0, [], "And the week after, with 40 to spend?", "[17]", 96, { head: true }),
  ],
  runs: [
    run({ id: "c.0", text: GARDEN }),
    run({ id: "c.1", text: "Buy two bags of straw mulch and six emitters. That is about 38, and leaves the bed covered until April." }),
  ],
};
export const chatTree: Json = { ...chatDone, tab: "tree" };
export const chatLive: Json = {
  ...chatDone,
  turns: [
    ...(chatDone.turns as Json[]),
    { id: "u3", role: "user", text: "What if it does not rain until April?" },
    { id: "a3", role: "assistant", run: 2 },
  ],
  runs: [
    ...(chatDone.runs as Json[]),
    run({ id: "c.2", status: "running", text: "Then the mulch matters more than the emitters: a covered bed loses about half as much water, so" }),
  ],
};
export const chatFailed: Json = {
  ...chatDone,
  turns: [
    { id: "u1", role: "user", text: "Summarise the log above." },
    { id: "a1", role: "assistant", run: 0 },
  ],
  runs: [
    run({
      id: "c.9",
      status: "failed",
      text: "The log covers three days and",
      error: { kind: "memory", message: "The engine ran out of memory after 6 tokens.", hint: "Stop other runs, or ask for fewer rows." },
    }),
  ],
};
export const chatStale: Json = {
  ...chatDone,
  turns: [
    ...(chatDone.turns as Json[]).slice(0, 3),
    { id: "u9", turn: "t2", role: "user", text: "Which plants in bed 4 need shade?", cell: "[9]", stale: true },
    { id: "a9", turn: "t2", role: "assistant", text: "Lettuce and spinach, from May on.", run: null, stale: true },
  ],
  tree: [
    row("t1", -1, [], "Bed 4 lost its mulch. What should I do first, with no budget this week?", "[7]", 62, { head: true }),
    row("t2", 0, [false], "Which plants in bed 4 need shade?", "[9]", 30, { ...aside, stale: true }),
  ],
};
export const chatEmpty: Json = { schema: "mlxnb.chat/1", epoch: 0, name: "garden", model: MODEL, error: null, turns: [], runs: [] };

// -- monitor -----------------------------------------------------------------------------------------------------------

const WORK = [
  ["9", "[9] chat", 0, 10],
  ["10", "[10] summary", 3, 27],
  ["12a", "[12] A", 11, 34],
  ["12b", "[12] B", 11, 38],
  ["12c", "[12] C", 11, 31],
  ["12d", "[12] D", 11, 41],
  ["13a", "[13] loom 1", 30, 99],
  ["13b", "[13] loom 2", 32, 44],
  ["13c", "[13] loom 3", 33, 50],
  ["14", "[14] lab", 36, 99],
  ["13d", "[13] loom 4", 39, 99],
  ["13e", "[13] loom 5", 44, 99],
  ["16", "[16] draft", 50, 99],
] as const;

function snapshot(t: number, slots: (readonly [string, string, number, number])[], totals: { steps: number; tokens: number }, over: Json = {}): Json {
  const rows = slots.map(([id, label, from], slot) => ({
    slot,
    id,
    label,
    phase: t - from < 2 ? "prefill" : "running",
    tokens: Math.max(0, (t - from - 1) * (id === "16" ? 32 : 14)),
    prompt_tokens: 96,
    cached_tokens: 64,
    kv_bytes: 3e6 + (t - from) * 1.6e5,
  }));
  const kv = rows.reduce((sum, row) => sum + row.kv_bytes, 0);
  const waiting =
    t > 53 && slots.length
      ? [
          { id: "15", label: "[15] C", why: "waiting for memory: needs 196 MB" },
          { id: "17", label: "[17] chat", why: "behind [15]" },
        ]
      : [];
  return {
    t,
    state: "ready",
    error: null,
    backend: { device: "cpu" },
    loading: [],
    limits: { max_rows: 8, max_kv_bytes: null },
    ended: [{ id: "13c", how: "stopped" }],
    memory: { active_bytes: 269e6 + kv + 24e6, cache_bytes: 12e6, limit_bytes: 512e6 },
    models: [
      {
        name: MODEL,
        weights: "bf16",
        weight_bytes: 269e6,
        codec: "bf16",
        rows: rows.length,
        preparing: 0,
        queue: waiting.length,
        kv_bytes: kv,
        ...totals,
        slots: rows,
        waiting,
      },
    ],
    ...over,
  };
}

/** A minute of snapshots, one a second: rows join at the end and the last one moves into each hole. */
export function monitorBusy(): Json[] {
  const draw = random(5);
  const totals = { steps: 0, tokens: 0 };
  let slots: (readonly [string, string, number, number])[] = [];
  return Array.from({ length: 61 }, (_, t) => {
    for (let i = slots.length - 1; i >= 0; i--) {
      if (slots[i]![3] > t) continue;
      const last = slots.pop()!;
      if (i < slots.length) slots[i] = last;
    }
    slots = [...slots, ...WORK.filter(([, , from]) => from === t)];
    totals.steps += Math.round(13 + draw() * 2);
    totals.tokens += Math.round(slots.length * (13 + draw() * 2));
    return snapshot(t, [...slots], { ...totals });
  });
}
export const monitorIdle: Json[] = [snapshot(10, [], { steps: 40, tokens: 100 }), snapshot(250, [], { steps: 40, tokens: 100 })];
export const monitorFull: Json[] = [
  snapshot(
    10,
    WORK.slice(0, 8).map(([id, label, , end]) => [id, label, 0, end] as const),
    { steps: 40, tokens: 100 },
    { memory: { active_bytes: 503e6, cache_bytes: 0, limit_bytes: 512e6 } },
  ),
];
export const monitorDead: Json[] = [
  { state: "dead", error: "The engine thread stopped: out of memory.", models: [], loading: [], limits: {}, backend: null, t: 5 },
];
export const monitorLoading: Json[] = [
  {
    state: "ready",
    error: null,
    models: [],
    loading: [{ name: MODEL, phase: "hashing", done: 63e6, total: 92e6 }],
    limits: { max_rows: 8 },
    backend: { device: "cpu" },
    t: 5,
  },
];

// -- playground --------------------------------------------------------------------------------------------------------

export const playgroundDone: Json = {
  schema: "mlxnb.playground/1",
  epoch: 3,
  model: MODEL,
  mode: "chat",
  prompt: "Write one sentence about the sea at night.",
  error: null,
  settings: { temp: 0.7, top_p: 0.95, top_k: 0, min_p: 0.05, repetition_penalty: 1.05, max_tokens: 96, seed: 7 },
  runs: [run({ text: "The sea at night keeps its own light, a slow silver that moves under the pier and never quite reaches the shore." })],
};
export const playgroundLive: Json = { ...playgroundDone, runs: [run({ status: "running", text: "The sea at night keeps its own light, a slow" })] };
export const playgroundEmpty: Json = {
  schema: "mlxnb.playground/1",
  epoch: 0,
  model: MODEL,
  mode: "chat",
  prompt: "",
  error: null,
  settings: {},
  runs: [],
};

// -- stepper -----------------------------------------------------------------------------------------------------------

const RIVALS = [
  [" sea", 18.4],
  [" lamp", 18.15, 1],
  [" waves", 17.6],
  ["\n", 17.45],
  [" stairs", 17.05, 1],
  [" horizon", 16.9],
  [" ships", 16.3],
  [" stars", 15.95],
  [" Atlantic", 15.8],
  [" dark", 15.25],
  [" storm", 14.85],
  [" gulls", 14.2],
  [" night", 13.9],
  [" 🌊", 13.2],
  [" المحيط", 12.8],
] as const;

/** A step worked out as the engine does: penalties, log-softmax, top-p, min-p, XTC, top-k, temperature, noise. */
export function stepOf(settings: Json, position = 6): Json {
  const { temp = 0.8, top_p = 0.95, min_p = 0.05, top_k = 0, repetition_penalty = 1.12 } = settings as Record<string, number>;
  const draw = random(Math.round(Number(settings.seed ?? 11)) + position);
  const tail = 0.019;
  const spread = (scores: number[]) => Math.log(scores.reduce((sum, x) => sum + Math.exp(x), 0) / (1 - tail));
  const logits = RIVALS.map(([, logit]) => logit);
  const penalised = RIVALS.map(([, logit, seen]) => (seen ? logit / repetition_penalty : logit));
  const lse = spread(penalised);
  const logprobs = penalised.map((x) => x - lse);
  const order = logprobs.map((_, i) => i).sort((a, b) => logprobs[b]! - logprobs[a]!);
  const dropped = new Map<number, string>();
  let mass = 0;
  for (const i of order) {
    if (temp > 0 && top_p < 1 && mass >= top_p) dropped.set(i, "top_p");
    mass += Math.exp(logprobs[i]!);
  }
  const left = () => order.filter((i) => !dropped.has(i));
  const total = () => left().reduce((sum, i) => sum + Math.exp(logprobs[i]!), 0);
  const all = { left: 49152, mass: 1 };
  const now = () => (top_p < 1 || min_p > 0 || top_k > 0 ? { left: left().length, mass: total() } : all);
  const stages: Json[] = [{ name: "model", rule: "softmax", ...all }];
  if (repetition_penalty !== 1) stages.push({ name: "penalties", rule: `repetition ${repetition_penalty}`, ...all });
  if (temp > 0) {
    if (top_p < 1) stages.push({ name: "top_p", rule: String(top_p), ...now() });
    if (min_p > 0) {
      for (const i of left()) if (logprobs[i]! < Math.max(...logprobs) + Math.log(min_p)) dropped.set(i, "min_p");
      stages.push({ name: "min_p", rule: String(min_p), ...now() });
    }
    if (top_k > 0) {
      for (const i of left().slice(top_k)) dropped.set(i, "top_k");
      stages.push({ name: "top_k", rule: String(top_k), ...now() });
    }
    stages.push({ name: "temperature", rule: `÷ ${temp}`, ...now() });
  }
  const z = left().reduce((sum, i) => sum + Math.exp(logprobs[i]! / temp), 0);
  const candidates = RIVALS.map(([text, logit, seen = 0], id) => {
    const kept = !dropped.has(id);
    const noise = temp > 0 && kept ? -Math.log(-Math.log(draw())) : null;
    const probability_after = temp > 0 ? (kept ? Math.exp(logprobs[id]! / temp) / z : 0) : id === order[0] ? 1 : 0;
    return {
      id,
      text,
      logit,
      penalised: penalised[id],
      logprob: logprobs[id],
      kept,
      dropped_by: dropped.get(id) ?? null,
      probability_after,
      noise,
      seen,
    };
  });
  const sums = candidates.map((one) => (one.noise === null ? -Infinity : one.logprob! / temp + one.noise));
  const chosen = temp > 0 ? sums.indexOf(Math.max(...sums)) : order[0];
  return { position, vocab: 49152, logsumexp: spread(logits), chosen, coin: null, seconds: 0.068, stages, candidates };
}

const PAST = [
  ...["The", " keeper", " climbed", " the", " stairs", ","].map((text, id) => ({
    id,
    text,
    how: "prompt",
    probability: null,
    rank: null,
    dropped_by: null,
  })),
  { id: 20, text: " lit", how: "drawn", probability: 0.31, rank: 0, dropped_by: null },
  { id: 21, text: " the", how: "drawn", probability: 0.871, rank: 0, dropped_by: null },
  { id: 22, text: " lamp", how: "hand", probability: 0.021, rank: 5, dropped_by: "min_p" },
  { id: 23, text: " and", how: "drawn", probability: 0.612, rank: 0, dropped_by: null },
  { id: 24, text: " watched", how: "drawn", probability: 0.208, rank: 1, dropped_by: null },
  { id: 25, text: " the", how: "drawn", probability: 0.871, rank: 0, dropped_by: null },
];
const SETTINGS = {
  temp: 0.8,
  top_p: 0.95,
  min_p: 0.05,
  top_k: 0,
  repetition_penalty: 1.12,
  seed: 11,
  xtc_probability: 0,
  presence_penalty: null,
  frequency_penalty: null,
};
export const stepperReady: Json = {
  schema: "mlxnb.stepper/1",
  status: "ready",
  model: MODEL,
  error: null,
  finish_reason: null,
  settings: SETTINGS,
  past: PAST,
  step: stepOf(SETTINGS),
};
const GREEDY = { ...SETTINGS, temp: 0, repetition_penalty: 1 };
export const stepperGreedy: Json = { ...stepperReady, settings: GREEDY, step: stepOf(GREEDY) };
export const stepperDone: Json = { ...stepperReady, status: "done", finish_reason: "stop", step: null };
export const stepperFailed: Json = {
  ...stepperReady,
  status: "failed",
  step: null,
  error: { kind: "engine", message: "The engine was closed.", hint: "Run the cell again to start a fresh one." },
};
export const stepperLoading: Json = { ...stepperReady, status: "loading", past: [], step: null };
