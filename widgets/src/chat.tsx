/** A conversation in one cell: one column of turns, a box to go on, any turn of yours to edit. What is typed is never lost. */

import { useReducer, useRef, useState } from "preact/hooks";

import { Answer } from "./answer";
import { blockedBy, chatText, NO_BOXES, parseChat, step, turnsAfter, type Act, type Boxes, type Chat, type Turn } from "./chat_data";
import { RunFoot } from "./foot";
import { plural } from "./format";
import type { Host } from "./host";
import { TokenInspector } from "./inspector";
import { adopt, useCopied } from "./more";
import { register } from "./mount";
import { Announce, Bar, Button, Frame, Grow, ModelChip, Note, Notice, shortModel, State } from "./parts";
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
        act({ type: "accepted" });
      },
      (fault: unknown) => {
        busy.current = false;
        act({ type: "refused", message: fault instanceof Error ? fault.message : "" });
      },
    );
  };
  const stale = chat.turns.findIndex((turn) => turn.stale);
  const now = stale < 0 ? chat.turns : chat.turns.slice(0, stale);
  const lastRun = now.findLast((turn) => turn.run)?.run;
  return (
    <Frame label={`Conversation${chat.name ? ` ${chat.name}` : ""}`}>
      <Head chat={chat} host={host} boxes={boxes} send={send} />
      {chat.turns.length === 0 && (
        <p class="mlxnb-ch-empty">Nothing said yet. The model reads what you write below, and each answer joins the conversation.</p>
      )}
      <ol class="mlxnb-ch" aria-label="Turns">
        {now.map((turn) => (
          <TurnRow key={turn.id} {...{ turn, chat, host, boxes, act, send }} />
        ))}
      </ol>
      {stale >= 0 && (
        <>
          <Note title={`${plural(chat.turns.length - stale, "turn")} kept aside.`}>
            They answer an earlier version of the turn above; the model does not read them.
          </Note>
          <ol class="mlxnb-ch" aria-label="Turns kept aside">
            {chat.turns.slice(stale).map((turn) => (
              <TurnRow key={turn.id} {...{ turn, chat, host, boxes, act, send }} />
            ))}
          </ol>
        </>
      )}
      {chat.error && <Note tone="err">{chat.error}</Note>}
      {boxes.error && (
        <Note tone="err" title="Not sent.">
          {boxes.error} What you wrote is still in its box.{" "}
          <Button kind="quiet" onClick={() => act({ type: "dismiss" })}>
            Dismiss
          </Button>
        </Note>
      )}
      <Announce live={Boolean(chat.live)} />
      <SendBox chat={chat} host={host} boxes={boxes} act={act} send={send} />
      {lastRun && <RunFoot run={lastRun} />}
    </Frame>
  );
}

function Head({ chat, host, boxes, send }: { chat: Chat; host: Host; boxes: Boxes; send: Send }) {
  const [copied, copy] = useCopied();
  const said = chat.turns.filter((turn) => !turn.stale && turn.role !== "system").length;
  return (
    <Bar>
      <span class="mlxnb-title" dir="auto">
        {chat.name || "Chat"}
      </span>
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
        {turn.number > 0 && `turn ${turn.number}`}
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

function Actions({ turn, chat, act, send, canAct }: TurnProps & { canAct: boolean }) {
  const [copied, copy] = useCopied();
  if (turn.role === "system") return null;
  const after = turnsAfter(chat, turn.id);
  return (
    <div class="mlxnb-btns mlxnb-ch-acts">
      {turn.role === "assistant" && turn.text && (
        <Button kind="quiet" icon={copied ? "check" : "copy"} label={copied ? "Copied" : "Copy this answer"} onClick={() => copy(turn.text)} />
      )}
      {turn.role === "assistant" && canAct && (
        <Button
          kind="quiet"
          icon="redo"
          label={`Regenerate this answer${after ? ` (takes back ${plural(after, "later turn")})` : ""}`}
          onClick={() => send("regenerate", "chat.regenerate", { turn: turn.id })}
        />
      )}
      {turn.role === "user" && canAct && (
        <Button kind="quiet" icon="edit" label="Edit this turn" onClick={() => act({ type: "edit", turn: turn.id, text: turn.text })} />
      )}
    </div>
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

function EditBox({ turn, chat, boxes, act, send }: TurnProps) {
  const text = boxes.editing?.text ?? "";
  const after = turnsAfter(chat, turn.id);
  const ready = text.trim() !== "" && boxes.busy === null;
  const go = () => ready && send("edit", "chat.edit", { turn: turn.id, text });
  const cancel = () => act({ type: "edit-cancel" });
  return (
    <div class="mlxnb-ch-edit">
      <textarea
        class="mlxnb-area"
        dir="auto"
        aria-label={`Edit turn ${turn.number}`}
        rows={Math.min(12, text.split("\n").length + 1)}
        value={text}
        ref={focusOnce}
        onInput={(event) => act({ type: "edit-text", text: event.currentTarget.value })}
        onKeyDown={onEnter(go, cancel)}
      />
      <div class="mlxnb-ch-edit-foot">
        <span class="mlxnb-grow mlxnb-2">
          The answer is drawn anew from here
          {after > 1 ? `; ${plural(after - 1, "later turn")} beyond its answer ${after === 2 ? "is" : "are"} taken back` : ""}. The prompt is read
          again.
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
