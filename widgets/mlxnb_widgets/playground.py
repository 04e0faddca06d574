"""`PlaygroundWidget`. A prompt with sliders."""

from __future__ import annotations

import traitlets

from ._base import View


class PlaygroundWidget(View):
    """A prompt with sliders. The script is widgets/src/playground.tsx."""

    kind = traitlets.Enum(("playground",), "playground").tag(sync=True)
