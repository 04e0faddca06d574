/** The text of a `%%mlx` cell: what its parts are, and what can be completed. Pure: no editor, no kernel.
 *
 * Follows mlxnb/magic.py (which cells), options.py (words of the option line) and insert.py (`{{ }}`).
 */

import { COMMANDS, OPTIONS, SWEEPABLE, type Option } from './options';

export type Kind = 'magic' | 'option' | 'value' | 'insert' | 'bad';

/** A part of the text, from `from` up to `to`. Parts do not overlap and are in order. */
export interface Span {
  readonly from: number;
  readonly to: number;
  readonly kind: Kind;
}

/** The first line that is not blank begins with `%%mlx`. The option line is that line and no other. */
const FIRST = /^(?:[^\S\n]*\n)*%%mlx(?=\s|$)/;
const WORD = /(?:'[^']*'|"(?:\\[^]|[^"\\])*"|\\[\s"'\\]|[^\s'"\\]|['"\\])+/g;
const STEP = /'(?:\\[^]|[^'\\])*'|"(?:\\[^]|[^"\\])*"|[\][(){}]|[^\][(){}'"]+|['"]/y;
const BY_FLAG: ReadonlyMap<string, Option> = new Map(OPTIONS.flatMap(option => option.flags.map(flag => [flag, option] as const)));
const MAX_TEXT = 200_000;

export function isPrompt(text: string): boolean {
  return FIRST.test(text);
}

/** Where the options begin and end; null if this is no prompt cell. */
function optionLine(text: string): { from: number; to: number } | null {
  const first = FIRST.exec(text);
  if (!first) return null;
  const end = text.indexOf('\n', first[0].length);
  return { from: first[0].length, to: end < 0 ? text.length : end };
}

/** Every part that is not plain prompt text. A cell of more than 200,000 characters has its option line only. */
export function spans(text: string): Span[] {
  const line = optionLine(text);
  if (!line) return [];
  const found: Span[] = [{ from: line.from - 5, to: line.from, kind: 'magic' }];
  const words = wordsOf(text, line.from, line.to);
  found.push(...words.flatMap(word => optionSpans(text, word)));
  const raw = words.some(word => word.text === '--raw-text');
  if (!raw && text.length <= MAX_TEXT) found.push(...inserts(text, line.to, text.length, true));
  return found;
}

interface Word {
  readonly from: number;
  readonly to: number;
  readonly text: string;
  readonly role: 'flag' | 'value' | 'bad';
}

/** The words of the option line, each with its role: a flag, the value of the flag before it, or neither. */
function wordsOf(text: string, from: number, to: number): Word[] {
  const words: Word[] = [];
  let wants = false;
  for (const match of text.slice(from, to).matchAll(WORD)) {
    const start = from + match.index;
    const word = match[0];
    const role: Word['role'] = wants && !BY_FLAG.has(word) ? 'value' : roleOf(word, start + word.length === to);
    wants = role === 'flag' && takesNext(word);
    words.push({ from: start, to: start + word.length, text: word, role });
  }
  return words;
}

/** A word that may still become a flag, at the end of the line, is not yet wrong. */
function roleOf(word: string, last: boolean): 'flag' | 'bad' {
  if (BY_FLAG.has(flagOf(word))) return 'flag';
  if (last && [...BY_FLAG.keys()].some(flag => flag.startsWith(word))) return 'flag';
  return 'bad';
}

/** `--temp=0.2` and `-n4` carry their value with them. */
function flagOf(word: string): string {
  if (BY_FLAG.has(word)) return word;
  if (word.startsWith('--')) return word.split('=', 1)[0] ?? '';
  const short = word.slice(0, 2);
  return BY_FLAG.get(short)?.metavar ? short : word;
}

function takesNext(word: string): boolean {
  return Boolean(BY_FLAG.get(word)?.metavar);
}

function optionSpans(text: string, word: Word): Span[] {
  const { from, to, role } = word;
  if (role === 'bad') return [{ from, to, kind: 'bad' }];
  const flag = role === 'flag' ? flagOf(word.text) : '';
  const head: Span[] = flag ? [{ from, to: from + flag.length, kind: 'option' }] : [];
  return [...head, ...valueSpans(text, from + flag.length, to)];
}

function valueSpans(text: string, from: number, to: number): Span[] {
  const parts: Span[] = [];
  let at = from;
  for (const part of inserts(text, from, to, false)) {
    if (part.from > at) parts.push({ from: at, to: part.from, kind: 'value' });
    parts.push(part);
    at = part.to;
  }
  if (to > at) parts.push({ from: at, to, kind: 'value' });
  return parts;
}

/** `{{ expression }}` between two positions; braces that are never closed are marked as bad if so wished. */
function inserts(text: string, from: number, to: number, markBad: boolean): Span[] {
  const parts: Span[] = [];
  let at = from;
  while (at < to) {
    const start = text.indexOf('{{', at);
    if (start < 0 || start + 2 > to) break;
    const end = endOfInsert(text, start + 2, to);
    if (end === null) {
      if (markBad) parts.push({ from: start, to: start + 2, kind: 'bad' });
      break;
    }
    parts.push({ from: start, to: end + 2, kind: 'insert' });
    at = end + 2;
  }
  return parts;
}

/** Where the `}}` is that closes an expression: outside of strings and brackets. */
function endOfInsert(text: string, from: number, to: number): number | null {
  let depth = 0;
  STEP.lastIndex = from;
  for (let match = STEP.exec(text); match && match.index < to; match = STEP.exec(text)) {
    const step = match[0];
    if (step === '(' || step === '[' || step === '{') depth += 1;
    else if (step === '}' && depth === 0) return text.startsWith('}}', match.index) && match.index + 2 <= to ? match.index : null;
    else if (step === ')' || step === ']' || step === '}') depth -= 1;
    if (depth < 0) return null;
  }
  return null;
}

// --- completion -----------------------------------------------------------------------------------------------------

export interface Suggestion {
  readonly label: string;
  readonly detail: string;
}

export interface Suggestions {
  readonly from: number;
  readonly to: number;
  readonly items: readonly Suggestion[];
}

/** What fits at a position and is known without a kernel: options, their fixed values, commands of `%mlx`. Else null. */
export function suggest(text: string, at: number): Suggestions | null {
  const line = optionLine(text);
  if (line) return at > line.from && at <= line.to ? suggestOption(text, line.from, at) : null;
  const before = text.slice(text.lastIndexOf('\n', at - 1) + 1, at);
  const command = /^\s*%mlx\s+(\S*)$/.exec(before);
  return command ? matching(command[1] ?? '', at, COMMANDS.map(({ name, help }) => ({ label: name, detail: help }))) : null;
}

function suggestOption(text: string, from: number, at: number): Suggestions | null {
  const words = wordsOf(text, from, at);
  const typing = /\S$/.test(text.slice(from, at)) ? words.pop() : undefined;
  const last = typing?.text ?? '';
  const [flag = '', value] = last.split('=', 2);
  if (value !== undefined && BY_FLAG.has(flag)) return matching(value, at, valuesOf(BY_FLAG.get(flag)));
  const previous = words.at(-1);
  if (previous?.role === 'flag' && takesNext(previous.text)) return matching(last, at, valuesOf(BY_FLAG.get(previous.text)));
  if (last && !last.startsWith('-')) return null;
  const used = new Set(words.filter(word => word.role === 'flag').map(word => BY_FLAG.get(flagOf(word.text))?.name));
  const free = OPTIONS.filter(option => option.repeat || !used.has(option.name));
  return matching(last, at, free.map(option => ({ label: option.flags.at(-1) ?? '', detail: detailOf(option) })));
}

function detailOf(option: Option): string {
  return option.metavar ? `${option.metavar} · ${option.help}` : option.help;
}

function valuesOf(option: Option | undefined): Suggestion[] {
  if (!option) return [];
  if (option.name === 'sweep') return SWEEPABLE.map(name => ({ label: `${name}=`, detail: 'values, as in 0,.7,1 or 0:1:0.25' }));
  return option.choices.map(choice => ({ label: choice, detail: option.help }));
}

function matching(typed: string, at: number, all: readonly Suggestion[]): Suggestions | null {
  const items = all.filter(item => item.label.startsWith(typed));
  return items.length ? { from: at - typed.length, to: at, items } : null;
}
