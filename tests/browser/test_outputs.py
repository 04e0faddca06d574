"""Saved and live outputs without a model: what is shown, what reaches the model, what other readers get."""

from __future__ import annotations

import pytest

from .lab import Lab, Notebook

PROMPT = (
    'Give {"a": [1, {"b": "{c}"}]} and f"{x!r:>{width}}" for $HOME ${PATH}'
    " {In[3]} {% raw %}\n\t`tick` \\n \\\\ 100% \u00e9\U0001f600 {# no #}"
)


def test_a_prompt_of_braces_and_dollars_reaches_the_model_byte_for_byte(lab: Lab) -> None:
    notebook = lab.new([f"%%mlx\n{PROMPT}"], setup="import scripted; scripted.use(lambda request, index: ['seen'])")
    notebook.run(0)
    sent = notebook.call("print(ascii(scripted.prompt_of(scripted.client().requests[-1])))")
    assert sent.strip() == ascii(PROMPT)
    assert "seen" in notebook.text(0)


def open_tab(notebook: Notebook) -> str:
    """The tab that is open in the first cell's output."""
    return str(notebook.output(0).wait_for_selector("[role=tab][aria-selected=true]").inner_text())


@pytest.mark.parametrize("view", ["tokens", "raw"])
def test_the_view_that_a_cell_asks_for_is_open_live_at_the_end_and_after_reopening(lab: Lab, view: str) -> None:
    setup = "import scripted; scripted.use(scripted.words, hold=2); scripted.release_when('go-on')"
    notebook = lab.new([f"%%mlx --view {view}\n8 words"], setup=setup)
    (notebook.file.parent / "go-on").unlink(missing_ok=True)
    notebook.start(0)
    notebook.wait_text(0, "1:light")
    assert open_tab(notebook).lower() == view
    (notebook.file.parent / "go-on").touch()
    notebook.wait_end(0)
    assert open_tab(notebook).lower() == view
    (notebook.file.parent / "go-on").unlink()
    assert open_tab(notebook.reopened()).lower() == view
