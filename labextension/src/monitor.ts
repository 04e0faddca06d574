/** The engine over time, beside the notebook: the shared monitor view, fed by the status comm, also while a cell runs. */

import { Widget } from '@lumino/widgets';

import { loadBundle, type Host } from './bundle';
import type { EngineLink } from './engine';

export class EngineView extends Widget {
  private _host: Host | null = null;
  private _unmount: (() => void) | null = null;

  constructor(private readonly _link: EngineLink) {
    super();
    this.addClass('mlxnb-engine');
    _link.changed.connect(this._tell, this);
    void this._mount();
  }

  dispose(): void {
    if (this.isDisposed) return;
    this._unmount?.();
    this._link.changed.disconnect(this._tell, this);
    super.dispose();
  }

  private async _mount(): Promise<void> {
    try {
      const bundle = await loadBundle();
      if (this.isDisposed) return;
      const saved = bundle.savedHost(this._link.status);
      this._host = { live: true, record: saved.record, setting: saved.setting, command: (name, args) => this._link.command(name, args) };
      this._unmount = bundle.mount(this.node, 'monitor', this._host);
    } catch (error) {
      console.error('mlxnb: the views could not be loaded', error);
      this.node.textContent = 'The view of the engine could not be loaded.';
    }
  }

  private _tell(): void {
    if (this._host && this._link.status !== null) this._host.record.value = this._link.status;
  }
}
