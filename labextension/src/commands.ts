/** What the commands do. Each works on the notebook in front; stopping works while cells run. */

import type { CodeCell, ICodeCellModel } from '@jupyterlab/cells';
import type { IOutput } from '@jupyterlab/nbformat';
import { NotebookActions, type NotebookPanel } from '@jupyterlab/notebook';

import type { EngineLink } from './engine';
import { dataOf, entries, isDict, RUN_MIME, WIDGET_MIME, type Dict } from './outputs';
import { isPrompt } from './prompt';

const STOP_WITHIN_MS = 150;
const OVER: ReadonlySet<unknown> = new Set(['done', 'stopped', 'failed']);

/** The active cell, if it is a `%%mlx` cell. */
export function activePrompt(panel: NotebookPanel | null): CodeCell | null {
  const cell = panel?.content.activeCell;
  return cell?.model.type === 'code' && isPrompt(cell.model.sharedModel.getSource()) ? (cell as CodeCell) : null;
}

/** Stop the answers of one cell: through the engine, else, if the cell is running, by an interrupt of the kernel. */
export async function stop(panel: NotebookPanel, link: EngineLink | null): Promise<void> {
  const cell = panel.content.activeCell;
  if (!cell) return;
  try {
    const sources = entries(await required(link).command('sources', {}, { withinMs: STOP_WITHIN_MS }));
    const ours = sources.filter(one => one.cell_id === cell.model.id && one.done !== true);
    const keys = ours.flatMap(one => (typeof one.key === 'string' ? [one.key] : []));
    await Promise.all(keys.map(key => required(link).command('stop', {}, { key, withinMs: STOP_WITHIN_MS })));
    if (keys.length) return;
  } catch {
    // No engine answers on this kernel, or not in time.
  }
  if (isRunning(cell as CodeCell)) await panel.sessionContext.session?.kernel?.interrupt();
}

/** Stop every answer of a kernel. The interrupt of a running cell stops that cell's, whatever the engine says. */
export async function stopAll(panel: NotebookPanel, link: EngineLink | null): Promise<void> {
  try {
    await required(link).command('stop_all', {}, { withinMs: STOP_WITHIN_MS });
  } catch {
    // A kernel's status says idle after any message that a subshell answered, so the cells are asked.
    if (panel.content.widgets.some(cell => isRunning(cell as CodeCell))) await panel.sessionContext.session?.kernel?.interrupt();
  }
}

/** Run the active prompt cell again, stopping the answer that it is writing. */
export async function regenerate(panel: NotebookPanel, link: EngineLink | null): Promise<void> {
  const cell = activePrompt(panel);
  if (!cell) return;
  if (isRunning(cell)) await stop(panel, link);
  await NotebookActions.run(panel.content, panel.sessionContext);
}

/** Put answers and open views back whose outputs were lost, as by a reload of the page during a run; how many.
 *
 * The kernel knows the last answer of each cell. It takes the place of a dead view, or of an older answer; else it is added.
 */
export async function repairOutputs(panel: NotebookPanel, link: EngineLink | null): Promise<number> {
  let repaired = 0;
  const kept = entries(await required(link).command('outputs'));
  const last = new Map(kept.flatMap(one => (typeof one.cell_id === 'string' ? [[one.cell_id, one] as const] : [])));
  for (const cell of panel.content.widgets) {
    const saved = last.get(cell.model.id);
    if (!saved || cell.model.type !== 'code' || isRunning(cell as CodeCell)) continue;
    const outputs = (cell.model as ICodeCellModel).outputs;
    const shown = outputs.toJSON();
    if (!isDict(saved.data) || shown.some(output => shows(output, saved.data as Dict))) continue;
    const output = { output_type: 'display_data', data: saved.data, metadata: {} } as IOutput;
    const old = shown.findIndex(one => WIDGET_MIME in dataOf(one) || RUN_MIME in dataOf(one));
    if (old >= 0) outputs.set(old, output);
    else outputs.add(output);
    repaired += 1;
  }
  return repaired;
}

/** Put finished answers in the place of their own live views, which end with the answer; how many.
 *
 * A view that a reloaded page took over is not told what stays: the kernel's word goes to the execution, which that page does not
 * know. Only the very view is replaced, so an output that a person took away does not come back.
 */
export async function replaceViews(panel: NotebookPanel, link: EngineLink | null): Promise<number> {
  if (!link?.isOpen || !viewsIn(panel).size) return 0;
  const waits = (one: Dict) => viewsIn(panel).has(one.model_id) || viewsIn(panel).has(one.key);
  const over = entries(await link.command('sources')).filter(one => one.done === true && one.open !== true && waits(one));
  if (!over.length) return 0;
  let replaced = 0;
  for (const saved of entries(await link.command('outputs'))) {
    const place = viewsIn(panel).get(saved.model_id) ?? viewsIn(panel).get(saved.key);
    if (!place || !isDict(saved.data) || WIDGET_MIME in saved.data) continue;
    place.outputs.set(place.index, { output_type: 'display_data', data: saved.data, metadata: {} } as IOutput);
    replaced += 1;
  }
  return replaced;
}

type Place = { readonly outputs: ICodeCellModel['outputs']; readonly index: number };

/**
 * The live views in the outputs of a notebook, by the id of their model. A view that its kernel closed before the engine's link was
 * open has become the record that was saved with it: if that is not the end of its runs, it is found by its key.
 */
function viewsIn(panel: NotebookPanel): Map<unknown, Place> {
  const found = new Map<unknown, Place>();
  for (const cell of panel.content.model?.cells ?? []) {
    if (cell.type !== 'code' || (cell as ICodeCellModel).executionState === 'running') continue;
    const { outputs } = cell as ICodeCellModel;
    for (let index = 0; index < outputs.length; index++) {
      const data = dataOf(outputs.get(index).toJSON());
      const view = data[WIDGET_MIME];
      if (isDict(view) && typeof view.model_id === 'string') found.set(view.model_id, { outputs, index });
      else if (goesOn(data[RUN_MIME])) found.set(keyOf(data), { outputs, index });
    }
  }
  return found;
}

function goesOn(record: unknown): boolean {
  if (!isDict(record) || typeof record.key !== 'string') return false;
  const runs = Array.isArray(record.runs) ? entries(record.runs) : [record];
  return runs.some(run => !OVER.has(run.status));
}

/** What tells an answer from all others: its key, which names the kernel's session too. */
function keyOf(data: Dict): unknown {
  const record = data[RUN_MIME];
  return isDict(record) ? record.key : undefined;
}

/** The very answer is there already, as what stays or as the view that is open. */
function shows(output: IOutput, data: Dict): boolean {
  const key = keyOf(data);
  return key !== undefined && keyOf(dataOf(output)) === key && WIDGET_MIME in dataOf(output) === WIDGET_MIME in data;
}

function isRunning(cell: CodeCell): boolean {
  return cell.model.type === 'code' && (cell.model as ICodeCellModel).executionState === 'running';
}

function required(link: EngineLink | null): EngineLink {
  if (!link) throw new Error('There is no kernel behind this notebook.');
  return link;
}
