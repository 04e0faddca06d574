import { isPrompt, spans, suggest, type Kind } from '../src/prompt';

/** Each part as `kind:text`. */
const parts = (text: string) => spans(text).map(({ from, to, kind }) => `${kind}:${text.slice(from, to)}`);
const ofKind = (text: string, kind: Kind) => spans(text).flatMap(span => (span.kind === kind ? [text.slice(span.from, span.to)] : []));
/** Completions at the mark `|`. */
const at = (marked: string) => {
  const position = marked.indexOf('|');
  return suggest(marked.replace('|', ''), position);
};
const labels = (marked: string) => at(marked)?.items.map(item => item.label) ?? null;

describe('which cells are prompts', () => {
  it.each(['%%mlx', '%%mlx -n 3\nhello', '\n  \n%%mlx\nx', '%%mlx\t--bg'])('takes %j', text => expect(isPrompt(text)).toBe(true));
  it.each(['', '%mlx status', '%%mlxx', ' %%mlx', 'x = 1\n%%mlx', '%%mlx-help', '# %%mlx'])('leaves %j alone', text => {
    expect(isPrompt(text)).toBe(false);
    expect(spans(text)).toEqual([]);
  });
});

describe('the option line', () => {
  it('marks options and the values that belong to them', () => {
    expect(parts('%%mlx -n 3 --temp=0.2 --system "be {{ mood }}" --bg')).toEqual([
      'magic:%%mlx', 'option:-n', 'value:3', 'option:--temp', 'value:=0.2', 'option:--system', 'value:"be ', 'insert:{{ mood }}', 'value:"', 'option:--bg'
    ]);
  });
  it('marks what is no option, but not what may still become one', () => {
    expect(ofKind('%%mlx --tmep 1', 'bad')).toEqual(['--tmep', '1']);
    expect(ofKind('%%mlx --te', 'bad')).toEqual([]);
    expect(ofKind('%%mlx --te 3', 'bad')).toEqual(['--te', '3']);
  });
  it('takes a number that begins with a dash as a value', () => expect(ofKind('%%mlx --presence-penalty -1', 'value')).toEqual(['-1']));
  it('keeps a quote that is never closed as text', () => expect(ofKind('%%mlx --system "be', 'value')).toEqual(['"be']));
  it('ends with its line, backslash or not', () => expect(parts('%%mlx --bg \\\n--temp 3').at(-1)).toBe('bad:\\'));
  it('reads a value that is stuck to a short flag', () => expect(parts('%%mlx -n4')).toEqual(['magic:%%mlx', 'option:-n', 'value:4']));
});

describe('insertions', () => {
  it('marks each, over line ends and around braces of its own', () => {
    const text = '%%mlx\na {{ x }} b {{\n {"k": "}}"}[y] }} {"json": 1} { $HOME';
    expect(ofKind(text, 'insert')).toEqual(['{{ x }}', '{{\n {"k": "}}"}[y] }}']);
    expect(ofKind(text, 'bad')).toEqual([]);
  });
  it('marks braces that are never closed', () => expect(ofKind('%%mlx\na {{ x b', 'bad')).toEqual(['{{']));
  it('leaves all alone under --raw-text', () => expect(parts('%%mlx --raw-text\n{{ x }}')).toEqual(['magic:%%mlx', 'option:--raw-text']));
  it('is quick on a very long prompt', () => expect(spans(`%%mlx\n${'{{ x }} '.repeat(100_000)}`).length).toBe(1));
  it('gives parts in order that never overlap, whatever the text', () => {
    const pieces = ['%%mlx', ' ', '\n', '{{', '}}', '"', "'", '\\', '--temp', '-n', 'é', '😀', '(', ']', '{', '}'];
    let seed = 7;
    const random = () => (seed = (seed * 16807) % 2147483647) / 2147483647;
    for (let trial = 0; trial < 3000; trial++) {
      const text = `%%mlx ${Array.from({ length: 12 }, () => pieces[Math.floor(random() * pieces.length)]).join('')}`;
      let end = 0;
      for (const span of spans(text)) {
        expect(span.from).toBeGreaterThanOrEqual(end);
        expect(span.to).toBeGreaterThan(span.from);
        end = span.to;
      }
      expect(end).toBeLessThanOrEqual(text.length);
    }
  });
});

describe('completion', () => {
  it('offers options that begin so, with what they mean', () => {
    expect(labels('%%mlx --top|')).toEqual(['--top-p', '--top-k']);
    expect(at('%%mlx --top|')).toMatchObject({ from: 6, to: 11 });
    expect(at('%%mlx --temp|')?.items[0]?.detail).toContain('greedy');
  });
  it('leaves out what is given, unless it may be given again', () => {
    expect(labels('%%mlx --temp 1 --te|')).toBeNull();
    expect(labels('%%mlx --stop x --sto|')).toEqual(['--stop']);
  });
  it('offers the values of a choice', () => {
    expect(labels('%%mlx --view |')).toEqual(['answer', 'tokens', 'raw', 'loom', 'none']);
    expect(labels('%%mlx --view=to|')).toEqual(['tokens']);
    expect(labels('%%mlx --sweep te|')).toEqual(['temp=']);
    expect(labels('%%mlx --temp |')).toBeNull();
  });
  it('offers the commands of %mlx', () => expect(labels('x = 1\n%mlx sta|')).toEqual(['status']));
  it('is silent in the prompt itself, in Python, and right behind the magic', () => {
    for (const text of ['%%mlx\n--te|', 'x --te|', '%%mlx|', '--te|mp', '%%mlx word|']) expect(at(text)).toBeNull();
  });
});
