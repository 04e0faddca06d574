/** A kernel's status comm in the shape of two widget models, so that a finished output is live again: it takes branches.
 *
 * `liveHost` of the bundle reads a view model (traits) and a session model (messages); these are the least of both.
 */

import type { EngineLink } from './engine';

type Listener = (value?: unknown) => void;

/** The session: what the view sends goes to the kernel, and what comes back to every listener. One for each link. */
export class SessionModel {
  private static readonly _made = new WeakMap<EngineLink, SessionModel>();
  private readonly _listeners = new Set<Listener>();

  private constructor(private readonly _link: EngineLink) {
    _link.message.connect((_, message) => this._listeners.forEach(listener => listener(message)));
  }

  static of(link: EngineLink): SessionModel {
    const made = SessionModel._made.get(link) ?? new SessionModel(link);
    SessionModel._made.set(link, made);
    return made;
  }

  get(): undefined {
    return undefined;
  }

  send(message: object): void {
    this._link.send(message);
  }

  on(event: string, listener: Listener): void {
    if (event === 'msg:custom') this._listeners.add(listener);
  }

  off(_: string, listener: Listener): void {
    this._listeners.delete(listener);
  }
}

/** The view: its record is the stored one, until the kernel stores another. */
export class ViewModel {
  private readonly _listeners = new Map<string, Set<Listener>>();
  private _state = 'live';

  constructor(
    private readonly _key: string,
    private _record: unknown
  ) {}

  get(name: string): unknown {
    return { key: this._key, record: this._record, state: this._state }[name];
  }

  on(event: string, listener: Listener): void {
    this._listeners.set(event, (this._listeners.get(event) ?? new Set()).add(listener));
  }

  off(event: string, listener: Listener): void {
    this._listeners.get(event)?.delete(listener);
  }

  /** A final record replaces what deltas made of the one before, whatever that was. */
  replace(record: unknown): void {
    this._record = record;
    this._state = 'final';
    this._listeners.get('change:record')?.forEach(listener => listener());
    this._state = 'live';
  }
}
