/** The item in the status bar: model, rows, speed, KV; a click opens what can be done about them. */

import { showPopup, type Popup } from '@jupyterlab/statusbar';
import type { TranslationBundle } from '@jupyterlab/translation';
import { Signal, type ISignal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';

import type { Engines } from './engines';
import { bytes, figuresOf, rate, speed, statusLine, type Figures } from './figures';

/** An entry of the menu. */
export interface Action {
  readonly label: string;
  readonly keys: string;
  readonly note: string;
  readonly enabled: boolean;
  run(): void;
}

export class StatusItem extends Widget {
  private readonly _button = document.createElement('button');
  private readonly _dot = document.createElement('span');
  private readonly _text = document.createElement('span');
  private readonly _activeChanged = new Signal<this, void>(this);
  private _link: unknown = null;
  private _before: Figures | null = null;
  private _now: Figures | null = null;
  private _speed: number | null = null;
  private _popup: Popup | null = null;

  constructor(
    private readonly _engines: Engines,
    private readonly _trans: TranslationBundle,
    private readonly _actions: (now: Figures) => readonly Action[]
  ) {
    super();
    this.addClass('mlxnb-status-item');
    this._button.type = 'button';
    this._button.setAttribute('aria-haspopup', 'menu');
    this._button.setAttribute('aria-expanded', 'false');
    this._dot.className = 'mlxnb-status-dot';
    this._dot.setAttribute('aria-hidden', 'true');
    this._button.append(this._dot, this._text);
    this._button.addEventListener('click', () => this._toggle());
    this.node.append(this._button);
    _engines.changed.connect(this._refresh, this);
    this._refresh();
  }

  /** Shown while the notebook in front has an engine. */
  get isActive(): boolean {
    return this._now !== null;
  }

  get activeChanged(): ISignal<this, void> {
    return this._activeChanged;
  }

  dispose(): void {
    this._popup?.dispose();
    Signal.clearData(this);
    super.dispose();
  }

  private readonly _say = (text: string, ...values: (string | number)[]): string => this._trans.__(text, ...values);

  private _refresh(): void {
    const link = this._engines.current;
    const wasActive = this.isActive;
    if (link !== this._link) {
      this._link = link;
      this._now = null;
      this._popup?.dispose();
    }
    const status = link?.status ?? null;
    this._before = this._now;
    this._now = status === null ? null : figuresOf(status);
    this._speed = this._now && speed(this._before, this._now);
    if (this._now) this._draw(this._now);
    else this._text.textContent = '';
    if (this.isActive !== wasActive) this._activeChanged.emit();
  }

  private _draw(now: Figures): void {
    const line = statusLine(now, this._speed, this._say);
    this._dot.dataset.mood = line.mood;
    this._text.textContent = line.text;
    this._button.title = now.error || this._trans.__('The engine of this notebook: click for what it does and what you can do');
    const facts = this._popup && !this._popup.isDisposed ? document.querySelector('.mlxnb-status-menu dl') : null;
    facts?.replaceWith(factsOf(now, this._speed, this._say));
  }

  private _toggle(): void {
    if (this._popup && !this._popup.isDisposed) {
      this._popup.dispose();
      return;
    }
    if (!this._now) return;
    const close = () => this._popup?.dispose();
    const body = new Widget({ node: menuOf(this._now, this._speed, this._actions(this._now), this._say, close) });
    body.addClass('mlxnb-status-menu');
    const popup = showPopup({ body, anchor: this, align: 'left' });
    this._popup = popup;
    this._button.setAttribute('aria-expanded', 'true');
    popup.disposed.connect(() => {
      this._button.setAttribute('aria-expanded', 'false');
      if (document.activeElement === document.body) this._button.focus();
    });
    body.node.querySelector<HTMLElement>('[role=menuitem]:not(:disabled)')?.focus();
  }
}

function element<K extends keyof HTMLElementTagNameMap>(name: K, className: string, text = ''): HTMLElementTagNameMap[K] {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

function factsOf(now: Figures, perSecond: number | null, say: (text: string, ...values: (string | number)[]) => string): HTMLElement {
  const facts = element('dl', '');
  const add = (name: string, value: string) => {
    const row = element('div', '');
    row.append(element('dt', '', name), element('dd', '', value));
    facts.append(row);
  };
  add(say('rows'), now.waiting ? say('%1, %2 waiting', now.rows, now.waiting) : String(now.rows));
  if (perSecond !== null && now.rows) add(say('speed'), rate(perSecond));
  add('KV', bytes(now.kvBytes));
  if (now.weightBytes) add(say('weights'), bytes(now.weightBytes));
  return facts;
}

function menuOf(now: Figures, perSecond: number | null, actions: readonly Action[], say: (text: string) => string, close: () => void): HTMLElement {
  const node = element('div', '');
  node.append(element('div', 'mlxnb-status-head', now.model || say('No model yet')), factsOf(now, perSecond, say));
  if (now.error) node.append(element('p', 'mlxnb-status-error', now.error));
  const menu = element('div', '');
  menu.setAttribute('role', 'menu');
  for (const action of actions) {
    const item = element('button', '');
    item.type = 'button';
    item.setAttribute('role', 'menuitem');
    item.disabled = !action.enabled;
    item.append(element('span', 'mlxnb-grow', action.label));
    if (action.note) item.append(element('span', 'mlxnb-note', action.note));
    if (action.keys) item.append(element('kbd', '', action.keys));
    item.addEventListener('click', () => {
      close();
      action.run();
    });
    menu.append(item);
  }
  menu.addEventListener('keydown', event => step(event, menu));
  node.append(menu);
  return node;
}

/** Arrow keys, Home and End go through a menu, as in any. */
function step(event: KeyboardEvent, menu: HTMLElement): void {
  const items = [...menu.querySelectorAll<HTMLElement>('[role=menuitem]:not(:disabled)')];
  const at = items.indexOf(document.activeElement as HTMLElement);
  const next = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
  if (next === undefined || !items.length) return;
  event.preventDefault();
  items[(next + items.length) % items.length]?.focus();
}
