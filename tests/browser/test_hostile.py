"""Saved outputs that are not what we saved: a plain notice or nothing worse, never a broken page, a script or a request."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import pytest

from mlxnb.schema import WIDGET_MIME
from mlxnb_widgets import asset
from mlxnb_widgets.run import RunWidget

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
        for record, text in zip(some, texts, strict=True):
            schema = record.get("schema") if isinstance(record, dict) else None
            if schema in ("mlxnb.run/2", "mlxnb.group/9"):
                assert f"another version of mlxnb ({schema})" in text
            elif schema not in ("mlxnb.run/1", "mlxnb.group/1"):
                assert text.startswith(("This output", "plain ")), (record, text)
        for cell in range(len(some)):
            lab.page.evaluate("(node) => window.__watch.provoke(node, true)", notebook.output(cell))
            assert lab.page.evaluate("(node) => window.__watch.suspects(node)", notebook.output(cell)) == []
        lab.page.wait_for_timeout(200)
        assert ran(lab.page) == [] and lab.watch.dialogs == [] and lab.watch.strangers() == []
        assert lab.watch.faults() == [], "an exception that nobody caught"
        assert lab.page.evaluate("() => ({}).polluted === undefined")
        notebook.close()


# -- S3: saved states of widgets -------------------------------------------------------------------------------------------

KINDS = ("run", "compare", "chat", "monitor", "playground", "stepper", "session", "constructor", IMG, 7, None)
SESSIONS = ("", "IPY_MODEL_", "IPY_MODEL_gone", "IPY_MODEL_model-0", IMG, 7, None, ["IPY_MODEL_gone"])


def hostile_states(count: int) -> list[dict[str, Any]]:
    """Traits as a file may hold them, for our own script."""
    dice = random.Random(21)
    records = [*WHOLE, *changed(count)]
    states = []
    for _ in range(count):
        state = {"kind": dice.choice(KINDS), "session": dice.choice(SESSIONS), "record": dice.choice(records), "key": "k", "state": "live"}
        state["setting"] = dice.choice([{}, {"view": "tokens"}, {"view": IMG}, *VALUES])
        for name in dice.sample(sorted(state), dice.choice((0, 0, 1))):
            state[name] = dice.choice(VALUES)
        states.append(state)
    return states


DRAW = """
async ([esm, states]) => {
  const address = URL.createObjectURL(new Blob([esm], { type: "text/javascript" }));
  const widget = (await import(address)).default;
  const known = { get_model: (id) => (id === "model-0" ? Promise.resolve(models[0]) : Promise.reject(new Error("no such model"))) };
  const models = states.map((state) => ({
    get: (name) => state[name], set() {}, save_changes() {}, on() {}, off() {}, send() {}, widget_manager: known,
  }));
  const box = document.createElement("div");
  document.body.append(box);
  await Promise.all(models.map(async (model) => {
    const el = document.createElement("div");
    box.append(el);
    widget.initialize({ model });
    await widget.render({ model, el });
  }));
  return box;
}"""


def wrong_with(lab: Lab, nodes: list[Any]) -> list[str]:
    found: list[str] = []
    for node in nodes:
        lab.page.evaluate("(node) => window.__watch.provoke(node, true)", node)
        found += lab.page.evaluate("(node) => window.__watch.suspects(node)", node)
    lab.page.wait_for_timeout(300)
    return found + ran(lab.page) + lab.watch.dialogs + lab.watch.strangers() + lab.watch.faults()


def drawn_states(lab: Lab, states: list[dict[str, Any]]) -> Any:
    """These widgets drawn by our script as anywidget calls it, each in an element of the one that is returned."""
    box = lab.page.evaluate_handle(DRAW, [asset("loader.js"), json.loads(json.dumps(states))]).as_element()
    blank = "(box) => [...box.children].filter((one) => !one.textContent.trim()).map((one) => one.outerHTML.slice(0, 300))"
    found: list[str] = []
    with contextlib.suppress(AssertionError):
        lab.until(lambda: not (found.clear() or found.extend(lab.page.evaluate(blank, box)) or found), 20)  # type: ignore[func-returns-value]
    assert found == []
    return box


def test_a_saved_state_of_any_shape_gives_a_notice_and_not_a_broken_page(lab: Lab, scale: int) -> None:
    """S3: whatever a file says of a widget, nothing runs, nothing is fetched and nothing breaks."""
    states = hostile_states(500 * scale)
    for first in range(0, len(states), 500):
        box = drawn_states(lab, states[first : first + 500])
        assert wrong_with(lab, [box]) == []
        assert lab.page.evaluate("() => ({}).polluted === undefined")
        box.evaluate("(box) => box.remove()")


def test_the_check_of_saved_states_catches_a_view_that_takes_text_for_markup(lab: Lab) -> None:
    """Negative control: our own bundle, in which every `textContent` is `innerHTML`."""
    record = {**GOOD, "text": f"`{IMG}`", "tokens": None}
    state = {"kind": "run", "session": "", "record": record, "key": "k", "state": "live", "setting": {}}
    with lab.scripts_changed(".textContent=", ".innerHTML="):
        assert any("alert(1)" in fault for fault in wrong_with(lab, [drawn_states(lab, [state])]))


STATE_MIME = "application/vnd.jupyter.widget-state+json"
AGAIN = """([path]) => { for (const cell of window.__nb.panel(path).content.model.cells) {
    for (let i = 0; i < cell.outputs.length; i++) cell.outputs.set(i, cell.outputs.get(i).toJSON()); } }"""


@pytest.mark.tier("N")
def test_hostile_widgets_that_a_trusted_notebook_has_saved_ask_nothing_of_its_kernel(lab: Lab) -> None:
    """The same by way of JupyterLab and anywidget, for a few: models that the kernel does not know, restored from the file."""
    states = hostile_states(40)
    path = lab.write(["pass"], "states")
    file = lab.server.notebooks / path
    notebook = json.loads(file.read_text("utf-8"))
    fixed = {name: value for name, value in RunWidget().get_state().items() if name.startswith("_")} | {"layout": "IPY_MODEL_layout"}
    base = {"model_module": "@jupyter-widgets/base", "model_module_version": "2.0.0", "model_name": "LayoutModel", "state": {}}
    kind = {"model_module": "anywidget", "model_module_version": fixed["_model_module_version"], "model_name": "AnyModel"}
    saved = {"layout": base} | {f"model-{n}": {**kind, "state": {**fixed, **state}} for n, state in enumerate(states)}
    notebook["metadata"]["widgets"] = {STATE_MIME: {"version_major": 2, "version_minor": 0, "state": saved}}
    views = [{"version_major": 2, "version_minor": 0, "model_id": f"model-{n}"} for n in range(len(states))]
    notebook["cells"][0]["outputs"] = [{"output_type": "display_data", "data": {WIDGET_MIME: view}, "metadata": {}} for view in views]
    file.write_text(json.dumps(notebook), "utf-8")
    lab.trust(path)
    page = lab.open(path, "python3")
    page.call("import scripted; scripted.use(scripted.marked)")
    node = page.output(0)
    count = """(node) => [...node.querySelectorAll(".jp-OutputArea-output")].filter((one) => one.querySelector(".mlxnb-root")?.textContent
        || one.textContent.startsWith("mlxnb cannot draw")).length"""
    for _ in range(5):
        with contextlib.suppress(AssertionError):
            lab.until(lambda: lab.page.evaluate(count, node) == len(states), 4)
            break
        lab.page.evaluate(AGAIN, [path])  # drawn before the widget manager has read the file, they are not found
    assert lab.page.evaluate(count, node) == len(states)
    assert wrong_with(lab, [node]) == []
    assert page.call("from mlxnb import runtime; print(runtime.current())") == "None\n"


# -- S3: messages ----------------------------------------------------------------------------------------------------------


def flood(lab: Lab, setup: str, count: int) -> Notebook:
    """A run that is held after four tokens, while a front end sends `count` messages that no view of ours sends."""
    notebook = lab.new(["%%mlx --bg\nred question"], setup=setup + "import scripted; scripted.use(scripted.marked, hold=4)")
    notebook.run(0)
    notebook.wait_text(0, "red3")
    key = notebook.call("from mlxnb import frontend; print(*frontend.session_of(get_ipython()).sources)").strip()
    sent = lab.page.evaluate(SEND, [notebook.path, json.loads(json.dumps([*VALUES, *WHOLE[:9]])), count, key])
    assert sent >= count
    return notebook


FATE = "print(_mlx.status, _mlx.stopping, len(scripted.client().requests), scripted.client().cancels)"


def test_the_engine_survives_messages_that_no_view_of_ours_sends(lab: Lab, scale: int) -> None:
    """S3: anything on the views' channels has no effect but an answer; the run goes on and ends as it would have."""
    notebook = flood(lab, "", 500 * scale)
    assert notebook.call(FATE) == "running False 1 []\n"
    notebook.call("scripted.client().release()")
    notebook.wait_text(0, "red39")
    assert notebook.call("print(_mlx.status)").strip() == "done"


NO_CHECK = """
import mlxnb.frontend, mlxnb_widgets.dispatch
mlxnb.frontend.command_problem = lambda name, args: None
mlxnb_widgets.dispatch.MAX_BYTES = 1 << 40
"""


def test_the_check_of_messages_catches_a_kernel_that_checks_no_arguments(lab: Lab) -> None:
    """Negative control: the same messages, without the schema and the limit of size."""
    assert flood(lab, NO_CHECK, 120).call(FATE) != "running False 1 []\n"


SEND = """
async ([path, values, count, key]) => {
  const kernel = window.__nb.kernel(path);
  const found = (await kernel.requestCommInfo({})).content.comms;
  const ids = Object.keys(found);
  if (!ids.length) throw new Error("no comm is open while a view is live");
  const names = ["stop", "branch", "snapshot", "regenerate", "cancel", "__class__", "", null, 7, "chat.send", "stepper.step", "stop_all_"];
  let sent = 0, dice = 12345;
  // The high bits: the low ones of such a generator repeat at once.
  const roll = (sides) => { dice = (dice * 1103515245 + 12345) % 2147483648; return Math.floor(dice / 65536) % sides; };
  const pick = (list) => list[roll(list.length)];
  const header = (type) => ({ msg_id: `h${sent}-${Math.random()}`, msg_type: type, session: kernel.clientId, username: "",
    date: new Date().toISOString(), version: "5.2" });
  const post = (channel, type, content) => {
    const packet = { header: header(type), parent_header: {}, metadata: {}, content, channel, buffers: [] };
    if (channel === "control") kernel.sendControlMessage(packet, false, true).done.catch(() => {});
    else kernel.sendShellMessage(packet, false, true).done.catch(() => {});
    sent += 1;
  };
  while (sent < count) {
    for (const id of ids) {
      const value = pick(values), other = pick(values);
      // Each would be a good command but for what is too much or of the wrong kind.
      const command = { type: "command", id: "t" + sent, key };
      const whole = { ...command, key: pick([key, key, "", "k"]), name: pick(names), args: { run: value, at: other } };
      const excess = { ...command, name: pick(["stop", "regenerate", "branch"]), args: { run: 0, at: 1, more: value } };
      const content = [
        value, { type: value }, { type: "ack", seq: value, frame_ms: other }, { ...whole, id: value }, whole, excess,
        { ...excess, args: { run: 0, more: "y".repeat(70000) } }, { ...excess, args: { run: 0 }, more: value },
        { ...command, name: "stop", args: [0, 1] },
        { ...command, key: "", name: pick(["stop_all", "unload", "asset"]), args: { model: 7, name: [], more: value } },
      ][roll(10)];
      const state = { record: value, state: "final", _esm: "alert(1)", key: other };
      const odd = pick([{ method: "update", state }, value, { method: value }, { method: "request_state", x: other }]);
      const data = roll(5) ? { method: "custom", content } : odd;
      const channel = roll(4) ? "shell" : "control";
      if (roll(20)) post(channel, "comm_msg", { comm_id: id, data });
      else post("shell", "comm_open", { comm_id: `c${sent}`, target_name: pick(["mlxnb.session", "mlxnb.status"]), data: value });
    }
    if (sent % 100 < ids.length) await new Promise((resolve) => setTimeout(resolve, 20));
  }
  return sent;
}
"""
