"""What is known of each mlx-lm model module: which may share a batch, and which are refused with a reason.

A module is listed once the parity test of `tests/test_graph.py` has shown rows of a ragged batch equal to each row alone.
Everything else is refused before any work; later kinds of layer extend this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ModelError

RAGGED_FULL_ATTENTION = frozenset({"llama", "qwen2", "qwen3", "phi3"})
"""Modules whose layers are all full attention and whose steps may be ragged. `mistral` is served by `llama`."""


def admit(module: str, cache_kinds: list[str], config: Mapping[str, Any]) -> None:
    """Raise ModelError unless this module with these mlx-lm cache classes can share a batch exactly."""
    other = sorted({kind for kind in cache_kinds if kind != "KVCache"})
    if other:
        raise ModelError(
            f"This model has layers of a kind that is not supported yet ({', '.join(other)}; unknown_state_signature).",
            "Use a full-attention model: llama, mistral, qwen2, qwen3 or phi3.",
        )
    if module not in RAGGED_FULL_ATTENTION:
        raise ModelError(
            f"Models of family {module!r} are not qualified for the shared batch yet.",
            "Use a llama, mistral, qwen2, qwen3 or phi3 model.",
        )
    scaling = config.get("rope_scaling") or {}
    if (scaling.get("type") or scaling.get("rope_type")) == "dynamic":
        raise ModelError(
            "Dynamic NTK RoPE scaling depends on the longest row and cannot be batched exactly.",
            "Use a checkpoint with linear, yarn, llama3 or no RoPE scaling.",
        )
