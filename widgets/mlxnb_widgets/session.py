"""`SessionWidget`: the one channel of a kernel to all its views. It draws nothing."""

from __future__ import annotations

import traitlets

from ._base import Base


class SessionWidget(Base):
    """Carries deltas and answers to the front end, and acknowledgements and commands back, as custom messages."""

    kind = traitlets.Enum(("session",), "session").tag(sync=True)
