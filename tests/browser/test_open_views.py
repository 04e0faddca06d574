"""Views that stay open, through everything that happens to a page and its notebook: reloads, saves, other readers, other kernels."""

from __future__ import annotations

from typing import Any

from .eyes import show, wait_words, words
from .lab import Lab, Notebook

RUN_MIME = "application/vnd.mlxnb.run.v1+json"
WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
CHAT, PLAYGROUND, STEPPER, MONITOR, LOOM, CACHE = range(6)
CELLS = (
    "import mlxnb\nchat = mlxnb.load().chat(system='Be brief.')\nchat.show()",
    "playground = mlxnb.playground('the sea', max_tokens=12, seed=3)\nNone",
    "stepper = mlxnb.stepper('the sea', seed=3)\nNone",
    "monitor = mlxnb.monitor()\nNone",
    "loom = mlxnb.loom('the sea', n=4, max_tokens=6, temp=0.9, seed=3)\nNone",
    "cache = mlxnb.cache_map()\nNone",
)
SHOWN = {
    CHAT: "Be brief.",
    PLAYGROUND: "repetition penalty",
    STEPPER: "your turn",
    MONITOR: "Memory",
    LOOM: "4 samples",
    CACHE: "RAM",
}
LOST = ("model not found", "error displaying widget", "loading widget")


def opened(lab: Lab, kernel: str) -> Notebook:
    """The views, each with something in it."""
    notebook = lab.new(CELLS, kernel, name="views")
    notebook.run_all()
    notebook.call("chat.send('the sea', max_tokens=12); stepper.forward(2); stepper.changed()")
    for cell, text in SHOWN.items():
        wait_words(notebook, cell, text)
    wait_words(notebook, CHAT, "turn t1")
    lab.until(lambda: any(end in words(notebook, PLAYGROUND) for end in ("complete", "length")))
    return notebook


def data(notebook: Notebook, cell: int) -> dict[str, Any]:
    return dict(notebook.outputs(cell)[-1]["data"])


def assert_nothing_lost(notebook: Notebook) -> None:
    for cell in SHOWN:
        text = words(notebook, cell).lower()
        assert text.strip() and not any(word in text for word in LOST), (cell, text[:200])


def test_open_views_live_on_after_a_reload_and_their_notebook_never_holds_a_widget(lab: Lab, tiny_kernel: str) -> None:
    notebook = opened(lab, tiny_kernel)
    notebook.call("chat.send('the moon', max_tokens=40)")
    lab.until(lambda: bars(notebook) > 2)  # also of rows that were shorter than the beat of the status
    saved = notebook.save()
    for cell in SHOWN:
        output = saved["cells"][cell]["outputs"][-1]  # the first one may say that a model was loaded
        assert WIDGET_MIME not in output["data"] and {RUN_MIME, "text/html", "text/plain"} <= set(output["data"])
    assert show(notebook, CHAT).query_selector("textarea").is_enabled()  # the page itself goes on
    kept = saved["cells"][CHAT]["outputs"][-1]["data"]
    plain = "".join(kept["text/plain"])
    assert "the sea" in plain and "the moon" in plain and len(kept[RUN_MIME]["runs"]) == 2

    lab.reload()
    again = lab.open(notebook.path, tiny_kernel)
    for cell, text in SHOWN.items():
        wait_words(again, cell, text)
        lab.until(lambda cell=cell: WIDGET_MIME in data(again, cell))  # type: ignore[misc]
    wait_words(again, CHAT, "turn t2")
    assert data(again, CHAT)[RUN_MIME]["runs"][0]["status"] in ("done", "stopped")
    assert_nothing_lost(again)
    lab.until(lambda: bars(again) > 2)  # what was before the reload: the kernel keeps it

    # They take commands, and what happens elsewhere reaches them.
    again.call("chat.send('the stars', max_tokens=8)")
    wait_words(again, CHAT, "turn t3")
    show(again, STEPPER).query_selector("button.mlxnb-btn-primary").click()
    wait_words(again, STEPPER, "token 4")
    area = show(again, CHAT).query_selector("textarea")
    area.fill("and the wind?")
    area.press("Enter")
    wait_words(again, CHAT, "turn t4")
    grow(again)
    assert lab.watch.faults() == []


def bars(notebook: Notebook) -> int:
    """Rows that the monitor shows as bars of their slots."""
    return len(show(notebook, MONITOR).query_selector_all(".mlxnb-mon-bar"))


def grow(notebook: Notebook) -> None:
    """Go on from a piece of the loom; the map of the cache reads a block of what that used."""
    node = show(notebook, LOOM)
    node.query_selector("[role=treeitem]").click()
    notebook.lab.until(lambda: node.query_selector(".mlxnb-lm-act button.mlxnb-btn-primary"))
    node.query_selector(".mlxnb-lm-act button.mlxnb-btn-primary").click()
    wait_words(notebook, LOOM, "continued1 row")
    run = show(notebook, CACHE).query_selector(".mlxnb-cm-run")
    run.focus()
    story = notebook.page.wait_for_selector(".mlxnb-cm-pop")
    notebook.lab.until(lambda: "<|im_start|>" in story.text_content())
    notebook.page.keyboard.press("Escape")


def test_open_views_of_a_kernel_that_is_gone_show_what_they_held(lab: Lab, tiny_kernel: str) -> None:
    notebook = opened(lab, tiny_kernel)
    for kernel in (None, tiny_kernel):
        notebook = notebook.reopened(kernel)
        wait_words(notebook, CHAT, "turn t1")
        wait_words(notebook, PLAYGROUND, "This playground is saved")
        wait_words(notebook, STEPPER, "This stepper is saved")
        wait_words(notebook, MONITOR, "saved")
        wait_words(notebook, LOOM, "This loom is saved")
        wait_words(notebook, CACHE, "saved")
        assert_nothing_lost(notebook)
        assert "saved conversation" in show(notebook, CHAT).query_selector("textarea").get_attribute("placeholder")
        assert all(WIDGET_MIME not in data(notebook, cell) for cell in SHOWN)
        assert lab.watch.faults() == []


def test_a_live_answer_whose_kernel_was_killed_keeps_what_was_written(lab: Lab) -> None:
    notebook = lab.new(["%%mlx --bg\n40 words"], setup="import scripted; scripted.use(scripted.words, hold=12)")
    notebook.run(0)
    wait_words(notebook, 0, "11:the")
    notebook.save()
    lab.page.evaluate("([path]) => window.__nb.kernel(path).restart()", [notebook.path])
    again = notebook.reopened()
    wait_words(again, 0, "11:the")
    assert_no_widget_error(again, 0)


def assert_no_widget_error(notebook: Notebook, cell: int) -> None:
    text = words(notebook, cell).lower()
    assert not any(word in text for word in LOST), text[:200]
    assert WIDGET_MIME not in data(notebook, cell)


def test_a_page_that_lost_its_open_views_gets_them_back(lab: Lab, tiny_kernel: str) -> None:
    notebook = opened(lab, tiny_kernel)
    lab.page.evaluate("([path, cell]) => window.__nb.cell(path, cell).model.outputs.clear()", [notebook.path, CHAT])
    assert notebook.outputs(CHAT) == []
    lab.page.evaluate("() => window.jupyterapp.commands.execute('mlxnb:repair-outputs')")
    wait_words(notebook, CHAT, "turn t1")
    assert WIDGET_MIME in data(notebook, CHAT)
