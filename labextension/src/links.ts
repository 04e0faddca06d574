/** Lets a saved output find its notebook's engine. The MIME renderer is a plugin of its own, which JupyterLab gives no services. */

import type { ISignal } from '@lumino/signaling';

import type { EngineLink } from './engine';

export interface LinkFinder {
  /** The engine of the notebook that an element stands in. */
  at(node: HTMLElement): EngineLink | null;
  readonly changed: ISignal<unknown, void>;
}

/** Where the live views look for a way to their kernel that is open while a cell runs. */
const CONTROL = Symbol.for('mlxnb.control');

export function provideControl(post: (commId: string, data: object) => boolean): void {
  (globalThis as { [CONTROL]?: typeof post })[CONTROL] = post;
}

let finder: LinkFinder | null = null;

export function provideLinks(from: LinkFinder): void {
  finder = from;
}

/** Null where there is no notebook plugin, as in a viewer. */
export function links(): LinkFinder | null {
  return finder;
}
