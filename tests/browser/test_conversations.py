"""A conversation in the cells of a notebook: JupyterLab says which cell asks, and the tree follows what is run again."""

from __future__ import annotations

from .eyes import show, wait_words, words
from .lab import Lab

FAST = "import scripted; scripted.use(scripted.marked, step_s=0.001)"
CELLS = (
    "%%mlx -c garden --system 'Be brief.'\nred question",
    "%%mlx -c garden\nblue question",
    "%%mlx -c garden\ngreen question",
    "%mlx show garden",
)
FIRST, SECOND, THIRD, TREE = range(4)


def test_a_cell_that_runs_again_replaces_its_turn_and_the_tree_says_what_is_stale(lab: Lab) -> None:
    notebook = lab.new(CELLS, setup=FAST, name="garden")
    notebook.run_all()
    wait_words(notebook, TREE, "head")
    assert "stale" not in words(notebook, TREE) and "t3" in words(notebook, TREE)
    # The same cell with other words: its id tells that it is the same.
    lab.page.evaluate(
        "([path, text]) => window.__nb.cell(path, 1).model.sharedModel.setSource(text)",
        [notebook.path, "%%mlx -c garden\nblue again"],
    )
    notebook.run(SECOND)
    wait_words(notebook, TREE, "blue again")
    wait_words(notebook, TREE, "stale")
    seen = notebook.call("from mlxnb.chatnames import CHATS\nprint([(t.id, t.question, t.stale) for t in CHATS.find('garden').turns])")
    assert "('t1', 'red question', False), ('t2', 'blue again', False), ('t3', 'green question', True)" in seen
    tree = show(notebook, TREE)
    lab.shot("chat-tree-stale", tree)
    tree.query_selector("button:has-text('t3')").click()
    tree.wait_for_selector("button:has-text('Keep as a fork')").click()
    wait_words(notebook, TREE, "garden-2 begins with the turns up to here")
    tree.query_selector("button:has-text('Chat')").click()
    wait_words(notebook, TREE, "1 turn kept aside")
    lab.shot("chat-stale", show(notebook, TREE))
    # Its own cell brings it up to date; the view follows.
    notebook.run(THIRD)
    lab.until(lambda: "kept aside" not in words(notebook, TREE))
    area = show(notebook, TREE).query_selector("textarea")
    area.fill("red from the view")
    area.press("Enter")
    wait_words(notebook, TREE, "turn t4")
    lab.until(lambda: "red39" in words(notebook, TREE))
    show(notebook, TREE).query_selector("[aria-label^='Regenerate']").click()
    wait_words(notebook, TREE, "2/2")
    lab.shot("chat-siblings", show(notebook, TREE))
