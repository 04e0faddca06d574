/** Fetches the parts of the bundle that few views need: from beside the bundle, or as text from whoever gave us the bundle. */

export interface ChunkTypes {
  highlight: typeof import("./chunks/highlight");
  chart: typeof import("./chunks/chart");
  diff: typeof import("./chunks/diff");
  math: typeof import("./chunks/math");
  instruments: object;
  trees: object;
}
export type ChunkName = keyof ChunkTypes;
export type AssetSource = (file: string) => Promise<string>;

let source: AssetSource | null = null;
const loaded = new Map<ChunkName, Promise<unknown>>();

/** Where text of a file comes from when the bundle itself was imported from a Blob. */
export function setAssetSource(from: AssetSource): void {
  source = from;
}

export async function importText<T>(text: string): Promise<T> {
  const url = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
  try {
    return (await import(/* @vite-ignore */ url)) as T;
  } finally {
    URL.revokeObjectURL(url);
  }
}

/** The chunk, loaded once per page. Rejects if it cannot be had; the caller goes on without it. */
export function chunk<N extends ChunkName>(name: N): Promise<ChunkTypes[N]> {
  let pending = loaded.get(name);
  if (!pending) {
    pending = load(name);
    loaded.set(name, pending);
    pending.catch(() => loaded.delete(name));
  }
  return pending as Promise<ChunkTypes[N]>;
}

async function load(name: ChunkName): Promise<unknown> {
  const file = `${name}.js`;
  const base = import.meta.url;
  if (/^(https?|file):/.test(base)) return import(/* @vite-ignore */ new URL(file, base).href);
  if (!source) throw new Error(`There is nowhere to get ${file} from.`);
  return importText(await source(file));
}
