/** `%%mlx` cells look like what they are: prose, with its option line and `{{ }}` marked.
 *
 * A cell that becomes a prompt changes its editor's language to plain text, at a precedence above the notebook's language: no
 * Python colours, indentation, quotes or comments. Cut off again when the first line changes.
 */

import { LanguageSupport, StreamLanguage, language } from '@codemirror/language';
import { Compartment, EditorState, Prec, StateField, type Extension, type Text } from '@codemirror/state';
import { Decoration, EditorView, type DecorationSet } from '@codemirror/view';

import { isPrompt, spans, type Kind } from './prompt';

const prose = StreamLanguage.define<null>({
  name: 'mlxnb-prompt',
  token(stream) {
    stream.skipToEnd();
    return null;
  },
  languageData: { closeBrackets: { brackets: ['(', '[', '{'] }, commentTokens: {} }
});

const marks: Readonly<Record<Kind, Decoration>> = {
  magic: Decoration.mark({ class: 'mlxnb-hl-magic' }),
  option: Decoration.mark({ class: 'mlxnb-hl-opt' }),
  value: Decoration.mark({ class: 'mlxnb-hl-val' }),
  insert: Decoration.mark({ class: 'mlxnb-hl-var' }),
  bad: Decoration.mark({ class: 'mlxnb-hl-bad' })
};

function decorate(doc: Text): DecorationSet {
  return Decoration.set(spans(doc.toString()).map(({ from, to, kind }) => marks[kind].range(from, to)));
}

const decorations = StateField.define<DecorationSet>({
  create: state => decorate(state.doc),
  update: (before, transaction) => (transaction.docChanged ? decorate(transaction.newDoc) : before),
  provide: field => EditorView.decorations.from(field)
});

const prompt: Extension = [
  Prec.highest(new LanguageSupport(prose).extension),
  decorations,
  EditorView.editorAttributes.of({ class: 'mlxnb-prompt-cell' })
];

/** Enough of the text to see its first line that is not blank. */
function head(doc: Text): string {
  for (let number = 1; number <= doc.lines; number++) {
    const { text } = doc.line(number);
    if (text.trim()) return text;
  }
  return '';
}

/** The extension of one editor. source: its text when it is made. */
export function promptHighlight(source: string): Extension {
  const slot = new Compartment();
  return [
    Prec.highest(slot.of(isPrompt(source) ? prompt : [])),
    EditorState.transactionExtender.of(transaction => {
      if (!transaction.docChanged) return null;
      const wanted = isPrompt(head(transaction.newDoc));
      const present = transaction.startState.facet(language) === prose;
      return wanted === present ? null : { effects: slot.reconfigure(wanted ? prompt : []) };
    })
  ];
}
