import { saved } from '../src/keep';
import { RUN_MIME, WIDGET_MIME } from '../src/outputs';

const VIEW = { version_major: 2, version_minor: 0, model_id: 'm', mlxnb_key: 'k' };
const chat = (turns: number) => ({ schema: 'mlxnb.chat/1', key: 'k', turns: Array.from({ length: turns }, (_, id) => ({ id })) });
const shown = (record: object) => ({ [WIDGET_MIME]: VIEW, [RUN_MIME]: record, 'text/html': '<b>old</b>', 'text/plain': 'old' });

it('saves an open view as what it holds now, without the widget that ends with its kernel', () => {
  const data = saved(shown(chat(0)), { record: () => chat(2), text: () => 'You:\n1 < 2 & 3\n\nModel:\n</pre><img src=x onerror=alert(1)>' });
  expect(WIDGET_MIME in data).toBe(false);
  expect(data[RUN_MIME]).toEqual(chat(2));
  expect(data['text/plain']).toContain('1 < 2 & 3');
  expect(data['text/html']).toBe(
    '<pre style="white-space:pre-wrap">\nYou:\n1 &lt; 2 &amp; 3\n&#10;Model:\n&lt;/pre&gt;&lt;img src=x onerror=alert(1)&gt;</pre>'
  );
});
it('keeps the view of an answer that is still written: the kernel puts what stays in its place', () => {
  const run = { schema: 'mlxnb.run/1', key: 'k', status: 'running' };
  const data = saved(shown(run), { record: () => ({ ...run, text: 'so far' }), text: () => 'so far' });
  expect(data[WIDGET_MIME]).toEqual(VIEW);
  expect(data[RUN_MIME]).toEqual({ ...run, text: 'so far' });
});
it('saves what the output has where the view is not on the page', () => {
  expect(saved(shown(chat(1)), undefined)).toEqual({ [RUN_MIME]: chat(1), 'text/html': '<b>old</b>', 'text/plain': 'old' });
});
it.each([null, 7, 'x', [], { schema: 5 }, { schema: 'mlxnb.chat' }])('loses nothing to a record that is %j', record => {
  const data = saved(shown({}), { record: () => record, text: () => '' });
  expect(data['text/plain']).toBe('old');
  expect(data[WIDGET_MIME]).toEqual(VIEW);
});
