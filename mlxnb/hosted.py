"""`widget`: a run, a group, a chat or a view as one anywidget, for hosts that show widgets by themselves, such as marimo."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython

from mlxnb_engine.errors import RequestError

from .chat import Chat
from .chatview import ChatView
from .frontend import OwnSession
from .live import _widget
from .render import check_view, group_bundle, run_bundle
from .rows import Rows
from .run import Run, RunGroup
from .views import OpenView

if TYPE_CHECKING:
    from mlxnb_widgets._base import View


class RunView(OpenView):
    """A run or a group that stays open after its end: it can be branched and asked again."""

    def __init__(self, target: Run | RunGroup, session: OwnSession, view: str = "answer") -> None:
        self.target = target
        self.view = check_view(view)
        super().__init__(session.shell, _widget, session)
        self._rows = Rows(self.key, target, {"key": self.key, "view": view}, self._grown)
        self.stream = self._rows.stream
        self.commands = self._rows.commands

    def traits(self) -> dict[str, Any]:
        return {"kind": "run" if isinstance(self.target, Run) else "compare", "setting": {"view": self.view}}

    def record(self) -> dict[str, Any]:
        return self._rows.snapshot()

    def bundle(self) -> dict[str, Any]:
        return run_bundle(self.target, self.view) if isinstance(self.target, Run) else group_bundle(self.target, self.view)

    def _grown(self, target: RunGroup) -> None:
        self.target = target
        self.changed()
        self.watch()


def widget(target: Run | RunGroup | Chat | OpenView, *, view: str = "answer") -> View:
    """One anywidget of it, live while it runs: `mo.ui.anywidget(mlxnb.widget(chat))` in marimo, or a child of an ipywidgets box.

    target: a Run or RunGroup (with `wait=False` it streams), a Chat, or what `monitor`, `playground`, `stepper`, `loom` and
    `cache_map` return outside of IPython. view: the tab of a run that opens first. Raises RequestError for anything else, or
    without the scripts.
    """
    from mlxnb_widgets import available

    if not available():
        raise RequestError("The scripts of the widgets are not here.", "Install mlxnb from a wheel, or build them: make frontend.")
    if isinstance(target, OpenView):
        return target.widget()
    session = OwnSession(get_ipython())
    if isinstance(target, Chat):
        return ChatView(target, session=session).widget()
    if isinstance(target, (Run, RunGroup)):
        return RunView(target, session, view).widget()
    raise RequestError(f"There is no widget of {type(target).__name__}.", "Give it a run, a group, a chat, or a view.")
