import { python } from '@codemirror/lang-python';
import { IndentContext, getIndentation, language } from '@codemirror/language';
import { EditorState } from '@codemirror/state';

import { promptHighlight } from '../src/highlight';

/** An editor as a notebook makes it: Python, and after it what this extension adds. */
const editor = (doc: string) => EditorState.create({ doc, extensions: [python(), promptHighlight(doc)] });
const name = (state: EditorState) => state.facet(language)?.name;
const typed = (state: EditorState, from: number, to: number, insert: string) => state.update({ changes: { from, to, insert } }).state;

it('takes the place of Python in a prompt cell, and gives it back', () => {
  const prompt = editor('%%mlx\nfor a reason:');
  expect(name(prompt)).toBe('mlxnb-prompt');
  const code = typed(prompt, 0, 6, '');
  expect(name(code)).toBe('python');
  expect(name(typed(code, 0, 0, '\n%%mlx\n'))).toBe('mlxnb-prompt');
});
it('leaves Python cells alone', () => expect(name(editor('x = 1\n%%mlx'))).toBe('python'));
it('survives a change of everything at once', () => {
  const state = editor('x');
  const changed = state.update({ changes: { from: 0, to: 1, insert: '%%mlx -n 2\n{{ x }}' } });
  expect(name(changed.state)).toBe('mlxnb-prompt');
  expect(name(changed.state.update({ changes: { from: 0, to: changed.state.doc.length, insert: '' } }).state)).toBe('python');
});
it('does not indent prose after a colon, as it does code', () => {
  // As the Enter key asks: what if the line broke at the end of the text?
  const afterEnter = (doc: string) => getIndentation(new IndentContext(editor(doc), { simulateBreak: doc.length }), doc.length) ?? 0;
  expect(afterEnter('if x:')).toBeGreaterThan(0);
  expect(afterEnter('%%mlx\nif you think of this:')).toBe(0);
});
it('does not close an apostrophe as if it began a string', () => {
  const brackets = (state: EditorState) => state.languageDataAt<{ brackets?: string[] }>('closeBrackets', state.doc.length)[0]?.brackets ?? [];
  expect(brackets(editor('x = '))).toContain("'");
  expect(brackets(editor('%%mlx\ndon'))).not.toContain("'");
});
