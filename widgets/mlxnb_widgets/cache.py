"""`CacheWidget`. The prefix cache."""

from __future__ import annotations

import traitlets

from ._base import View


class CacheWidget(View):
    """The prefix cache. The script is widgets/src/cache.tsx."""

    kind = traitlets.Enum(("cache",), "cache").tag(sync=True)
