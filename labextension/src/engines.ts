/** The engine of each open notebook, and of the one in front. */

import { NotebookActions, type INotebookTracker, type Notebook, type NotebookPanel } from '@jupyterlab/notebook';
import { Signal, type ISignal } from '@lumino/signaling';

import { EngineLink } from './engine';
import type { LinkFinder } from './links';

const KERNEL = 'mlxnb';
/** Whoever writes this has loaded mlxnb, or is about to. Other kernels are left alone. */
const MENTIONS = /^\s*%%?mlx\b|\bmlxnb\b/m;

export class Engines implements LinkFinder {
  private readonly _links = new Map<NotebookPanel, EngineLink>();
  private readonly _changed = new Signal<this, void>(this);

  constructor(private readonly _tracker: INotebookTracker) {
    _tracker.forEach(panel => this._follow(panel));
    _tracker.widgetAdded.connect((_, panel) => this._follow(panel));
    _tracker.currentChanged.connect(() => this._changed.emit());
    NotebookActions.executed.connect((_, { notebook, cell }) => {
      if (MENTIONS.test(cell.model.sharedModel.getSource())) this._openFor(notebook);
    });
  }

  /** The status of an engine has come, changed or gone, or another notebook is in front. */
  get changed(): ISignal<this, void> {
    return this._changed;
  }

  get current(): EngineLink | null {
    return this.of(this._tracker.currentWidget);
  }

  of(panel: NotebookPanel | null): EngineLink | null {
    return (panel && this._links.get(panel)) ?? null;
  }

  at(node: HTMLElement): EngineLink | null {
    for (const [panel, link] of this._links) if (panel.node.contains(node)) return link;
    return null;
  }

  /** Send a message on the control channel of the kernel that has this comm; false if none has. Live views stop their answers so. */
  post(commId: string, data: object): boolean {
    for (const link of this._links.values()) {
      if (link.kernel.isDisposed || !link.kernel.hasComm(commId)) continue;
      link.post(commId, data);
      return true;
    }
    return false;
  }

  private _follow(panel: NotebookPanel): void {
    const context = panel.sessionContext;
    const renew = () => {
      this._links.get(panel)?.dispose();
      this._links.delete(panel);
      const kernel = context.session?.kernel;
      if (kernel && !panel.isDisposed) {
        const link = new EngineLink(kernel);
        this._links.set(panel, link);
        link.changed.connect(() => this._changed.emit());
        void this._openIfMentioned(panel, link);
      }
      this._changed.emit();
    };
    context.kernelChanged.connect(renew);
    context.statusChanged.connect((_, status) => {
      // After a restart our own kernel has the extension again; elsewhere the next cell that mentions it opens the link.
      const link = this._links.get(panel);
      if (status === 'idle' && link && !link.isOpen && link.kernel.name === KERNEL) void link.open();
    });
    panel.disposed.connect(() => {
      this._links.get(panel)?.dispose();
      this._links.delete(panel);
    });
    renew();
  }

  private async _openIfMentioned(panel: NotebookPanel, link: EngineLink): Promise<void> {
    await panel.context.ready;
    const cells = panel.content.model?.sharedModel.cells ?? [];
    if (link.kernel.name === KERNEL || cells.some(cell => cell.cell_type === 'code' && MENTIONS.test(cell.getSource()))) await link.open();
  }

  private _openFor(notebook: Notebook): void {
    for (const [panel, link] of this._links) if (panel.content === notebook) void link.open();
  }
}
