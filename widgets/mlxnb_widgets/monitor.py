"""`MonitorWidget`. The engine over time."""

from __future__ import annotations

import traitlets

from ._base import View


class MonitorWidget(View):
    """The engine over time. The script is widgets/src/monitor.tsx."""

    kind = traitlets.Enum(("monitor",), "monitor").tag(sync=True)
