"""`StepperWidget`. One token at a time."""

from __future__ import annotations

import traitlets

from ._base import View


class StepperWidget(View):
    """One token at a time. The script is widgets/src/stepper.tsx."""

    kind = traitlets.Enum(("stepper",), "stepper").tag(sync=True)
