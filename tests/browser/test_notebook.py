"""Notebook 7: one page, one notebook. The same extension loads there, a cell streams, and what it saved opens again."""

from __future__ import annotations

from .lab import START_S, Lab, Notebook


def opened(lab: Lab, path: str) -> Notebook:
    """The notebook in Notebook 7, once its page has started."""
    lab.page.goto(f"{lab.server.url}notebooks/{path}?token={lab.server.token}", wait_until="commit")
    ready = "(path) => window.jupyterapp && window.__nb && [...jupyterapp.shell.widgets('main')].some((w) => w.context?.path === path)"
    lab.page.wait_for_function(ready, arg=path, timeout=1000 * START_S)
    lab.page.evaluate("(path) => window.__nb.within(window.__nb.panel(path).revealed, 'the notebook')", path)
    return Notebook(lab, path)


def test_a_cell_streams_in_notebook_7_and_its_saved_output_opens_again(lab: Lab) -> None:
    page = lab.page.context.new_page()
    page.set_default_timeout(60_000)
    here = Lab(page, lab.server, lab.watch, lab.shots)
    try:
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
        notebook = opened(here, lab.write(["%%mlx\nred question"], "seven", kernel))
        page.evaluate("(path) => window.__nb.within(window.__nb.panel(path).sessionContext.ready, 'the kernel')", notebook.path)
        notebook.call("import scripted; scripted.use(scripted.marked, hold=12); scripted.release_when('go-seven')")
        assert page.evaluate("() => jupyterapp.hasPlugin('mlxnb:plugin') && jupyterapp.isPluginActivated('mlxnb:plugin')")
        assert page.evaluate("() => jupyterapp.commands.hasCommand('mlxnb:stop')")
        notebook.start(0)
        notebook.wait_text(0, "red11")
        assert "red12" not in notebook.text(0) and notebook.executing(0)
        (notebook.file.parent / "go-seven").touch()
        notebook.wait_end(0)
        notebook.wait_text(0, "red39")
        notebook.save()
        page.evaluate("(path) => window.__nb.within(window.__nb.panel(path).sessionContext.shutdown(), 'shutdown')", notebook.path)
        again = opened(here, notebook.path)
        again.wait_text(0, "red39")
        assert again.output(0).query_selector("[role=tab]"), "the view, not the HTML of other readers"
        here.shot("notebook-7")
        said = [text for text in lab.watch.console if not text.startswith(("log", "debug", "info"))]
        assert [text for text in lab.watch.faults() + said if "mlxnb" in text.lower()] == []
    finally:
        page.close()
