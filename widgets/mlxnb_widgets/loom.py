"""`LoomWidget`. A tree of continuations."""

from __future__ import annotations

import traitlets

from ._base import View


class LoomWidget(View):
    """A tree of continuations. The script is widgets/src/loom.tsx."""

    kind = traitlets.Enum(("loom",), "loom").tag(sync=True)
