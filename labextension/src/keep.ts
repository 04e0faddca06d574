/** Open views in notebook files: a live view is no output to keep, so what it holds is saved in its place, and comes back live. */

import type { ICodeCellModel } from '@jupyterlab/cells';
import type { IOutput } from '@jupyterlab/nbformat';
import type { NotebookPanel } from '@jupyterlab/notebook';

import type { EngineLink } from './engine';
import { dataOf, entries, isDict, RUN_MIME, WIDGET_MIME, type Dict } from './outputs';

/** What the bundle says of the views of this page, by key. */
interface OpenView {
  record(): unknown;
  text(): string;
}
const OPEN = Symbol.for('mlxnb.open');
const SILENT = 'silent-change';
/** Views that stay open until their kernel ends. Answers are saved by the kernel when they end. */
const STAYING = /^mlxnb\.(?:chat|playground|stepper|monitor|loom|cache)\//;

function openViews(): ReadonlyMap<string, OpenView> {
  return (globalThis as { [OPEN]?: Map<string, OpenView> })[OPEN] ?? new Map<string, OpenView>();
}

/** The key of a live view of ours in an output; "" for any other output. */
function keyOfView(output: Dict): string {
  const view = output[WIDGET_MIME];
  return isDict(view) && typeof view.mlxnb_key === 'string' ? view.mlxnb_key : '';
}

/** Text as markup. No blank line: nbconvert puts HTML into Markdown, where one would end it. */
function escaped(text: string): string {
  const inert = text.replace(/[&<>]/g, sign => ({ '&': '&amp;', '<': '&lt;', '>': '&gt;' })[sign] ?? '');
  return inert.replace(/(?<=\n)([ \t]*)\n/g, '$1&#10;');
}

/** The output as it is saved: the record of now, its words for other readers, and no live view if it would outlive its kernel. */
export function saved(data: Dict, view: OpenView | undefined): Dict {
  const record = view?.record() ?? data[RUN_MIME];
  const { [WIDGET_MIME]: live, ...rest } = data;
  const stays = isDict(record) && typeof record.schema === 'string' && STAYING.test(record.schema);
  const text = view?.text() ?? '';
  return {
    ...(stays ? {} : { [WIDGET_MIME]: live }),
    ...rest,
    ...(isDict(record) ? { [RUN_MIME]: record } : {}),
    ...(text ? { 'text/plain': text, 'text/html': `<pre style="white-space:pre-wrap">\n${escaped(text)}</pre>` } : {})
  };
}

/** Before a notebook is written. The page itself goes on showing its live views: only what is written changes. */
export function keepOpenViews(panel: NotebookPanel): void {
  panel.context.saveState.connect((_, state) => {
    if (state !== 'started') return;
    try {
      forEachOutput(panel, (cell, index) => {
        const output = cell.outputs.get(index).toJSON();
        const data = dataOf(output);
        const key = keyOfView(data);
        if (!key) return;
        const kept = { ...output, data: saved(data, openViews().get(key)) } as IOutput;
        // The origin by which JupyterLab itself writes to the document what the page shows already.
        cell.sharedModel.transact(() => cell.sharedModel.updateOutputs(index, index + 1, [kept as never]), false, SILENT);
      });
    } catch (error) {
      console.error('mlxnb: open views could not be saved', error); // the notebook is saved all the same
    }
  });
}

/** Saved views of this kernel that are open in it become live again; how many. asked: keys it was asked for, and did not have. */
export async function reviveViews(panel: NotebookPanel, link: EngineLink, asked: Set<string>): Promise<number> {
  const asleep = new Map<string, { model: ICodeCellModel; index: number; data: Dict }>();
  forEachOutput(panel, (model, index) => {
    const data = dataOf(model.outputs.get(index).toJSON());
    const record = data[RUN_MIME];
    if (WIDGET_MIME in data || !isDict(record) || typeof record.key !== 'string') return;
    if (typeof record.schema === 'string' && STAYING.test(record.schema)) asleep.set(record.key, { model, index, data });
  });
  if ([...asleep.keys()].every(key => asked.has(key))) return 0;
  for (const key of asleep.keys()) asked.add(key);
  const sources = entries(await link.command('sources'));
  return unchanged(panel, () => revive(asleep, sources));
}

type Asleep = ReadonlyMap<string, { readonly model: ICodeCellModel; readonly index: number; readonly data: Dict }>;

function revive(asleep: Asleep, sources: readonly Dict[]): number {
  let revived = 0;
  for (const one of sources) {
    const place = typeof one.key === 'string' && one.open === true ? asleep.get(one.key) : undefined;
    if (!place || typeof one.model_id !== 'string' || place.model.outputs.length <= place.index) continue;
    const view = { version_major: 2, version_minor: 0, model_id: one.model_id, mlxnb_key: one.key };
    place.model.outputs.set(place.index, { output_type: 'display_data', data: { [WIDGET_MIME]: view, ...place.data }, metadata: {} } as IOutput);
    revived += 1;
  }
  return revived;
}

/** Live views of ours whose widget no kernel has become what was saved with them; how many. known: ids of the kernel's widgets. */
export function dropViews(panel: NotebookPanel, known: ReadonlySet<string>, looked: ReadonlySet<string>): number {
  return unchanged(panel, () => drop(panel, known, looked));
}

function drop(panel: NotebookPanel, known: ReadonlySet<string>, looked: ReadonlySet<string>): number {
  let dropped = 0;
  forEachOutput(panel, (model, index) => {
    const output = model.outputs.get(index).toJSON();
    const data = dataOf(output);
    const id = idOfView(data);
    if (!id || known.has(id) || !looked.has(id)) return;
    const { [WIDGET_MIME]: gone, ...rest } = data;
    model.outputs.set(index, { ...output, data: rest } as IOutput);
    dropped += 1;
  });
  return dropped;
}

/** What is only shown in another way is no change that a person would have to save. */
function unchanged(panel: NotebookPanel, act: () => number): number {
  const model = panel.isDisposed ? null : panel.context.model;
  if (!model) return 0;
  const { dirty } = model;
  const count = act();
  if (!dirty) model.dirty = false;
  return count;
}

/** Ids of the widgets of our live views in a notebook. */
export function viewIds(panel: NotebookPanel): Set<string> {
  const found = new Set<string>();
  forEachOutput(panel, ({ outputs }, index) => {
    const id = idOfView(dataOf(outputs.get(index).toJSON()));
    if (id) found.add(id);
  });
  return found;
}

function idOfView(data: Dict): string {
  const view = data[WIDGET_MIME];
  return keyOfView(data) && isDict(view) && typeof view.model_id === 'string' ? view.model_id : '';
}

function forEachOutput(panel: NotebookPanel, take: (cell: ICodeCellModel, index: number) => void): void {
  for (const cell of panel.content.model?.cells ?? []) {
    if (cell.type !== 'code') continue;
    const model = cell as ICodeCellModel;
    for (let index = 0; index < model.outputs.length; index++) take(model, index);
  }
}
