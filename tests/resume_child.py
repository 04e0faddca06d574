"""A kernel that is killed while it writes an answer: `resume_child.py MODEL CACHE PROMPT TOKENS [SEED]`; says so once it has noted it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "engine"), str(HERE.parent)]

from engine_rig import ask, client_of  # noqa: E402

from mlxnb_engine.methods import checkpoints  # noqa: E402


def main(model: str, cache: str, prompt: str, tokens: int, seed: int | None) -> None:
    checkpoints.EVERY_S, checkpoints.BYTES_PER_S = 0.05, 2**40
    client = client_of(Path(model), Path(cache), max_rows=2)
    (row,) = client.submit(ask(prompt, tokens, temp=0.9, presence_penalty=0.4, seed=seed, logprobs=2))
    seen = 0
    while not row.done and not list(Path(cache).glob("prefix/resume/*.run")):
        seen += len(row.read(seen, 0.01))
    print("noted" if not row.done else "too late", flush=True)
    row.wait()
    print("done", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]) if len(sys.argv) > 5 else None)  # type: ignore[arg-type]
