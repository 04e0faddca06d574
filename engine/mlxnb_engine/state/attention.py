"""The one attention dispatch: rows of several capacity classes in one step, each class attending its own buffer.

mlx-lm's `scaled_dot_product_attention` hands a cache that has `bits` to `quantized_scaled_dot_product_attention`, which
every model module reaches through `mlx_lm.models.base` at call time. `install()` replaces that one symbol; whatever is not
an `AttentionView` of ours goes to the original. `graph.py` refuses modules that bypass it (see `families.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import mlx.core as mx

from ..zoo import base


class AttentionView(Protocol):
    """What an append returned: K/V as of that write, able to attend later."""

    def attend(self, queries: mx.array, scale: float) -> mx.array:
        """queries: [B, heads, L, D]; returns the same shape with the value width."""
        ...


_original: Callable[..., mx.array] | None = None


def _dispatch(
    queries: mx.array,
    q_keys: Any,
    q_values: Any,
    scale: float,
    mask: Any,
    group_size: int = 64,
    bits: int = 8,
) -> mx.array:
    if hasattr(q_keys, "attend"):
        return q_keys.attend(queries, scale)
    assert _original is not None
    return _original(queries, q_keys, q_values, scale=scale, mask=mask, group_size=group_size, bits=bits)


def install() -> None:
    """Put the dispatch in place. Idempotent; survives a reload of this module."""
    global _original
    current = base.quantized_scaled_dot_product_attention
    if getattr(current, "_mlxnb_original", None) is not None:
        _original = current._mlxnb_original
    else:
        _original = current
    _dispatch._mlxnb_original = _original  # type: ignore[attr-defined]
    base.quantized_scaled_dot_product_attention = _dispatch
