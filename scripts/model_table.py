"""Writes docs/models.md from the capability table, `engine/mlxnb_engine/state/families.py`, which `tests/test_zoo.py` proves.

python scripts/model_table.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "docs" / "models.md"
HEAD = """\
# Which models share a batch

Every cell, sample and sweep point is a row; rows of one model decode together in one step. This page says for each model module of
mlx-lm how its rows may do so. A checkpoint names its module as `model_type` in its `config.json` (mistral checkpoints use `llama`).

It is written by `scripts/model_table.py` from the capability table, and `tests/test_zoo.py` proves the table: a tiny random model of
each module runs ragged batches with late joins and retirements, and each row must give the ids, hidden rows, scores and state **bytes**
that it gives alone, and alone the ids of mlx-lm. That holds on the reference BLAS, and with `MLXNB_BLAS=mkl-strict`; elsewhere
(default MKL, GPU) batch and window widths change the last bits of any model, this engine's or mlx-lm's.

A module that is not listed runs alone, unless two ragged rows of it score as each alone when it is loaded. Not tried on Metal.
"""


def page() -> str:
    """The whole text of the file."""
    sys.path.insert(0, str(ROOT / "engine"))
    from mlxnb_engine.state import families

    table = families.FAMILIES
    plain = [n for n, f in table.items() if f.mode == "ragged" and not f.note]
    ruled = {n: f for n, f in table.items() if f.mode != "lone" and n not in plain}
    alone = {n: f for n, f in table.items() if f.mode == "lone"}
    counts = (
        f"{len(plain) + len(ruled)} modules share a batch, {len(ruled)} of them under a rule; {len(alone)} run alone; "
        f"{len(families.REFUSED)} are refused; {len(families.UNTRIED)} were not tried.\n"
    )
    parts = [
        HEAD,
        counts,
        f"## In the batch ({len(plain)})\n",
        ", ".join(f"`{name}`" for name in sorted(plain, key=str.lower)) + "\n",
        f"## In the batch, under a rule ({len(ruled)})\n",
        "| module | prompts are read | window of several tokens | rule |\n| --- | --- | --- | --- |",
        *(
            f"| `{name}` | {'together' if f.mode == 'ragged' else 'one by one'} | {'as single steps' if f.windows else 'differs in bits'} "
            f"| {f.note}{'; sparse selection: rows agree to 2e-6' if name in _NUMERIC else ''} |"
            for name, f in sorted(ruled.items(), key=lambda item: item[0].lower())
        ),
        f"\n## Alone: rows take turns ({len(alone)})\n",
        "| module | why |\n| --- | --- |",
        *(f"| `{name}` | {f.note} |" for name, f in sorted(alone.items())),
        f"\n## Refused ({len(families.REFUSED)})\n",
        "| module | why |\n| --- | --- |",
        *(f"| `{name}` | {why} |" for name, why in sorted(families.REFUSED.items())),
        f"\n## Not tried ({len(families.UNTRIED)})\n",
        "| module | why |\n| --- | --- |",
        *(f"| `{name}` | {why} |" for name, why in sorted(families.UNTRIED.items())),
        "",
    ]
    return "\n".join(parts)


_NUMERIC = ("deepseek_v32", "glm_moe_dsa")

if __name__ == "__main__":
    PLACE.write_text(page(), "utf-8")
    print(f"{PLACE.relative_to(ROOT)}: written")
