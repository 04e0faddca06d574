"""`View`: the base of every widget. A front end may read its traits and send checked messages; it can change nothing.

Owner: the kernel side (mlxnb.live) sets traits, from any one thread at a time. The scripts come from `static/`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import anywidget
import ipywidgets
import traitlets

from . import LOADER, asset, available
from .reply import reply_where_asked

Receive = Callable[[Any, Callable[[dict[str, Any]], None]], None]


def _loader() -> str:
    return asset(LOADER) if available() else "export default {}"


_layout: ipywidgets.Layout | None = None


def _shared_layout() -> ipywidgets.Layout:
    """One for all widgets: each would have its own otherwise, which closing the widget leaves behind."""
    global _layout
    if _layout is None or _layout.comm is None:
        _layout = ipywidgets.Layout()
    return _layout


class Base(anywidget.AnyWidget):
    """Ignores whatever a front end sends except requests for the state and custom messages, which go to `receive`."""

    _esm = _loader()

    def __init__(self, receive: Receive | None = None, **traits: Any) -> None:
        self._receive = receive
        super().__init__(layout=_shared_layout(), **traits)
        reply_where_asked(self.comm)

    def _handle_msg(self, msg: Any) -> None:
        data = msg.get("content", {}).get("data") if isinstance(msg, dict) and isinstance(msg.get("content"), dict) else None
        method = data.get("method") if isinstance(data, dict) else None
        if method == "request_state":
            self.send_state()
            if self._receive is not None:
                self._receive(None, self.send)  # no message of ours, but somebody is there
        elif method == "custom" and isinstance(data, dict) and self._receive is not None:
            self._receive(data.get("content"), self.send)

    def set_state(self, sync_data: Any) -> None:
        """Nothing: a trait set by a front end could be anything, also the script itself."""


class View(Base):
    """One view of one target.

    kind: which view. key: its name in messages. session: reference to the session widget. record: JSON, a snapshot about
    once a second. state: "live" or "final". setting: the view's own start, such as {"view": "tokens"}.
    """

    kind = traitlets.Unicode("").tag(sync=True)
    key = traitlets.Unicode("").tag(sync=True)
    session = traitlets.Unicode("").tag(sync=True)
    record = traitlets.Dict().tag(sync=True)
    state = traitlets.Enum(("live", "final"), "live").tag(sync=True)
    setting = traitlets.Dict().tag(sync=True)

    def reference(self) -> dict[str, Any]:
        """The value of the widget MIME type that shows this view. The key tells our views from others in a notebook."""
        return {"version_major": 2, "version_minor": 0, "model_id": cast(str, self.model_id), "mlxnb_key": self.key}
