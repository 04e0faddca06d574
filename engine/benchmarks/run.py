"""Side-by-side CPU benchmarks against mlx-lm: `python engine/benchmarks/run.py [--rounds 5] [--out DIR]`.

Arms are interleaved, round by round; ratios are medians of per-round ratios. Both sides share weights and prompts; "same BLAS"
arms share a process and its library, "as installed" is mlx-lm with the BLAS inside the MLX wheel. Failures are kept in the
output. Results: results.json, results.md, results.svg.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import report
import scheduling
import startup
from machine import facts

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Item:
    """One comparison. peer_blas: the BLAS of the peer's process. peer: its arm there (see worker.py)."""

    id: str
    title: str
    job: dict[str, Any]
    peer_blas: str
    aim: float
    peer: str = "mlx-lm"


def items() -> list[Item]:
    decode1 = {"work": "decode", "batch": 1, "prompt": 32, "tokens": 48}
    decode8 = {"work": "decode", "batch": 8, "prompt": 32, "tokens": 32}
    fill = [{"work": "prefill", "batch": 1, "prompt": n, "tokens": 1} for n in (512, 2048)]
    samples = {"work": "samples", "batch": 8, "prompt": 1024, "tokens": 64}
    return [
        Item("W1", "decode, B=1, same BLAS", decode1, "auto", 1.0),
        Item("W2", "decode, B=8 together, same BLAS", decode8, "auto", 1.0),
        Item("W2i", "decode, B=8 together, mlx-lm as installed", {**decode8, "tokens": 8}, "none", 8.0),
        Item("W3", "prefill 512 tokens, same BLAS", fill[0], "auto", 1.0),
        Item("W3l", "prefill 2048 tokens, same BLAS", fill[1], "auto", 1.0),
        Item("W3i", "prefill 512 tokens, mlx-lm as installed", fill[0], "none", 15.0),
        Item("W5", "8 samples of a 1k prompt, 64 tokens each, against 8 calls", samples, "auto", 5.0, "mlx-lm calls"),
        Item("W5b", "8 samples of a 1k prompt, 64 tokens each, against a batch of 8 copies", samples, "auto", 2.0),
    ]


class Worker:
    """A benchmark process (worker.py) with one BLAS."""

    def __init__(self, blas: str) -> None:
        command = [sys.executable, str(HERE / "worker.py"), "--blas", blas]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.blas = self._answer()["blas"]

    def ask(self, arm: str, job: dict[str, Any], seed: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"arm": arm, "seed": seed, **job}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": f"the worker ended with code {self._process.wait()}"}

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(item: Item, workers: dict[str, Worker], rounds: int) -> dict[str, Any]:
    """Interleaved rounds, the order of the arms alternating."""
    ours, peer = workers["auto"], workers[item.peer_blas]
    warm = {**item.job, "tokens": min(item.job["tokens"], 4), "prompt": min(item.job["prompt"], 64)}
    ours.ask("ours", warm, 0)
    peer.ask(item.peer, warm, 0)
    runs: list[dict[str, Any]] = []
    for index in range(rounds):
        arms = [("ours", "ours", ours), ("mlx-lm", item.peer, peer)]
        answers = {name: worker.ask(arm, item.job, index + 1) for name, arm, worker in (arms if index % 2 == 0 else arms[::-1])}
        runs.append(answers)
        print(f"  {item.id} {index + 1}/{rounds}: " + ", ".join(f"{arm} {rate(a):.1f} tok/s" for arm, a in answers.items()), flush=True)
    good = [r for r in runs if all("error" not in a for a in r.values())]
    ratios = [rate(r["ours"]) / rate(r["mlx-lm"]) for r in good]
    return {
        **asdict(item),
        "runs": runs,
        "failures": len(runs) - len(good),
        "ratio": statistics.median(ratios) if ratios else None,
        "spread": [min(ratios), max(ratios)] if ratios else None,
        "ours": statistics.median(rate(r["ours"]) for r in good) if good else None,
        "peer": statistics.median(rate(r["mlx-lm"]) for r in good) if good else None,
    }


def rate(answer: dict[str, Any]) -> float:
    return float("nan") if "error" in answer else answer["tokens"] / answer["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="ids, comma separated")
    parser.add_argument("--out", type=Path, default=Path("benchmark-output"))
    options = parser.parse_args()
    chosen = [i for i in items() if not options.only or i.id in options.only.split(",")]
    results: dict[str, Any] = {"facts": facts("mlx", "mlx-lm", "mlxnb"), "compared": [], "absolute": []}
    results["absolute"].append(startup.load_extension(options.rounds))
    results["absolute"].append({"id": "W14", "title": "null-graph step, ms", "ms": scheduling.curve(options.rounds)})
    results["absolute"].append(scheduling.long_row(options.rounds))
    workers = {blas: Worker(blas) for blas in {"auto", *(i.peer_blas for i in chosen)}}
    results["facts"]["blas"] = {name: worker.blas for name, worker in workers.items()}
    for item in chosen:
        print(f"{item.id}: {item.title}", flush=True)
        results["compared"].append(compare(item, workers, options.rounds))
    for worker in workers.values():
        worker.close()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(results, indent=1))
    (options.out / "results.md").write_text(report.table(results))
    (options.out / "results.svg").write_text(report.plot(results))
    print(report.table(results))


if __name__ == "__main__":
    main()
