/** Looks for live views that ended without a word to this page, whenever there may be one. */

import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';

import { replaceViews } from './commands';
import type { EngineLink } from './engine';
import type { Engines } from './engines';

/** Lets what comes with an event come first. A closed view leaves a gap on the page, so that one is looked after at once. */
const SOON_MS = 150;

/** When an engine's link opens (a notebook was loaded again), a connection comes back, a view is closed or the kernel comes to rest. */
export function replaceDeadViews(tracker: INotebookTracker, engines: Engines): void {
  tracker.forEach(panel => follow(panel, engines));
  tracker.widgetAdded.connect((_, panel) => follow(panel, engines));
}

function follow(panel: NotebookPanel, engines: Engines): void {
  const context = panel.sessionContext;
  let timer = 0;
  let known: EngineLink | null = null;
  const look = () => {
    timer = 0;
    replaceViews(panel, engines.of(panel)).catch(() => undefined); // a kernel that is gone: the next one tells
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
  context.statusChanged.connect((_, status) => status === 'idle' && soon());
  context.connectionStatusChanged.connect((_, status) => status === 'connected' && soon());
  context.iopubMessage.connect((_, message) => message.header.msg_type === 'comm_close' && soon(0));
  engines.changed.connect(onLink);
  panel.disposed.connect(() => {
    window.clearTimeout(timer);
    engines.changed.disconnect(onLink);
  });
  onLink();
}
