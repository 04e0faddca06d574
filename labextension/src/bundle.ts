/** The bundle of the views, one per page: what a live widget has loaded already, else the file beside this extension. */

declare const __webpack_public_path__: string;
declare const __BUNDLE__: string;
declare const __VERSION__: string;

export interface RecordSignal {
  value: unknown;
  subscribe(take: (value: unknown) => void): () => void;
}

export interface Host {
  readonly live: boolean;
  readonly record: RecordSignal;
  command(name: string, args?: object): Promise<unknown>;
  readonly setting: object;
}

/** What this extension uses of widgets/src/bundle.tsx. */
export interface Bundle {
  readonly version: string;
  mount(el: HTMLElement, kind: string, host: Host): () => void;
  savedHost(record: unknown): Host;
  liveHost(model: object, session: object): Host & { dispose(): void };
  kindOf(record: unknown): string;
}

/** The loader of the live widgets looks here too. */
const SLOT = Symbol.for('mlxnb.bundle');
const page = globalThis as { [SLOT]?: { version: string; hash: string; ready: Promise<Bundle>; bundle?: Bundle } };

export function loadBundle(): Promise<Bundle> {
  const had = page[SLOT];
  if (had?.version === __VERSION__ && had.hash === __BUNDLE__) return had.ready;
  const url = new URL(`${__webpack_public_path__}mlxnb/bundle.js?v=${__BUNDLE__}`, document.baseURI).href;
  const ready = import(/* webpackIgnore: true */ url) as Promise<Bundle>;
  const slot: NonNullable<(typeof page)[typeof SLOT]> = { version: __VERSION__, hash: __BUNDLE__, ready };
  page[SLOT] = slot;
  ready.then(
    bundle => (slot.bundle = bundle),
    () => page[SLOT] === slot && delete page[SLOT]
  );
  return ready;
}

/** The bundle if it is there already, for who must draw now. */
export function loadedBundle(): Bundle | null {
  const had = page[SLOT];
  return had?.version === __VERSION__ && had.hash === __BUNDLE__ ? (had.bundle ?? null) : null;
}
