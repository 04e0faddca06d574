/** One per session model: sorts deltas to the views they belong to, acknowledges each message once, pairs answers with commands. */

import type { AnyModel } from "@anywidget/types";
import { batch } from "@preact/signals";

import type { CommandMessage, DeltaItem, DeltaMessage } from "./protocol";

export const ANSWER_WITHIN_MS = 15_000;
/** A stop that is not answered by then waits for the end of a cell: the person is told what helps now. It still counts when it is read. */
export const STOP_WITHIN_MS = 2_000;
const UNREAD = "The kernel has not answered: it may read this only when its cell has ended. To stop now, interrupt the kernel.";
/** The first pause before a stop is sent again; each is twice the one before. */
export const AGAIN_MS = 200;
/** Commands that do the same however often they arrive. */
const REPEATABLE: ReadonlySet<string> = new Set(["stop", "stop_all", "monitor.stop"]);
/** A page may offer a way to the kernel that is open while a cell runs: it takes a comm's id and a message, and says whether it
 * sent it. The JupyterLab extension does, over the control channel; answers come back by the comm. */
const CONTROL = Symbol.for("mlxnb.control");
const HIDDEN_FRAME_MS = 250;

export interface Hub {
  listen(key: string, take: (item: DeltaItem) => void): () => void;
  /** For messages of other types ("status", ...). */
  onMessage(type: string, take: (message: Readonly<Record<string, unknown>>) => void): () => void;
  command(key: string, name: string, args?: object): Promise<unknown>;
}

interface Waiting {
  resolve(value: unknown): void;
  reject(error: Error): void;
  timer: ReturnType<typeof setTimeout>;
}

/** Whether the page's own way took the message; false where there is none, or no kernel there has this comm. */
function sendByControl(session: AnyModel, message: object): boolean {
  const way = (globalThis as { [CONTROL]?: unknown })[CONTROL];
  const id = (session as { model_id?: unknown }).model_id;
  if (typeof way !== "function" || typeof id !== "string") return false;
  try {
    return way(id, { method: "custom", content: message }) === true;
  } catch {
    return false;
  }
}

/** Sends to the kernel. Front ends tell a failure in two ways: `send` throws, or it returns a promise that is rejected. */
function post(session: AnyModel, message: object, failed: (error: unknown) => void): void {
  try {
    const sent: unknown = session.send(message);
    if (sent instanceof Promise) sent.catch(failed);
  } catch (error) {
    failed(error);
  }
}

/** A key, an id or a type; "" for what is none, such as an object that has no text. */
const nameOf = (value: unknown): string => (typeof value === "string" ? value : "");

const hubs = new WeakMap<object, Hub>();
let commands = 0;

export function hubOf(session: AnyModel): Hub {
  let hub = hubs.get(session);
  if (!hub) {
    hub = makeHub(session);
    hubs.set(session, hub);
  }
  return hub;
}

/** Milliseconds from `start` to the end of the frame that shows its effect, the longer of its two halves. */
function frameTime(start: number, done: (ms: number) => void): void {
  let over = false;
  const finish = (ms: number) => {
    if (over) return;
    over = true;
    clearTimeout(timer);
    done(Math.round(ms * 10) / 10);
  };
  // A hidden page draws no frames: the longest delay the publisher knows is the right answer.
  const timer = setTimeout(() => finish(HIDDEN_FRAME_MS), HIDDEN_FRAME_MS);
  requestAnimationFrame((first) => requestAnimationFrame((second) => finish(Math.max(performance.now() - second, second - first, first - start))));
}

function makeHub(session: AnyModel): Hub {
  const views = new Map<string, Set<(item: DeltaItem) => void>>();
  const others = new Map<string, Set<(message: Readonly<Record<string, unknown>>) => void>>();
  const waiting = new Map<string, Waiting>();
  const prefix = Math.random().toString(36).slice(2, 8);

  const onDelta = (message: DeltaMessage) => {
    const start = performance.now();
    batch(() => {
      for (const item of Array.isArray(message.items) ? message.items : []) {
        for (const take of views.get(nameOf(item?.key)) ?? []) take(item);
      }
    });
    // A kernel that is gone needs no acknowledgement.
    if (message.ack === false) return;
    frameTime(start, (frame_ms) => {
      const ack = { type: "ack", seq: message.seq, frame_ms };
      // By the way that is open during a cell: a kernel that hears nothing takes the page for one without views.
      if (!sendByControl(session, ack)) post(session, ack, () => undefined);
    });
  };
  const onAnswer = (message: Record<string, unknown>) => {
    const id = nameOf(message.id);
    const waited = waiting.get(id);
    if (!waited) return;
    waiting.delete(id);
    clearTimeout(waited.timer);
    if (message.ok === true) waited.resolve(message.result);
    else waited.reject(new Error(typeof message.error === "string" ? message.error : "The kernel refused without a reason."));
  };
  session.on("msg:custom", (message: unknown) => {
    if (typeof message !== "object" || message === null) return;
    const { type } = message as { type?: unknown };
    if (type === "delta") onDelta(message as DeltaMessage);
    else if (type === "answer") onAnswer(message as Record<string, unknown>);
    else for (const take of others.get(nameOf(type)) ?? []) take(message as Record<string, unknown>);
  });

  /** Until it is answered. A message that leaves before the comm's subshell is known waits for the cell's end; a later one does not. */
  const sendAgain = (message: CommandMessage, pause: number) => {
    setTimeout(() => {
      if (!waiting.has(message.id)) return;
      let closed = false;
      post(session, message, () => (closed = true)); // the deadline tells
      if (!closed) sendAgain(message, 2 * pause);
    }, pause);
  };

  return {
    listen: (key, take) => enlist(views, key, take),
    onMessage: (type, take) => enlist(others, type, take),
    command(key, name, args = {}) {
      const id = `${prefix}-${++commands}`;
      const message: CommandMessage = { type: "command", id, key, name, args: { ...args } };
      const stop = REPEATABLE.has(name);
      return new Promise((resolve, reject) => {
        const timer = setTimeout(() => {
          waiting.delete(id);
          reject(new Error(stop ? UNREAD : "The kernel did not answer. It may be busy, restarted or gone."));
        }, stop ? STOP_WITHIN_MS : ANSWER_WITHIN_MS);
        waiting.set(id, { resolve, reject, timer });
        const failed = (error: unknown) => {
          clearTimeout(timer);
          waiting.delete(id);
          reject(error instanceof Error ? error : new Error(String(error)));
        };
        if (!stop) post(session, message, failed);
        else {
          if (!sendByControl(session, message)) post(session, message, failed);
          if (waiting.has(id)) sendAgain(message, AGAIN_MS);
        }
      });
    },
  };
}

function enlist<T>(lists: Map<string, Set<T>>, key: string, take: T): () => void {
  const set = lists.get(key) ?? new Set<T>();
  lists.set(key, set.add(take));
  return () => {
    set.delete(take);
    if (set.size === 0 && lists.get(key) === set) lists.delete(key);
  };
}
