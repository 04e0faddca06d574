"""`RunWidget`. An answer, or several side by side."""

from __future__ import annotations

import traitlets

from ._base import View


class RunWidget(View):
    """An answer, or several side by side. The script is widgets/src/run.tsx, or compare.tsx for several."""

    kind = traitlets.Enum(("run", "compare"), "run").tag(sync=True)
