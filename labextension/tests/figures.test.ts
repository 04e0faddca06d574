import { bytes, figuresOf, speed, statusLine, type Words } from '../src/figures';

const say: Words = (text, ...values) => text.replace(/%(\d)/g, (_, n) => String(values[Number(n) - 1]));
const model = { name: 'org/Tiny-4bit', rows: 3, queue: 1, preparing: 0, kv_bytes: 444_000_000, weight_bytes: 2_280_000_000, tokens: 100 };
const line = (status: unknown, perSecond: number | null = null) => statusLine(figuresOf(status), perSecond, say);

it('says model, rows, speed and KV', () => {
  expect(line({ state: 'ready', models: [model] }, 142.4)).toEqual({ mood: 'live', text: 'Tiny-4bit · 3 rows · 1 waits · 142 tok/s · KV 444 MB' });
});
it('says that nothing runs, that a model loads, that there is none, that the engine is dead', () => {
  expect(line({ models: [{ ...model, rows: 0, queue: 0 }] })).toEqual({ mood: 'ok', text: 'Tiny-4bit · idle · KV 444 MB' });
  expect(line({ models: [], loading: [{ name: 'a/B', done: 62, total: 100 }] }).text).toBe('B · loading 62 %');
  expect(line({ models: [], loading: [{ name: 'a/B', done: 0, total: 0 }] }).text).toBe('B · loading');
  expect(line({ state: 'not started', models: [] }).text).toBe('mlxnb · no model yet');
  expect(line({ state: 'dead', models: [model] }).mood).toBe('warn');
});
it('names the model that works, where there are several', () => {
  expect(figuresOf({ models: [{ ...model, name: 'x/idle', rows: 0 }, model] }).model).toBe('Tiny-4bit');
});
it.each([null, 7, 'x', [], { models: 7 }, { models: [null, 'x', { rows: 'many', kv_bytes: -1, name: 5 }] }, { loading: [3] }, { models: [{ rows: Infinity, tokens: NaN }] }])(
  'takes %j for a status and shows no nonsense',
  status => expect(line(status, null).text).not.toMatch(/undefined|NaN|null|Infinity|object/)
);
it('tells a speed only between two counts of one engine', () => {
  const now = (t: number, tokens: number) => figuresOf({ t, models: [{ ...model, tokens }] });
  expect(speed(now(1, 100), now(3, 300))).toBe(100);
  expect(speed(null, now(3, 300))).toBeNull();
  expect(speed(now(3, 300), now(3, 300))).toBeNull();
  expect(speed(now(1, 300), now(3, 100))).toBeNull();
  expect(speed(figuresOf({ t: 1, models: [{}] }), now(3, 100))).toBeNull();
});
it.each([[0, '0 B'], [999, '999 B'], [1000, '1.0 kB'], [9_990, '10.0 kB'], [99_960, '100 kB'], [444_000_000, '444 MB'], [2_280_000_000, '2.3 GB']])('writes %d bytes as %s', (value, text) => {
  expect(bytes(value)).toBe(text);
});
