"""`ChatWidget`. A conversation in one cell."""

from __future__ import annotations

import traitlets

from ._base import View


class ChatWidget(View):
    """A conversation in one cell. The script is widgets/src/chat.tsx."""

    kind = traitlets.Enum(("chat",), "chat").tag(sync=True)
