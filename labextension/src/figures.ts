/** The engine's status as the status bar says it. A status may hold anything. Pure. */

export interface Figures {
  readonly t: number;
  readonly state: string;
  readonly error: string;
  /** The model that works, or the first one; "" for none. */
  readonly model: string;
  readonly models: readonly string[];
  readonly loading: { readonly name: string; readonly percent: number | null } | null;
  readonly rows: number;
  readonly waiting: number;
  /** Produced so far by all rows; null where the engine does not say. */
  readonly tokens: number | null;
  readonly kvBytes: number;
  readonly weightBytes: number;
}

type Dict = Readonly<Record<string, unknown>>;
const dict = (value: unknown): Dict => (typeof value === 'object' && value !== null && !Array.isArray(value) ? (value as Dict) : {});
const list = (value: unknown): Dict[] => (Array.isArray(value) ? value.slice(0, 32).map(dict) : []);
const count = (value: unknown): number => (typeof value === 'number' && Number.isFinite(value) && value > 0 ? value : 0);
const text = (value: unknown, most = 80): string => (typeof value === 'string' ? value.slice(0, most) : '');

export function figuresOf(status: unknown): Figures {
  const all = dict(status);
  const models = list(all.models);
  const sum = (name: string) => models.reduce((total, model) => total + count(model[name]), 0);
  const working = models.find(model => count(model.rows) > 0) ?? models[0];
  const loading = list(all.loading)[0];
  const total = count(loading?.total);
  return {
    t: count(all.t),
    state: text(all.state),
    error: text(all.error, 300),
    model: shortName(text(working?.name, 300)),
    models: models.map(model => text(model.name, 300)),
    loading: loading ? { name: shortName(text(loading.name, 300)), percent: total ? Math.min(100, Math.floor((100 * count(loading.done)) / total)) : null } : null,
    rows: sum('rows'),
    waiting: sum('queue') + sum('preparing'),
    tokens: models.some(model => typeof model.tokens === 'number') ? sum('tokens') : null,
    kvBytes: sum('kv_bytes'),
    weightBytes: sum('weight_bytes')
  };
}

/** The last part of a repository's or file's name. */
function shortName(name: string): string {
  return name.replace(/\/+$/, '').split('/').at(-1) ?? name;
}

/** Tokens per second between two statuses; null where it cannot be told. */
export function speed(before: Figures | null, now: Figures): number | null {
  if (!before || before.tokens === null || now.tokens === null || now.t <= before.t || now.tokens < before.tokens) return null;
  return (now.tokens - before.tokens) / (now.t - before.t);
}

/** Three digits at most, decimal units. */
export function bytes(value: number): string {
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  let at = 0;
  while (value >= 999.5 && at < units.length - 1) {
    value /= 1000;
    at += 1;
  }
  return `${at === 0 || value >= 99.95 ? Math.round(value) : value.toFixed(1)} ${units[at]}`;
}

export function rate(perSecond: number): string {
  return `${perSecond >= 99.5 ? Math.round(perSecond) : perSecond.toFixed(1)} tok/s`;
}

/** Words that a front end translates; the key is the English text. %1 stands for a number or a name. */
export type Words = (text: string, ...values: (string | number)[]) => string;

export interface Line {
  readonly mood: 'live' | 'ok' | 'wait' | 'warn';
  readonly text: string;
}

/** The one line of the status bar. */
export function statusLine(now: Figures, perSecond: number | null, say: Words): Line {
  if (now.state === 'dead') return { mood: 'warn', text: say('mlxnb · engine stopped') };
  if (now.loading) {
    const percent = now.loading.percent;
    return { mood: 'wait', text: percent === null ? say('%1 · loading', now.loading.name) : say('%1 · loading %2 %', now.loading.name, percent) };
  }
  if (!now.model) return { mood: 'wait', text: say('mlxnb · no model yet') };
  const parts = [now.model];
  if (now.rows) parts.push(now.rows === 1 ? say('1 row') : say('%1 rows', now.rows));
  if (now.waiting) parts.push(now.waiting === 1 ? say('1 waits') : say('%1 wait', now.waiting));
  if (!now.rows && !now.waiting) parts.push(say('idle'));
  if (now.rows && perSecond !== null) parts.push(rate(perSecond));
  if (now.kvBytes) parts.push(`KV ${bytes(now.kvBytes)}`);
  return { mood: now.rows ? 'live' : now.waiting ? 'wait' : 'ok', text: parts.join(' · ') };
}
