/** A conversation in one cell: the turns up to its head, a box to go on, any turn to ask anew, and the tree of all of them. Nothing typed is lost. */

import { useReducer, useRef, useState } from "preact/hooks";

import { Answer } from "./answer";
import { beside, blockedBy, chatText, nameOf, NO_BOXES, parseChat, step, turnCount, type Act, type Boxes, type Chat, type Turn } from "./chat_data";
import { TreePanel } from "./chat_tree";
import { RunFoot } from "./foot";
import { plural } from "./format";
import type { Host } from "./host";
import { TokenInspector } from "./inspector";
import { adopt, useCopied } from "./more";
import { register } from "./mount";
import { Announce, Bar, Button, Frame, Grow, ModelChip, Note, Notice, shortModel, State, tabPanel, Tabs, usePrefix } from "./parts";
import { maybe } from "./read";
import { RunState } from "./state";

type Send = (what: NonNullable<Boxes["busy"]>, name: string, args: object) => void;

export function ChatView({ host }: { host: Host }) {
  const chat = parseChat(host.record.value);
  return chat ? <Body chat={chat} host={host} /> : <Notice text="This output has no conversation." />;
}

function Body({ chat, host }: { chat: Chat; host: Host }) {
  const [boxes, act] = useReducer<Boxes, Act>(step, NO_BOXES);
  const busy = useRef(false);
  const send: Send = (what, name, args) => {
    if (busy.current) return;
    busy.current = true;
    act({ type: "sent", what });
    host.command(name, args).then(
      (result) => {
        busy.current = false;
        adopt(host, result);
        const note = maybe(result)?.note;
        act({ type: "accepted", note: typeof note === "string" ? note : "" });
      },
      (fault: unknown) => {
        busy.current = false;
        act({ type: "refused", message: fault instanceof Error ? fault.message : "" });
      },
    );
  };
  const [wanted, setTab] = useState(chat.tab);
  const prefix = usePrefix();
  const tabs = chat.tree.length > 0;
  const tab = tabs ? wanted : "chat";
  return (
    <Frame label={`Conversation${chat.name ? ` ${chat.name}` : ""}`}>
      <Head {...{ chat, host, boxes, send, tab, setTab, prefix }} />
      <div {...(tabs ? tabPanel(prefix, tab) : {})}>
        {tab === "tree" ? (
          <TreePanel chat={chat} live={host.live} blocked={boxes.busy !== null || chat.live !== null} send={send} />
        ) : (
          <Turns {...{ chat, host, boxes, act, send }} />
        )}
      </div>
      {chat.error && <Note tone="err">{chat.error}</Note>}
      {boxes.error && (
        <Note tone="err" title="Not sent.">
          {boxes.error} What you wrote is still in its box.{" "}
          <Button kind="quiet" onClick={() => act({ type: "dismiss" })}>
            Dismiss
          </Button>
        </Note>
      )}
      {boxes.note && <Note icon="branch">{boxes.note}</Note>}
      <Announce live={Boolean(chat.live)} said={boxes.note} />
      {tab === "chat" && <SendBox chat={chat} host={host} boxes={boxes} act={act} send={send} />}
      {tab === "chat" && <Foot chat={chat} />}
    </Frame>
  );
}

function Foot({ chat }: { chat: Chat }) {
  const last = chat.turns.findLast((turn) => turn.run && !turn.stale)?.run;
  return last ? <RunFoot run={last} /> : null;
}

function Turns(props: Omit<TurnProps, "turn">) {
  const { chat, host, boxes, send } = props;
  const stale = chat.turns.filter((turn) => turn.stale);
  const now = chat.turns.filter((turn) => !turn.stale);
  const cell = stale[0]?.cell;
  return (
    <>
      {chat.turns.length === 0 && (
        <p class="mlxnb-ch-empty">Nothing said yet. The model reads what you write below, and each answer joins the conversation.</p>
      )}
      <ol class="mlxnb-ch" aria-label="Turns">
        {now.map((turn) => (
          <TurnRow key={turn.id} {...props} turn={turn} />
        ))}
      </ol>
      {stale.length > 0 && (
        <>
          <div class="mlxnb-ch-aside">
            <Note title={`${plural(turnCount(chat, true), "turn")} kept aside.`} tone="warn" icon="wait">
              They answer an earlier version of the turn above; the model does not read them.
              {cell && ` Running cell ${cell} again brings them up to date.`}
            </Note>
            {host.live && (
              <Button icon="branch" disabled={boxes.busy !== null || chat.live !== null} onClick={() => send("fork", "chat.fork", { turn: stale.at(-1)!.turn })}>
                Keep as a fork
              </Button>
            )}
          </div>
          <ol class="mlxnb-ch" aria-label="Turns kept aside">
            {stale.map((turn) => (
              <TurnRow key={turn.id} {...props} turn={turn} />
            ))}
          </ol>
        </>
      )}
    </>
  );
}

interface HeadProps {
  chat: Chat;
  host: Host;
  boxes: Boxes;
  send: Send;
  tab: Chat["tab"];
  setTab: (tab: Chat["tab"]) => void;
  prefix: string;
}

const TABS = [
  ["chat", "Chat"],
  ["tree", "Tree"],
] as const;

function Head({ chat, host, boxes, send, tab, setTab, prefix }: HeadProps) {
  const [copied, copy] = useCopied();
  const said = turnCount(chat, false);
  return (
    <Bar>
      <span class="mlxnb-title" dir="auto">
        {chat.name || "Conversation"}
      </span>
      {chat.tree.length > 0 && (
        <>
          <span class="mlxnb-sep" />
          <Tabs label="Conversation" prefix={prefix} value={tab} options={TABS} onChange={setTab} />
        </>
      )}
      <Grow />
      {chat.model && <ModelChip name={chat.model} />}
      {chat.live?.run ? <RunState run={chat.live.run} saved={!host.live} /> : <State tone="quiet">{said ? plural(said, "turn") : "empty"}</State>}
      {chat.live && host.live && (
        <Button icon="stop" disabled={boxes.busy !== null} onClick={() => send("stop", "stop", { run: chat.live!.runIndex })}>
          Stop
        </Button>
      )}
      {!chat.live && said > 0 && (
        <Button
          kind="quiet"
          icon={copied ? "check" : "copy"}
          label={copied ? "Copied" : "Copy the conversation"}
          onClick={() => copy(chatText(chat))}
        />
      )}
    </Bar>
  );
}

interface TurnProps {
  turn: Turn;
  chat: Chat;
  host: Host;
  boxes: Boxes;
  act: (act: Act) => void;
  send: Send;
}

function TurnRow(props: TurnProps) {
  const { turn, chat, host, boxes } = props;
  const editing = boxes.editing?.turn === turn.id;
  const who = { system: "System", user: "You", assistant: shortModel(chat.model) || "Model" }[turn.role];
  const classes = ["mlxnb-ch-turn", turn.role === "user" && "mlxnb-ch-user", turn.stale && "mlxnb-ch-old"].filter(Boolean).join(" ");
  return (
    <li class={classes}>
      <div class="mlxnb-ch-who">
        <b title={turn.role === "assistant" ? chat.model || who : undefined}>{who}</b>
        {nameOf(turn) && <span title={`${turn.turn} in %mlx show, for --after and fork`}>turn {turn.turn}</span>}
        {turn.cell && ` · ${turn.cell}`}
      </div>
      {editing ? (
        <EditBox {...props} />
      ) : turn.role === "assistant" ? (
        <Said {...props} />
      ) : (
        <div class="mlxnb-ch-say mlxnb-plain" dir="auto">
          {turn.text}
        </div>
      )}
      {!editing && turn.stale && (
        <div class="mlxnb-btns mlxnb-ch-acts">
          <State tone="warn" icon="wait">
            stale
          </State>
        </div>
      )}
      {!editing && !turn.stale && <Actions {...props} canAct={host.live && !chat.live && boxes.busy === null} />}
    </li>
  );
}

function Said({ turn }: TurnProps) {
  const { run } = turn;
  const [open, setOpen] = useState(false);
  const live = run?.live ?? false;
  return (
    <div class="mlxnb-ch-say">
      {turn.text || !run || run.status === "running" || run.status === "done" ? (
        <Answer text={turn.text} streaming={live} empty={run?.error ? "" : "(no text)"} />
      ) : (
        <p class="mlxnb-empty">{live ? "…" : "Stopped before its first token."}</p>
      )}
      {run && !live && (run.status === "stopped" || run.finish === "length") && (
        <div class="mlxnb-cutline">
          {run.status === "stopped"
            ? `stopped after ${plural(run.tokens.length, "token")}; all of it is kept`
            : `cut at the limit of ${plural(run.maxTokens ?? run.tokens.length, "token")}`}
        </div>
      )}
      {run?.error && <Note tone="err" title={run.error.message} hint={run.error.hint} />}
      {run && !live && !turn.stale && run.tokens.length > 0 && (
        <details class="mlxnb-ch-tokens" onToggle={(event) => setOpen(event.currentTarget.open)}>
          <summary>{plural(run.tokens.length, "token")}</summary>
          {open && <TokenInspector run={run} onBranch={null} />}
        </details>
      )}
    </div>
  );
}

function Actions({ turn, act, send, canAct }: TurnProps & { canAct: boolean }) {
  const [copied, copy] = useCopied();
  if (turn.role === "system") return null;
  const kept = turn.turn !== "" && turn.turn !== "new";
  return (
    <div class="mlxnb-btns mlxnb-ch-acts">
      <Flip turn={turn} canAct={canAct} send={send} />
      {turn.role === "assistant" && turn.text && (
        <Button kind="quiet" icon={copied ? "check" : "copy"} label={copied ? "Copied" : "Copy this answer"} onClick={() => copy(turn.text)} />
      )}
      {turn.role === "assistant" && canAct && (
        <Button
          kind="quiet"
          icon="redo"
          label="Regenerate this answer (this one stays beside it)"
          onClick={() => send("regenerate", "chat.regenerate", { turn: turn.id })}
        />
      )}
      {turn.role === "assistant" && canAct && kept && (
        <Button kind="quiet" icon="branch" label="Fork: a chat of its own up to here" onClick={() => send("fork", "chat.fork", { turn: turn.turn })} />
      )}
      {turn.role === "user" && canAct && (
        <Button kind="quiet" icon="edit" label="Edit this turn" onClick={() => act({ type: "edit", turn: turn.id, text: turn.text })} />
      )}
    </div>
  );
}

/** Which of the turns in this place stands here, and the way to its neighbours. */
function Flip({ turn, canAct, send }: { turn: Turn; canAct: boolean; send: Send }) {
  const place = beside(turn);
  if (!place) return null;
  const what = turn.role === "user" ? "question" : "answer";
  const go = (to: string | null) => to !== null && send("go", "chat.go", { turn: to });
  return (
    <span class="mlxnb-ch-flip" role="group" aria-label={`${what} ${place.at} of ${place.of}`}>
      {canAct && (
        <Button kind="quiet" label={`Earlier ${what}`} disabled={place.before === null || place.before === "new"} onClick={() => go(place.before)}>
          ‹
        </Button>
      )}
      <span aria-hidden="true">
        {place.at}/{place.of}
      </span>
      {canAct && (
        <Button kind="quiet" label={`Later ${what}`} disabled={place.after === null || place.after === "new"} onClick={() => go(place.after)}>
          ›
        </Button>
      )}
    </span>
  );
}

/** Enter sends, Shift+Enter breaks the line; while an input method composes, Enter belongs to it. */
const onEnter = (go: () => void, cancel?: () => void) => (event: KeyboardEvent) => {
  event.stopPropagation(); // the notebook's own shortcuts stay out of a text box
  if (event.isComposing) return;
  if (event.key === "Escape" && cancel) cancel();
  else if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    go();
  }
};

function EditBox({ turn, boxes, act, send }: TurnProps) {
  const text = boxes.editing?.text ?? "";
  const ready = text.trim() !== "" && boxes.busy === null;
  const go = () => ready && send("edit", "chat.edit", { turn: turn.id, text });
  const cancel = () => act({ type: "edit-cancel" });
  return (
    <div class="mlxnb-ch-edit">
      <textarea
        class="mlxnb-area"
        dir="auto"
        aria-label={`Edit ${nameOf(turn) ? `turn ${turn.turn}` : "this turn"}`}
        rows={Math.min(12, text.split("\n").length + 1)}
        value={text}
        ref={focusOnce}
        onInput={(event) => act({ type: "edit-text", text: event.currentTarget.value })}
        onKeyDown={onEnter(go, cancel)}
      />
      <div class="mlxnb-ch-edit-foot">
        <span class="mlxnb-grow mlxnb-2">
          A branch of its own: what stands here, and all that came after it, stays beside it.
        </span>
        <Button onClick={cancel}>Cancel</Button>
        <Button kind="primary" disabled={!ready} onClick={go}>
          {boxes.busy === "edit" ? "Sending…" : "Send"}
        </Button>
      </div>
    </div>
  );
}

const focused = new WeakSet<HTMLElement>();
function focusOnce(area: HTMLTextAreaElement | null): void {
  if (!area || focused.has(area)) return;
  focused.add(area);
  area.focus();
  area.setSelectionRange(area.value.length, area.value.length);
}

function SendBox({ chat, host, boxes, act, send }: { chat: Chat; host: Host; boxes: Boxes; act: (act: Act) => void; send: Send }) {
  const blocked = blockedBy(chat, boxes, host.live);
  const ready = blocked === "" && boxes.draft.trim() !== "";
  const go = () => ready && send("send", "chat.send", { text: boxes.draft });
  return (
    <form
      class="mlxnb-ch-new"
      onSubmit={(event) => {
        event.preventDefault();
        go();
      }}
    >
      <textarea
        class="mlxnb-area"
        dir="auto"
        aria-label="Message"
        rows={Math.min(8, Math.max(1, boxes.draft.split("\n").length))}
        disabled={!host.live}
        placeholder={blocked || "Write a message. Enter sends, Shift+Enter starts a new line"}
        value={boxes.draft}
        onInput={(event) => act({ type: "draft", text: event.currentTarget.value })}
        onKeyDown={onEnter(go)}
      />
      <button type="submit" class={`mlxnb-btn${ready ? " mlxnb-btn-primary" : ""}`} disabled={!ready} title={blocked || undefined}>
        {boxes.busy === "send" ? "Sending…" : "Send"}
      </button>
    </form>
  );
}

register("chat", ChatView);
