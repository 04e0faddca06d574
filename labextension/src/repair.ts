/** Looks for live views that ended without a word to this page, or whose kernel is gone, and for open ones that were saved. */

import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';

import { replaceViews } from './commands';
import type { EngineLink } from './engine';
import type { Engines } from './engines';
import { dropViews, keepOpenViews, reviveViews, viewIds } from './keep';

/** Lets what comes with an event come first. A closed view leaves a gap on the page, so that one is looked after at once. */
const SOON_MS = 150;
const WIDGETS = 'jupyter.widget';

/** When an engine's link opens (a notebook was loaded again), a connection comes back, a view is closed or the kernel comes to rest. */
export function replaceDeadViews(tracker: INotebookTracker, engines: Engines): void {
  tracker.forEach(panel => follow(panel, engines));
  tracker.widgetAdded.connect((_, panel) => follow(panel, engines));
}

function follow(panel: NotebookPanel, engines: Engines): void {
  const context = panel.sessionContext;
  let timer = 0;
  let known: EngineLink | null = null;
  /** Views whose widget this kernel is known to have, and keys of views that it was asked for. Each question makes it busy and idle. */
  let seen = new Set<string>();
  let asked = new Set<string>();
  const forget = () => {
    seen = new Set();
    asked = new Set();
  };
  const look = () => {
    timer = 0;
    const link = engines.of(panel);
    replaceViews(panel, link)
      .then(() => (link?.isOpen ? reviveViews(panel, link, asked) : 0))
      .then(() => dropLost())
      .catch(() => undefined); // a kernel that is gone: the next one tells
  };
  const dropLost = async () => {
    const ids = viewIds(panel);
    if ([...ids].every(id => seen.has(id))) return;
    const kernel = context.session?.kernel;
    // The ids first: a view that is made meanwhile is not looked for.
    const reply = await kernel?.requestCommInfo({ target_name: WIDGETS });
    const known = new Set(reply?.content.status === 'ok' ? Object.keys(reply.content.comms) : []);
    if (panel.isDisposed || kernel !== context.session?.kernel || (reply && reply.content.status !== 'ok')) return;
    dropViews(panel, known, ids);
    seen = known;
  };
  const soon = (pause = SOON_MS) => {
    if (panel.isDisposed) return;
    if (pause === 0) window.clearTimeout(timer);
    if (pause === 0 || timer === 0) timer = window.setTimeout(look, pause);
  };
  const onLink = () => {
    const link = engines.of(panel);
    const open = link?.isOpen ? link : null;
    if (open && open !== known) soon();
    known = open;
  };
  keepOpenViews(panel);
  context.statusChanged.connect((_, status) => {
    if (status === 'restarting' || status === 'autorestarting') forget();
    if (status === 'idle') soon();
  });
  context.kernelChanged.connect(() => {
    forget();
    soon();
  });
  void Promise.all([panel.context.ready, context.ready]).then(() => soon());
  context.connectionStatusChanged.connect((_, status) => status === 'connected' && soon());
  context.iopubMessage.connect((_, message) => message.header.msg_type === 'comm_close' && soon(0));
  engines.changed.connect(onLink);
  panel.disposed.connect(() => {
    window.clearTimeout(timer);
    engines.changed.disconnect(onLink);
  });
  onLink();
}
