import { describe, expect, it } from "vitest";

import { beside, blockedBy, chatText, nameOf, NO_BOXES, parseChat, step, turnCount, type Act, type Boxes } from "../src/chat_data";

const run = (status: string, text: string) => ({
  schema: "mlxnb.run/1",
  status,
  text,
  tokens: [],
  prompt: { messages: null, text: null, prefill: "" },
});
const record = (over: object = {}) => ({
  schema: "mlxnb.chat/1",
  name: "garden",
  model: "m",
  error: null,
  runs: [run("done", "first"), run("running", "sec")],
  turns: [
    { id: "s", role: "system", text: "Be brief." },
    { id: "u1", turn: "t1", role: "user", text: "One?", cell: "[7]" },
    { id: "a1", turn: "t1", role: "assistant", run: 0 },
    { id: "u2", turn: "new", role: "user", text: "Two?" },
    { id: "a2", turn: "new", role: "assistant", run: 1 },
  ],
  ...over,
});
const play = (...acts: Act[]): Boxes => acts.reduce(step, NO_BOXES);

describe("a conversation", () => {
  it("names turns as the kernel does, counts pairs and takes an answer's text from its run", () => {
    const chat = parseChat(record())!;
    expect(chat.turns.map((turn) => [nameOf(turn), turn.text])).toEqual([
      ["", "Be brief."],
      ["t1", "One?"],
      ["t1", "first"],
      ["", "Two?"],
      ["", "sec"],
    ]);
    expect([turnCount(chat, false), turnCount(chat, true)]).toEqual([2, 0]);
    expect(chat.live?.id).toBe("a2");
  });
  it("says where a turn stands among those beside it", () => {
    const turn = (others: unknown, of = "t2") => parseChat(record({ turns: [{ id: "u", turn: of, role: "user", text: "x", others }] }))!.turns[0]!;
    expect(beside(turn(["t1", "t2", "t5"]))).toEqual({ at: 2, of: 3, before: "t1", after: "t5" });
    expect(beside(turn(["t1", "t2"]))).toEqual({ at: 2, of: 2, before: "t1", after: null });
    for (const alone of [undefined, [], ["t2"], ["t1", "t9"], "t2", [{}, 3]]) expect(beside(turn(alone))).toBeNull();
  });
  it("stale turns are shown and not copied", () => {
    const turns = [...record().turns, { id: "old", role: "user", text: "gone", stale: true }];
    const chat = parseChat(record({ turns }))!;
    expect(chat.turns.at(-1)).toMatchObject({ stale: true, text: "gone" });
    expect(chatText(chat)).not.toContain("gone");
    expect([turnCount(chat, false), turnCount(chat, true)]).toEqual([2, 1]);
  });
  it("reads the rows of its tree, whatever they hold", () => {
    const good = { id: "t1", parent: -1, lines: [true, false], branch: true, text: "Q", cell: "[1]", tokens: 3, stale: true, on_path: true, head: true };
    const tree = parseChat(record({ tab: "tree", tree: [good, 7, { parent: 5, lines: "x", tokens: -2 }, { parent: 0.5 }, { id: "t9", parent: 0 }] }))!.tree;
    expect(tree[0]).toEqual({ id: "t1", parent: -1, lines: [true, false], branch: true, text: "Q", cell: "[1]", tokens: 3, stale: true, onPath: true, head: true });
    expect(tree.map((row) => row.parent)).toEqual([-1, -1, -1, -1, 0]);
    expect([tree[2]!.lines, tree[2]!.tokens, parseChat(record())!.tree, parseChat(record({ tab: "raw" }))!.tab]).toEqual([[], 0, [], "chat"]);
  });
  it("copies as plain text", () => {
    expect(chatText(parseChat(record())!)).toContain("You:\nTwo?\n\nm:\nsec");
  });
  it.each([null, [], {}, { schema: "mlxnb.chat/9" }].map((raw) => [raw]))("%j is none", (raw) => expect(parseChat(raw)).toBeNull());
  it("wrong turns and runs do not throw", () => {
    const chat = parseChat(
      record({
        runs: [null, 5],
        turns: [null, 3, { role: "evil" }, { role: "assistant", run: 99, text: "kept" }, { role: "assistant", run: 0 }, { role: "user", text: {} }],
      }),
    )!;
    expect(chat.turns.map((turn) => [turn.role, turn.text, turn.run])).toEqual([
      ["assistant", "kept", null],
      ["assistant", "", null],
      ["user", "", null],
    ]);
    expect(chat.live).toBeNull();
  });
});

describe("nothing typed is lost", () => {
  it("a refused message stays in its box, with the reason", () => {
    expect(
      play({ type: "draft", text: "hello" }, { type: "sent", what: "send" }, { type: "refused", message: "The kernel did not answer." }),
    ).toMatchObject({ draft: "hello", busy: null, error: "The kernel did not answer." });
  });
  it("an accepted message leaves its box", () => {
    expect(play({ type: "draft", text: "hello" }, { type: "sent", what: "send" }, { type: "accepted" })).toEqual(NO_BOXES);
  });
  it("what was typed while a message was on its way stays", () => {
    expect(
      play({ type: "draft", text: "one" }, { type: "sent", what: "send" }, { type: "draft", text: "one more" }, { type: "accepted" }).draft,
    ).toBe("one more");
  });
  it("a refused edit stays open; an accepted one closes and leaves the draft alone", () => {
    const edit: Act[] = [
      { type: "draft", text: "later" },
      { type: "edit", turn: "u1", text: "One?" },
      { type: "edit-text", text: "Uno?" },
      { type: "sent", what: "edit" },
    ];
    expect(play(...edit, { type: "refused", message: "" })).toMatchObject({
      editing: { turn: "u1", text: "Uno?" },
      draft: "later",
      error: expect.stringContaining("kernel"),
    });
    expect(play(...edit, { type: "accepted" })).toMatchObject({ editing: null, draft: "later" });
  });
  it("what the kernel did is said until the next command", () => {
    const noted = play({ type: "sent", what: "fork" }, { type: "accepted", note: "garden-2 begins here." });
    expect([noted.note, step(noted, { type: "sent", what: "go" }).note, step(noted, { type: "dismiss" }).note]).toEqual(["garden-2 begins here.", "", ""]);
  });
  it("no other command touches a box", () => {
    for (const what of ["regenerate", "stop", "go", "fork"] as const)
      expect(play({ type: "draft", text: "x" }, { type: "sent", what }, { type: "accepted" }).draft).toBe("x");
  });
  it("a second command waits for the first", () => {
    expect(play({ type: "sent", what: "send" }, { type: "sent", what: "edit" }).busy).toBe("send");
  });
});

describe("the send box says why it cannot send", () => {
  it("names each reason", () => {
    const [busy, idle] = [parseChat(record())!, parseChat(record({ runs: [run("done", "a"), run("stopped", "b")] }))!];
    expect(blockedBy(idle, NO_BOXES, false)).toMatch(/saved/);
    expect(blockedBy(busy, NO_BOXES, true)).toMatch(/being written/);
    expect(blockedBy(idle, play({ type: "sent", what: "send" }), true)).toMatch(/kernel/);
    expect(blockedBy(idle, NO_BOXES, true)).toBe("");
  });
});
