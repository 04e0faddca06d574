/** Records and models for tests. */

import type { AnyModel } from "@anywidget/types";

export const token = (text: string, over: object = {}) => ({ id: text.length, text, origin: "sampled", t: 0.1, ...over });

export const record = (over: object = {}) => ({
  schema: "mlxnb.run/1", id: "r1", status: "running", model: "m", labels: {}, text: "", tokens: [], usage: { prompt_tokens: 5 }, seed: { value: 7, explicit: true },
  finish_reason: null, stop: null, error: null, timing: { started: 0, first_token: null, ended: null }, phases: [], request: { max_tokens: 32 },
  prompt: { messages: [{ role: "user", content: "hi" }], text: null, prefill: "" }, ...over,
});

type Listener = (...args: unknown[]) => void;

/** A widget model without a kernel: traits, events, and what was sent. */
export class FakeModel {
  readonly sent: Record<string, unknown>[] = [];
  private readonly listeners = new Map<string, Set<Listener>>();
  readonly widget_manager = { get_model: (id: string) => (this.peers[id] ? Promise.resolve(this.peers[id]) : Promise.reject(new Error("no such model"))) };

  constructor(
    readonly traits: Record<string, unknown> = {},
    readonly peers: Record<string, FakeModel> = {},
  ) {}

  get(name: string): unknown {
    return this.traits[name];
  }
  set(name: string, value: unknown): void {
    this.traits[name] = value;
    this.emit(`change:${name}`);
  }
  on(name: string, take: Listener): void {
    this.listeners.set(name, (this.listeners.get(name) ?? new Set()).add(take));
  }
  off(name: string, take: Listener): void {
    this.listeners.get(name)?.delete(take);
  }
  listening(): number {
    return [...this.listeners.values()].reduce((sum, set) => sum + set.size, 0);
  }
  emit(name: string, ...args: unknown[]): void {
    for (const take of [...(this.listeners.get(name) ?? [])]) take(...args);
  }
  send(content: Record<string, unknown>): void {
    this.sent.push(content);
    this.onSend?.(content);
  }
  save_changes(): void {}
  onSend?: (content: Record<string, unknown>) => void;

  /** As the kernel would: every command gets this answer. */
  answerWith(answer: (name: string, args: unknown) => object): void {
    this.onSend = (message) => {
      if (message.type === "command") queueMicrotask(() => this.emit("msg:custom", { type: "answer", id: message.id, ...answer(String(message.name), message.args) }, []));
    };
  }
  get any(): AnyModel {
    return this as unknown as AnyModel;
  }
}

export const soon = (ms = 0) => new Promise<void>((resolve) => setTimeout(resolve, ms));
