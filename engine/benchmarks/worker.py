"""One benchmark process: one BLAS, the default model loaded once per side, commands as JSON lines on standard input.

    {"arm": "ours" | "mlx-lm" | "mlx-lm calls", "work": "decode" | "prefill" | "samples", "batch": 8, "prompt": 32, "tokens": 32, "seed": 0}

answers {"seconds": decode, prefill or whole time, "tokens": how many were timed}. The sides hold the same weights; ours runs as a
person gets it (client, engine thread, delivery), mlx-lm by `generate_step` for one row and `BatchGenerator` for more; "mlx-lm calls"
answers one row after the other.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from typing import Any

from mlxnb_engine import blas, events
from mlxnb_engine.client import LocalClient
from mlxnb_engine.config import resolve
from mlxnb_engine.types import CompletionRequest, RequestId

_WORDS = "the sea is wide and old stories say that a small boat can cross it when the wind is kind to those who wait".split()


def text_of(words: int, seed: int) -> str:
    """Plain words, about one token each, that differ by seed from the first word on."""
    rng = random.Random(seed)
    return " ".join(rng.choice(_WORDS) for _ in range(words))


class Ours:
    """This engine, through its client."""

    def __init__(self, chunk: int | None) -> None:
        self.client = LocalClient(resolve(overrides={"blas": "none", "prefill_chunk": chunk, "max_rows": 8}))
        self._number = 0

    def run(self, prompts: list[str], tokens: int) -> list[list[float]]:
        """Arrival time of each token, per row. Raises if a row ended before its last token: the arms must do the same work."""
        rows = []
        same = len(set(prompts)) == 1 and len(prompts) > 1
        for prompt in prompts[:1] if same else prompts:
            self._number += 1
            samples = len(prompts) if same else 1
            request = CompletionRequest(RequestId(f"bench-{self._number}"), "", text=prompt, max_tokens=tokens, samples=samples)
            rows += self.client.submit(request)
        times = []
        for row in rows:
            row.wait()
            row.raise_for_error()
            base = row._t0
            times.append([base + e.t for e in row.read() if isinstance(e, events.Tokens) and e.tokens])
            if len(times[-1]) < tokens:
                raise RuntimeError(f"a row ended after {len(times[-1])} of {tokens} tokens")
        return times


class MlxLm:
    """mlx-lm on the very same weights, as its own command line would run it."""

    def __init__(self, together: bool) -> None:
        from mlxnb_engine import loader

        self.together = together

        config = resolve()
        located = loader.locate(None, config, lambda *_: None, lambda: False)
        loaded = loader.load(located, config, None)
        self.model, self.tokenizer = loaded.model, loaded.tokenizer

    def run(self, prompts: list[str], tokens: int) -> list[list[float]]:
        import mlx.core as mx
        from mlx_lm.generate import BatchGenerator, generate_step

        ids = [self.tokenizer.encode(prompt) for prompt in prompts]
        if len(ids) == 1 or not self.together:
            return [[time.monotonic() for _ in generate_step(mx.array(one), self.model, max_tokens=tokens)] for one in ids]
        generator = BatchGenerator(self.model, max_tokens=tokens, completion_batch_size=len(ids), prefill_batch_size=len(ids))
        uids = generator.insert(ids, [tokens] * len(ids))
        times: dict[int, list[float]] = {uid: [] for uid in uids}
        while any(len(t) < tokens for t in times.values()):
            produced = generator.next()
            for response in produced[1] if isinstance(produced, tuple) else produced:
                times[response.uid].append(time.monotonic())
        return list(times.values())


def measure(side: Any, job: dict[str, Any]) -> dict[str, float]:
    """decode: from the moment every row has its first token to the last one. prefill: from submit to the last first token.
    samples: all rows have one prompt; from submit to the last token."""
    batch, tokens = job["batch"], job["tokens"]
    prompts = [text_of(job["prompt"], job["seed"] * 100 + (0 if job["work"] == "samples" else i)) for i in range(batch)]
    started = time.monotonic()
    times = side.run(prompts, tokens)
    first = max(t[0] for t in times)
    if job["work"] == "prefill":
        return {"seconds": first - started, "tokens": batch * job["prompt"]}
    if job["work"] == "samples":
        return {"seconds": max(t[-1] for t in times) - started, "tokens": batch * tokens}
    timed = sum(sum(1 for x in t if x > first) for t in times)
    return {"seconds": max(t[-1] for t in times) - first, "tokens": timed}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blas", default="auto")
    parser.add_argument("--chunk", type=int)
    options = parser.parse_args()
    choice = blas.preload(options.blas)
    sides: dict[str, Any] = {}
    print(json.dumps({"blas": choice.name}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        arm = job["arm"]
        side = sides.get(arm) or sides.setdefault(arm, Ours(options.chunk) if arm == "ours" else MlxLm(arm == "mlx-lm"))
        try:
            answer: dict[str, Any] = measure(side, job)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
