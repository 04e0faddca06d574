/** One kernel's engine as this extension sees it: its status, and commands that are answered while a cell runs. */

import { KernelMessage, type Kernel } from '@jupyterlab/services';
import { UUID } from '@lumino/coreutils';
import type { IDisposable } from '@lumino/disposable';
import { Signal, type ISignal } from '@lumino/signaling';

const TARGET = 'mlxnb.status';
const ANSWER_WITHIN_MS = 5000;
const SUBSHELL_WITHIN_MS = 500;
const GONE: readonly Kernel.Status[] = ['restarting', 'autorestarting', 'dead', 'terminating'];

interface Waiting {
  resolve(value: unknown): void;
  reject(error: Error): void;
  readonly timer: number;
}

/** A comm on the status target of one kernel.
 *
 * `open` may be called at any time and again: a kernel without mlxnb closes the comm, which is no error. Commands go over the
 * control channel, which every version of ipykernel reads while a cell runs.
 */
export class EngineLink implements IDisposable {
  private _comm: Kernel.IComm | null = null;
  private _status: unknown = null;
  private _disposed = false;
  private readonly _waiting = new Map<string, Waiting>();
  private readonly _changed = new Signal<this, void>(this);
  private readonly _message = new Signal<this, unknown>(this);
  private _known = new Set<string>();
  private _asking: Promise<void> | null = null;

  constructor(readonly kernel: Kernel.IKernelConnection) {
    kernel.statusChanged.connect(this._onStatus, this);
    kernel.disposed.connect(this.dispose, this);
  }

  /** The last status, null while none is known. Anything may be in it. */
  get status(): unknown {
    return this._status;
  }

  get isOpen(): boolean {
    return this._comm !== null && this._status !== null;
  }

  get changed(): ISignal<this, void> {
    return this._changed;
  }

  /** Every message of the kernel on this comm. */
  get message(): ISignal<this, unknown> {
    return this._message;
  }

  get isDisposed(): boolean {
    return this._disposed;
  }

  /** Ask the kernel for its engine's status, now and once a second. */
  async open(): Promise<void> {
    if (this._comm || this._disposed || GONE.includes(this.kernel.status)) return;
    const comm = this.kernel.createComm(TARGET);
    this._comm = comm;
    comm.onMsg = message => this._onMessage(message.content.data);
    comm.onClose = () => this._drop(comm);
    if (this.kernel.supportsSubshells) {
      // Opened on a subshell it is answered during a cell; otherwise after it. JupyterLab makes one for each target.
      const { subshellStarted } = comm as { subshellStarted?: Promise<void> };
      await Promise.race([subshellStarted, new Promise(done => setTimeout(done, SUBSHELL_WITHIN_MS))]).catch(() => undefined);
    }
    if (this._comm === comm && !comm.isDisposed) comm.open({});
  }

  /** Whether this kernel made the output of this key, and still takes commands for it. Questions of one moment are asked once. */
  async takes(key: string): Promise<boolean> {
    if (!this._known.has(key) && this.isOpen) {
      this._asking ??= this._ask().finally(() => (this._asking = null));
      await this._asking;
    }
    return this._known.has(key);
  }

  private async _ask(): Promise<void> {
    try {
      const found = await this.command('sources');
      const keys = Array.isArray(found) ? found.map(one => (one as { key?: unknown } | null)?.key) : [];
      this._known = new Set(keys.filter(key => typeof key === 'string'));
    } catch {
      // A kernel that is gone takes nothing.
    }
  }

  /** Rejects with a message for a person if the kernel refuses, has no engine, or does not answer in time. */
  command(name: string, args: object = {}, { key = '', withinMs = ANSWER_WITHIN_MS } = {}): Promise<unknown> {
    const comm = this._comm;
    if (!comm) return Promise.reject(new Error('This kernel has not loaded mlxnb.'));
    const id = UUID.uuid4();
    return new Promise((resolve, reject) => {
      const timer = window.setTimeout(() => this._settle(id, entry => entry.reject(new Error('The kernel did not answer in time.'))), withinMs);
      this._waiting.set(id, { resolve, reject, timer });
      this.send({ type: 'command', id, key, name, args });
    });
  }

  /** One message of ours, to be answered or not. Throws where no comm is open. */
  send(data: object): void {
    if (!this._comm) throw new Error('This kernel has not loaded mlxnb.');
    this._send(this._comm.commId, data);
  }

  /** A message for another comm of ours in this kernel, such as that of the live views. */
  post(commId: string, data: object): void {
    this._send(commId, data);
  }

  dispose(): void {
    if (this._disposed) return;
    this._disposed = true;
    const comm = this._comm;
    if (comm) this._drop(comm);
    if (comm && !comm.isDisposed && !this.kernel.isDisposed) comm.close();
    Signal.clearData(this);
  }

  private _send(commId: string, data: object): void {
    const message = KernelMessage.createMessage({
      msgType: 'comm_msg',
      channel: 'control' as 'shell', // the protocol's types know comms on the shell channel only
      username: this.kernel.username,
      session: this.kernel.clientId,
      content: { comm_id: commId, data: data as never }
    });
    this.kernel.sendControlMessage(message as unknown as KernelMessage.IControlMessage, false, true);
  }

  private _onMessage(data: unknown): void {
    if (typeof data !== 'object' || data === null) return;
    this._message.emit(data);
    const message = data as { type?: unknown; status?: unknown; id?: unknown; ok?: unknown; result?: unknown; error?: unknown };
    if (message.type === 'status') {
      this._status = message.status ?? null;
      this._changed.emit();
    } else if (message.type === 'answer') {
      this._settle(String(message.id), entry => {
        if (message.ok === true) entry.resolve(message.result);
        else entry.reject(new Error(typeof message.error === 'string' ? message.error : 'The kernel refused without a reason.'));
      });
    }
  }

  private _settle(id: string, how: (entry: Waiting) => void): void {
    const entry = this._waiting.get(id);
    if (!entry) return;
    this._waiting.delete(id);
    window.clearTimeout(entry.timer);
    how(entry);
  }

  private _onStatus(_: Kernel.IKernelConnection, status: Kernel.Status): void {
    if (this._comm && GONE.includes(status)) this._drop(this._comm);
  }

  private _drop(comm: Kernel.IComm): void {
    if (this._comm !== comm) return;
    this._comm = null;
    this._status = null;
    this._known.clear();
    for (const id of [...this._waiting.keys()]) this._settle(id, entry => entry.reject(new Error('The kernel has gone or was restarted.')));
    if (!this._disposed) this._changed.emit();
  }
}
