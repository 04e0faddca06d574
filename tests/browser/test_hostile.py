"""Saved outputs that are not what we saved: a plain notice or nothing worse, never a broken page, a script or a request."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from .lab import RUN_MIME, Lab, Notebook, ran

GOOD: dict[str, Any] = {
    "schema": "mlxnb.run/1", "id": "c1", "status": "done", "model": "fake", "labels": {}, "text": "an answer",
    "tokens": [{"id": 1, "text": "an", "origin": "sampled", "t": 0.1}, {"id": 2, "text": " answer", "origin": "sampled", "t": 0.2}],
    "usage": {"prompt_tokens": 2, "completion_tokens": 2}, "seed": {"value": 1, "explicit": True}, "finish_reason": "stop", "stop": None,
    "error": None, "timing": {"submitted": 0.0, "first_token": 0.1, "ended": 0.2}, "phases": [], "request": {},
    "prompt": {"messages": [{"role": "user", "content": "q"}], "text": None, "prefill": ""},
}  # fmt: skip
IMG = "<img src=x onerror=alert(1)><script>alert(1)</script>[x](javascript:alert(1))"
VALUES: list[Any] = [None, True, -1, 1e308, "", IMG, [], {}, [[]], [None], {"toString": IMG}, "\u202e" * 50, "x" * 5000, [IMG] * 50]
DEEP: Any = "x"
for _ in range(200):
    DEEP = [DEEP]

WHOLE: list[Any] = [
    None, [], "text", 7, {}, {"schema": "mlxnb.run/2"}, {"schema": "mlxnb.run/1"}, {"schema": IMG}, {"schema": ["mlxnb.run/1"]},
    {"schema": "mlxnb.group/1"}, {"schema": "mlxnb.group/1", "runs": {}}, {"schema": "mlxnb.group/1", "runs": [None, 3, GOOD]},
    {"schema": "mlxnb.group/9", "runs": [GOOD]}, {**GOOD, "tokens": [{"text": IMG}] * 20_000}, {**GOOD, "text": IMG * 2000},
    {**GOOD, "__proto__": {"polluted": True}, "constructor": IMG}, {**GOOD, "tokens": DEEP}, {**GOOD, "labels": {IMG: IMG}},
    {"schema": "mlxnb.group/1", "runs": [{**GOOD, "text": IMG, "model": IMG}] * 100, "labels": [IMG] * 3},
]  # fmt: skip


def changed(count: int) -> list[Any]:
    """Records with one or two fields, at any depth, gone or replaced."""
    dice = random.Random(20)
    made = []
    for _ in range(count):
        record = json.loads(json.dumps(GOOD))
        for _ in range(dice.choice((1, 1, 2))):
            place = record
            while True:
                key = dice.choice(list(place)) if isinstance(place, dict) else dice.randrange(len(place))
                if isinstance(place[key], (dict, list)) and place[key] and dice.random() < 0.6:
                    place = place[key]
                    continue
                break
            if dice.random() < 0.25:
                del place[key]
            else:
                place[key] = dice.choice(VALUES)
            if not record:
                break
        made.append(record)
    return made


def page_of(lab: Lab, records: list[Any], mime: str = RUN_MIME) -> Notebook:
    """A saved notebook, opened without a kernel: each record is an output of its own cell, with plain text beside it."""
    path = lab.write(["pass"] * len(records), "hostile")
    file = lab.server.notebooks / path
    notebook = json.loads(file.read_text("utf-8"))
    for number, (cell, record) in enumerate(zip(notebook["cells"], records, strict=True)):
        data = {mime: record, "text/plain": f"plain {number}"}
        cell["outputs"] = [{"output_type": "display_data", "data": data, "metadata": {}}]
    file.write_text(json.dumps(notebook), "utf-8")
    return lab.open(path)


def drawn(lab: Lab, notebook: Notebook, count: int) -> list[str]:
    """The text of every output once it has some; scrolls so that each is drawn. What is scrolled away again has no inner text."""
    texts = []
    for cell in range(count):
        notebook.output(cell).scroll_into_view_if_needed()
        seen: list[str] = []
        lab.until(lambda cell=cell, seen=seen: seen.append(notebook.text(cell).strip()) or seen[-1], 10)  # type: ignore[func-returns-value, misc]
        texts.append(seen[-1])
    return texts


def test_a_saved_record_of_ours_is_shown(lab: Lab) -> None:
    notebook = page_of(lab, [GOOD])
    notebook.wait_text(0, "an answer")
    assert "plain 0" not in notebook.text(0)


@pytest.mark.parametrize("part", ["whole", "fields"])
def test_a_saved_record_of_any_shape_gives_a_notice_and_not_a_broken_page(lab: Lab, scale: int, part: str) -> None:
    records = WHOLE if part == "whole" else changed(40 * scale)
    for first in range(0, len(records), 40):
        some = records[first : first + 40]
        notebook = page_of(lab, some)
        texts = drawn(lab, notebook, len(some))
        assert all(texts), [i for i, t in enumerate(texts) if not t]
        for cell in range(len(some)):
            lab.page.evaluate("(node) => window.__watch.provoke(node)", notebook.output(cell))
            assert lab.page.evaluate("(node) => window.__watch.suspects(node)", notebook.output(cell)) == []
        lab.page.wait_for_timeout(200)
        assert ran(lab.page) == [] and lab.watch.dialogs == [] and lab.watch.strangers() == []
        assert lab.watch.faults() == [], "an exception that nobody caught"
        assert lab.page.evaluate("() => ({}).polluted === undefined")
        notebook.close()


def test_the_engine_survives_messages_that_no_view_of_ours_sends(lab: Lab, scale: int) -> None:
    """S3: anything on the views' channels has no effect but an answer; the run goes on and ends as it would have."""
    notebook = lab.new(["%%mlx --bg\nred question"], setup="import scripted; scripted.use(scripted.marked, hold=4)")
    notebook.run(0)
    notebook.wait_text(0, "red3")
    sent = lab.page.evaluate(SEND, [notebook.path, json.loads(json.dumps([*VALUES, *WHOLE[:9]])), 500 * scale])
    assert sent >= 500 * scale
    assert notebook.call("print(_mlx.status, len(scripted.client().requests), scripted.client().cancels)").split("\n")[0] == "running 1 []"
    notebook.call("scripted.client().release()")
    notebook.wait_text(0, "red39")
    assert notebook.call("print(_mlx.status)").strip() == "done"


SEND = """
async ([path, values, count]) => {
  const kernel = window.__nb.kernel(path);
  const found = (await kernel.requestCommInfo({})).content.comms;
  const ids = Object.keys(found);
  if (!ids.length) throw new Error("no comm is open while a view is live");
  const names = ["stop", "branch", "snapshot", "regenerate", "cancel", "__class__", "", null, 7, "chat.send", "stepper.step", "stop_all_"];
  let sent = 0, dice = 12345;
  const pick = (list) => { dice = (dice * 1103515245 + 12345) % 2147483648; return list[dice % list.length]; };
  while (sent < count) {
    for (const id of ids) {
      const shape = sent % 6, value = pick(values), args = { run: pick(values), at: pick(values) };
      const message = { type: "command", id: "t" + sent, key: pick(["k", "", value]), name: pick(names), args };
      const content = shape === 0 ? value : shape === 1 ? { type: value } : shape === 2 ? { type: "ack", seq: value, frame_ms: value }
        : shape === 3 ? { ...message, id: value } : shape === 4 ? { ...message, args: "y".repeat(70000) } : message;
      const state = { record: value, state: "final", _esm: "alert(1)", key: value };
      const data = sent % 2 ? { method: "custom", content } : { method: "update", state };
      const header = { msg_id: `h${sent}-${Math.random()}`, msg_type: "comm_msg", session: kernel.clientId, username: "",
        date: new Date().toISOString(), version: "5.2" };
      const packet = { header, parent_header: {}, metadata: {}, content: { comm_id: id, data }, channel: "shell", buffers: [] };
      kernel.sendShellMessage(packet, false, true).done.catch(() => {});
      sent += 1;
    }
    if (sent % 100 < ids.length) await new Promise((resolve) => setTimeout(resolve, 20));
  }
  return sent;
}
"""
