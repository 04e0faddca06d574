/** Completion in `%%mlx` cells while the kernel is busy or absent, when Jupyter's own waits for it.
 *
 * Options and their fixed values come from a table. Names in the notebook come from the kernel by the control channel, which it
 * reads while a cell runs. An idle kernel is asked too: it may become busy before it answers Jupyter.
 */

import type { CompletionHandler, ICompletionContext, ICompletionProvider } from '@jupyterlab/completer';

import type { EngineLink } from './engine';
import { links } from './links';
import { isPrompt, suggest, type Suggestion, type Suggestions } from './prompt';

/** Less than JupyterLab waits for a provider by default (1 s): what the table knows must not be lost with a late kernel. */
const ANSWER_WITHIN_MS = 900;

export class PromptCompletions implements ICompletionProvider {
  readonly identifier = 'mlxnb:options';
  /** Before the kernel's (about 500): the same names, with their meaning. JupyterLab drops the second of two that are equal. */
  readonly rank = 1100;
  readonly renderer = null;

  async isApplicable(context: ICompletionContext): Promise<boolean> {
    const editor = context.editor;
    if (!editor) return false;
    const text = editor.model.sharedModel.getSource();
    const known = suggest(text, editor.getOffsetAt(editor.getCursorPosition()));
    return known !== null || (isPrompt(text) && linkOf(context) !== null);
  }

  /** Offsets of Jupyter count code points, those of `suggest` UTF-16 units. */
  async fetch(request: CompletionHandler.IRequest, context: ICompletionContext): Promise<CompletionHandler.ICompletionItemsReply> {
    const { text, offset } = request;
    const points = [...text];
    const known = suggest(text, points.slice(0, offset).join('').length);
    const start = known ? [...text.slice(0, known.from)].length : null;
    const link = linkOf(context);
    const named = link ? await ask(link, text, offset) : null;
    if (!named || (start !== null && named.from !== start)) return reply(known?.items ?? [], start ?? offset, offset);
    const details = new Map(known?.items.map(item => [item.label, item.detail]));
    const fromKernel = named.items.filter(item => !details.has(item.label));
    return reply([...(known?.items ?? []), ...fromKernel], named.from, named.to);
  }
}

function reply(items: readonly Suggestion[], start: number, end: number): CompletionHandler.ICompletionItemsReply {
  return {
    start,
    end,
    items: items.map(({ label, detail }) => ({ label, insertText: label, type: detail ? 'option' : 'mlxnb', documentation: detail || undefined }))
  };
}

/** The engine behind this editor, if its kernel has one. */
function linkOf(context: ICompletionContext): EngineLink | null {
  const link = links()?.at(context.widget.node) ?? null;
  return link?.isOpen ? link : null;
}

/** The kernel's own matches; positions in code points. Null if it does not say in time. */
async function ask(link: EngineLink, text: string, cursor: number): Promise<Suggestions | null> {
  try {
    const answer = (await link.command('complete', { text, cursor }, { withinMs: ANSWER_WITHIN_MS })) as Record<string, unknown>;
    const { matches, start, end } = answer;
    if (!Array.isArray(matches) || typeof start !== 'number' || typeof end !== 'number') return null;
    return { from: start, to: end, items: matches.filter(match => typeof match === 'string').map(label => ({ label, detail: '' })) };
  } catch (error) {
    console.debug('mlxnb: the kernel did not complete', error);
    return null;
  }
}
