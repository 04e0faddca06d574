/** Draws a saved run, group or view in place of its HTML, kernel or not. The record is hostile input: the views check it.
 *
 * Where the kernel that made it still runs, the view is live again: an answer can be branched and asked anew after its end.
 */

import type { IRenderMime } from '@jupyterlab/rendermime-interfaces';
import type { Message } from '@lumino/messaging';
import { Widget } from '@lumino/widgets';

import { loadBundle, loadedBundle, type Bundle, type Host } from './bundle';
import { SessionModel, ViewModel } from './channel';
import type { EngineLink } from './engine';
import { links } from './links';

export const RUN_MIME = 'application/vnd.mlxnb.run.v1+json';
/** Before text/html (50), which the same output carries for readers without this extension. */
const RANK = 40;
const LIVE_WITHIN_MS = 150;

type Shown = { readonly host: Host; readonly model: ViewModel | null; release(): void };

class RunOutput extends Widget implements IRenderMime.IRenderer {
  private _shown: Shown | null = null;
  private _record: unknown = null;
  private _asked = 0;
  private _tried: EngineLink | null = null;

  constructor() {
    super();
    this.addClass('mlxnb-output');
    links()?.changed.connect(this._onLink, this);
  }

  async renderModel(model: IRenderMime.IMimeModel): Promise<void> {
    const asked = ++this._asked;
    this._tried = null;
    this._record = model.data[RUN_MIME];
    try {
      if (this.isAttached) this._showNow();
      const bundle = await loadBundle();
      const link = await this._linkSoon();
      if (this.isDisposed || asked !== this._asked) return;
      this._show(bundle, link);
    } catch (error) {
      console.error('mlxnb: the views could not be loaded', error);
      if (!this.isDisposed && asked === this._asked) this._showPlain(model.data['text/plain']);
    }
  }

  dispose(): void {
    if (this.isDisposed) return;
    this._clear();
    links()?.changed.disconnect(this._onLink, this);
    super.dispose();
  }

  protected onAfterAttach(message: Message): void {
    super.onAfterAttach(message);
    if (!this._shown) this._showNow();
  }

  /** In the task that put this output in the place of a live view: drawn later, the answer would be gone for a moment. */
  private _showNow(): void {
    const bundle = loadedBundle();
    if (!bundle || !this._record) return;
    try {
      if (this._shown?.model) this._shown.model.replace(this._record);
      else this._show(bundle, null);
    } catch (error) {
      console.error('mlxnb: a view could not be drawn at once', error);
    }
  }

  /** Of an answer. A view that is open in its kernel comes back as itself, see keep.ts. */
  private get _key(): string {
    const { key, schema } = (this._record ?? {}) as { key?: unknown; schema?: unknown };
    return typeof key === 'string' && typeof schema === 'string' && /^mlxnb\.(?:run|group)\//.test(schema) ? key : '';
  }

  private async _link(): Promise<EngineLink | null> {
    const link = this._key ? (links()?.at(this.node) ?? null) : null;
    return link && (await link.takes(this._key)) ? link : null;
  }

  /** A kernel that does not say at once is none; `_onLink` comes back to it. */
  private _linkSoon(): Promise<EngineLink | null> {
    return Promise.race([this._link(), new Promise<null>(done => setTimeout(done, LIVE_WITHIN_MS, null))]);
  }

  private _show(bundle: Bundle, link: EngineLink | null): void {
    if (this._shown?.model && link) {
      this._shown.model.replace(this._record);
      return;
    }
    if (this._shown && !this._shown.model && !link) {
      this._shown.host.record.value = this._record;
      return;
    }
    // Between the views of an output its place stays as high as it was: the page does not jump.
    this.node.style.minHeight = `${this.node.offsetHeight}px`;
    try {
      this._exchange(bundle, link);
    } finally {
      this.node.style.minHeight = '';
    }
  }

  private _exchange(bundle: Bundle, link: EngineLink | null): void {
    this._clear();
    const model = link ? new ViewModel(this._key, this._record) : null;
    const live = link && model ? bundle.liveHost(model, SessionModel.of(link)) : null;
    const host: Host = live ?? bundle.savedHost(this._record);
    const unmount = this._mount(bundle, host);
    this._shown = {
      host,
      model,
      release: () => {
        unmount();
        live?.dispose();
      }
    };
  }

  /** A run that is branched becomes a group, which is another view. */
  private _mount(bundle: Bundle, host: Host): () => void {
    const kindOf = () => bundle.kindOf(host.record.value);
    let kind = kindOf();
    let unmount = bundle.mount(this.node, kind, host);
    const release = host.record.subscribe(() => {
      const now = kindOf();
      if (now === kind) return;
      unmount();
      kind = now;
      unmount = bundle.mount(this.node, kind, host);
    });
    return () => {
      release();
      unmount();
    };
  }

  /** Once for each engine that comes up: keys of another session are not its. */
  private _onLink(): void {
    if (!this._shown || this._shown.model || !this._key) return;
    const link = links()?.at(this.node);
    if (!link?.isOpen || link === this._tried) return;
    this._tried = link;
    const asked = this._asked;
    void Promise.all([loadBundle(), this._link()]).then(([bundle, link]) => {
      if (link && !this.isDisposed && asked === this._asked && !this._shown?.model) this._show(bundle, link);
    });
  }

  private _clear(): void {
    this._shown?.release();
    this._shown = null;
    this.node.replaceChildren();
  }

  /** The answer itself, as text. */
  private _showPlain(plain: unknown): void {
    this._clear();
    const text = document.createElement('pre');
    text.textContent = Array.isArray(plain) ? plain.join('') : typeof plain === 'string' ? plain : '';
    this.node.append(text);
  }
}

const factory: IRenderMime.IRendererFactory = {
  safe: true,
  mimeTypes: [RUN_MIME],
  defaultRank: RANK,
  createRenderer: () => new RunOutput()
};

const extension: IRenderMime.IExtension = { id: 'mlxnb:mime', rendererFactory: factory, rank: RANK, dataType: 'json' };

export default extension;
