"""GPU benchmarks D1 to D4: a model of Llama-8B's shape with random weights, bfloat16, on MLX's CUDA backend, against mlx-lm.

    python engine/benchmarks/gpu.py [--parts windows,decode,levers,prefill,restore,quantised] [--batches 1,8,32] [--rounds 5] [--out DIR]

All arms run in one process over the same weights, round by round in alternating order; a figure is the median over the rounds, a
ratio the median of the rounds' own ratios. Ours is the engine's own `WindowGroup` behind its scheduler with readers that only
count; mlx-lm is its `BatchGenerator`. A decode figure is wall time per step while every row is running. Failures are kept.
Results: gpu.json, gpu.md. It needs no tokenizer and no files; `--shape tiny` runs the script itself anywhere.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from machine import facts
from mlx.utils import tree_map

from mlxnb_engine import qualify
from mlxnb_engine.admission import Entry, RowSpec
from mlxnb_engine.cache.tree import PrefixCache
from mlxnb_engine.cuda import linear
from mlxnb_engine.delivery import Drawn
from mlxnb_engine.graph import ModelGraph
from mlxnb_engine.methods.compiled import CompiledSteps
from mlxnb_engine.methods.reuse import PrefixReuse, Shared
from mlxnb_engine.methods.window import GroupLimits, WindowGroup
from mlxnb_engine.scheduler import Scheduler
from mlxnb_engine.state.slots import Slots
from mlxnb_engine.state.spec import Geometry
from mlxnb_engine.types import SamplingSpec
from mlxnb_engine.zoo import make_prompt_cache  # first: it keeps mlx-lm from lowering the limit of open files

# isort: split
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import llama

CHUNK = 2048
AIMS = {1: 1.2, 8: 1.2, 32: 1.4}
WARM_STEPS = 8
STUCK_AFTER_S = 60
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 1024,
    },
}  # fmt: skip
FIXED = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False}


def build(config: dict[str, Any], weights: Any = None) -> nn.Module:
    """A model of this shape, in bfloat16 with weights of variance 1/inputs; or over another model's very arrays."""
    model = llama.Model(llama.ModelArgs.from_dict(config))
    keys = iter(mx.random.split(mx.random.key(3), 1024))

    def draw(old: mx.array) -> mx.array:
        if old.ndim == 1:
            return mx.ones(old.shape, mx.bfloat16)
        new = mx.random.normal(old.shape, dtype=mx.bfloat16, scale=old.shape[-1] ** -0.5, key=next(keys))
        mx.eval(new)
        return new

    model.update(tree_map(draw, model.parameters()) if weights is None else weights.parameters())
    mx.eval(model)
    mx.clear_cache()
    return model


def on_cuda() -> bool:
    return bool(mx.default_device().type == mx.DeviceType.gpu and not mx.metal.is_available())


def prompts(batch: int, length: int, vocab: int) -> list[list[int]]:
    rng = random.Random(batch)
    return [[rng.randrange(vocab) for _ in range(length)] for _ in range(batch)]


@dataclass
class Count:
    """A reader that only counts, and keeps what the engine reports as a failure."""

    cancelled: bool = False
    ids: list[int] = field(default_factory=list)
    error: BaseException | None = None

    def reused(self, tokens: int, ssd_tokens: int) -> None: ...
    def admit(self) -> None: ...
    def prefilled(self, done: int, total: int) -> None: ...
    def finish(self, reason: str) -> None: ...
    def cancel(self) -> None: ...
    def fail(self, error: BaseException) -> None:
        self.error = error

    def deliver(self, token: Drawn) -> Any:
        self.ids.append(token.id)
        return None


@dataclass
class Ours:
    """This engine over one bound graph. chunk: tokens of one prefill window. kernel_rows: for how many rows our product serves."""

    name: str
    graph: ModelGraph
    geometry: Geometry
    submit: qualify.SubmitOrder = "before"
    chunk: int = CHUNK
    kernel_rows: int = linear.MAX_ROWS
    kept: Shared | None = None
    """A prefix cache that outlives the rounds."""

    def reuse(self) -> PrefixReuse | None:
        if self.kept is None:
            return None
        return PrefixReuse(self.kept, lambda chunk: bytes(32), self.graph.specs, self.graph.family, chunk=self.chunk, exact=False)

    def start(self, ids: list[list[int]]) -> None:
        """Read all prompts; every row is running afterwards."""
        linear.MAX_ROWS = self.kernel_rows
        self.group = WindowGroup(self.graph, GroupLimits(self.chunk, self.submit, self.geometry), self.reuse())
        scheduler = Scheduler(self.group, max_rows=len(ids), prefill_chunk=self.chunk, max_kv_bytes=None)
        self.readers = [Count() for _ in ids]
        for reader, one in zip(self.readers, ids, strict=True):
            scheduler.submit(Entry(tuple(one), deque([RowSpec(reader, SamplingSpec(), 0, 10**6, 10**6)])))  # type: ignore[arg-type]
        while self.group.active < len(ids):
            scheduler.tick()
            self._check()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.group.advance()
        self._check()

    def _check(self) -> None:
        for reader in self.readers:
            if reader.error is not None:
                raise reader.error

    def prefill(self, ids: list[int]) -> None:
        """Until the first token is on the host."""
        self.start([ids])
        while not self.readers[0].ids:
            self.run(1)

    def stop(self) -> None:
        self.group.dispose(RuntimeError("the round is over"))


@dataclass
class MlxLm:
    """mlx-lm's BatchGenerator over the same arrays, in modules of its own."""

    name: str
    model: nn.Module

    def start(self, ids: list[list[int]]) -> None:
        self.generator = BatchGenerator(self.model, completion_batch_size=len(ids), prefill_batch_size=len(ids))
        self.generator.insert(ids, [10**6] * len(ids))
        while len(self.generator.next()[1]) < len(ids):
            pass

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.generator.next()

    def prefill(self, ids: list[int]) -> None:
        self.start([ids])

    def stop(self) -> None:
        self.generator.close()
        del self.generator


Arm = Ours | MlxLm
FULL = Geometry(bucketed=True, fused=True, compiled=True)


def bind(config: dict[str, Any], model: nn.Module, kernels: bool) -> list[Arm]:
    """mlx-lm, the engine as `binding` sets it up, and the engine without each of its levers. kernels: this backend can run ours."""
    plain = ModelGraph(build(config, model), config)
    graph, full = plain, replace(FULL, fused=kernels)
    if kernels:
        joined = build(config, model)
        linear.install(joined)
        graph = ModelGraph(joined, config)
    submit = qualify.submit_order()
    return [
        MlxLm("mlx-lm", model),
        Ours("mlxnb", graph, full, submit),
        Ours("without compiled steps", graph, replace(full, compiled=False), submit),
        Ours("without the attention kernel", graph, replace(full, fused=False), submit),
        Ours("without the projection kernel", graph, full, submit, kernel_rows=0),
        Ours("without joint projections and their kernel", plain, full, submit),
        Ours("without any of these", plain, Geometry(bucketed=True), submit),
    ]


def compare(arms: list[Arm], rounds: int, measure: Callable[[Arm], float], label: str) -> dict[str, Any]:
    """Interleaved rounds; seconds or milliseconds per arm as `measure` gives them. An arm that fails is not tried again."""
    runs: dict[str, list[float]] = {arm.name: [] for arm in arms}
    failures: dict[str, str] = {}
    for index in range(rounds):
        for arm in arms if index % 2 == 0 else arms[::-1]:
            if arm.name in failures:
                continue
            faulthandler.dump_traceback_later(STUCK_AFTER_S, exit=True)
            try:
                runs[arm.name].append(measure(arm))
            except Exception as error:
                failures[arm.name] = f"{type(error).__name__}: {error}"
            arm.stop()
            gc.collect()
            faulthandler.cancel_dump_traceback_later()
    peer = runs[arms[0].name]
    rows = {}
    for name, values in runs.items():
        if values:
            ratios = [theirs / ours for theirs, ours in zip(peer, values, strict=False)]
            middle, ratio = statistics.median(values), statistics.median(ratios)
            rows[name] = {"median": middle, "runs": values, "ratio": ratio, "spread": [min(ratios), max(ratios)]}
            print(f"  {label} {name}: {middle:.3f} ({min(values):.3f} to {max(values):.3f}), {ratio:.2f}x", flush=True)
    return {"arms": rows, "failures": failures}


def step_ms(arm: Arm, ids: list[list[int]], steps: int) -> float:
    arm.start(ids)
    arm.run(WARM_STEPS)
    started = time.perf_counter()
    arm.run(steps)
    return (time.perf_counter() - started) / steps * 1e3


def prefill_ms(arm: Arm, ids: list[int]) -> float:
    started = time.perf_counter()
    arm.prefill(ids)
    return (time.perf_counter() - started) * 1e3


def restore_ms(arm: Ours, ids: list[int]) -> float:
    """Until all but the last token of a prompt that was read before are in the buffers of a new row."""
    reuse = arm.reuse()
    assert reuse is not None
    slots = Slots(arm.graph.specs, arm.geometry, split=arm.graph.family.split, wide_masks=arm.graph.wide_masks)
    entry = Entry(tuple(ids), deque([RowSpec(Count(), SamplingSpec(), 0, 8, 10**6)]))  # type: ignore[arg-type]
    started = time.perf_counter()
    entry.state = slots.add(len(ids) + 1)
    reuse.open(slots, entry)
    mx.eval(slots.arrays())
    took = (time.perf_counter() - started) * 1e3
    assert entry.done == len(ids) - 1 == entry.state.length, entry.done
    slots.clear()
    return took


def restores(arm: Ours, ids: list[int], rounds: int) -> dict[str, Any]:
    """D3: the first token of a prompt with an empty cache and with a warm one, and the restore alone; in turns."""
    runs: dict[str, list[float]] = {"prefill": [], "warm": [], "restore": []}
    warm = replace(arm, kept=Shared(PrefixCache(budget_bytes=8 * 2**30)))
    prefill_ms(warm, ids)
    warm.stop()
    for index in range(rounds + 1):
        faulthandler.dump_traceback_later(STUCK_AFTER_S, exit=True)
        for name, side in (("prefill", arm), ("warm", warm)) if index % 2 else (("warm", warm), ("prefill", arm)):
            took = prefill_ms(side, ids)
            side.stop()
            runs[name] += [took] if index else []
        took = restore_ms(warm, ids)
        runs["restore"] += [took] if index else []
        gc.collect()
        faulthandler.cancel_dump_traceback_later()
    assert warm.kept is not None
    warm.kept.cache.close()
    ratios = {name: [a / b for a, b in zip(runs["prefill"], runs[name], strict=True)] for name in ("warm", "restore")}
    out = {"runs": runs} | {name: {"ratio": statistics.median(r), "spread": [min(r), max(r)]} for name, r in ratios.items()}
    print(f"  restore: {json.dumps({k: v for k, v in out.items() if k != 'runs'})} {runs}", flush=True)
    return out


def window_curve(graph: ModelGraph, geometry: Geometry, batch: int, length: int, rounds: int) -> list[dict[str, Any]]:
    """D4: milliseconds of one window of W positions per row, all scored, against W single steps from the same state; and whether
    scores have the same bits. Each window is rolled back."""
    out = []
    rng = random.Random(4)
    slots = Slots(graph.specs, geometry, split=graph.family.split, wide_masks=graph.wide_masks)
    steps = CompiledSteps(graph)
    rows = [slots.add(length + 17) for _ in range(batch)]
    tokens = mx.array([[rng.randrange(graph.vocab_size) for _ in range(length + 16)] for _ in rows], mx.int32)
    slots.begin(length)
    graph.feed(tokens[:, :length], slots.caches)
    slots.end()
    mx.eval(slots.arrays())
    for row in rows:
        row.length = length

    def forward(at: int, width: int) -> mx.array:
        slots.begin(width)
        positions = list(range(batch * width))
        ids = tokens[:, length + at : length + at + width]
        run = steps.forward if geometry.compiled else lambda slots, *rest: graph.forward(rest[0], slots.caches, *rest[1:])
        scores = run(slots, ids, positions, 1).logits.reshape(batch, width, -1)
        slots.end()
        mx.eval(scores, slots.arrays())
        for row in rows:
            row.length += width
        return scores

    def back() -> None:
        for row in rows:
            row.length = length

    for width in (1, 2, 4, 8, 16):
        faulthandler.dump_traceback_later(STUCK_AFTER_S, exit=True)
        costs: dict[str, list[float]] = {"window": [], "singles": []}
        for index in range(rounds + 6):
            for name, windows in (("window", [width]), ("singles", [1] * width)):
                started = time.perf_counter()
                parts = [forward(sum(windows[:i]), w) for i, w in enumerate(windows)]
                if index >= 6:
                    costs[name].append((time.perf_counter() - started) * 1e3)
                back()
                if name == "window":
                    wide = parts[0]
            same = bool(mx.array_equal(wide, mx.concatenate(parts, axis=1)))
        faulthandler.cancel_dump_traceback_later()
        row = {"width": width, "same_bits": same} | {f"{name}_ms": statistics.median(values) for name, values in costs.items()}
        costs_ms = f"{row['window_ms']:.2f} ms, singles {row['singles_ms']:.2f} ms"
        print(f"  windows B={batch} W={width}: {costs_ms}, same bits: {same}", flush=True)
        out.append(row)
    slots.clear()
    return out


def rows_agree(arm: Ours, ids: list[list[int]], steps: int) -> float:
    """The share of tokens that rows of a batch have in common with each row alone. Prompts are read one by one in both."""
    apart = replace(arm, chunk=len(ids[0]))
    apart.start(ids)
    apart.run(steps)
    together = [reader.ids[: steps // 2] for reader in apart.readers]
    apart.stop()
    same = total = 0
    for one, row in zip(ids, together, strict=True):
        apart.start([one])
        apart.run(steps)
        same += sum(a == b for a, b in zip(apart.readers[0].ids, row, strict=False))
        total += len(row)
        apart.stop()
    return same / total


TABLES = (
    ("decode", "D1: decode, bfloat16", "ms per step", "mlx-lm"),
    ("levers", "D1: levers", "ms per step", "all levers"),
    ("quantised", "D2: decode, 4 bit", "ms per step", "mlx-lm"),
    ("prefill", "D3: prefill", "ms", "mlx-lm"),
)


def table(results: dict[str, Any]) -> str:
    known = results["facts"]
    setting = (
        f"Measured {known['when']} on {known['device']}, Python {known['python']}, mlx {known['mlx']}, mlx-lm {known['mlx-lm']}; "
        f"shape {results['shape']}, context {results['prompt']}. Medians of {results['rounds']} interleaved rounds."
    )
    lines = [setting, ""]
    for part, title, unit, to in TABLES:
        if part not in results:
            continue
        lines += [f"| {title} | arm | {unit} | ratio to {to} (min to max) |", "|---|---|---|---|"]
        for label, result in results[part].items():
            for name, r in result["arms"].items():
                low, high = r["spread"]
                lines.append(f"| {label} | {name} | {r['median']:.2f} | {r['ratio']:.2f}x ({low:.2f} to {high:.2f}) |")
            lines += [f"| {label} | {name} | failed | {error} |" for name, error in result["failures"].items()]
        lines.append("")
    if "windows" in results:
        lines += ["| D4: windows | W | one window, ms | W single steps, ms | same bits |", "|---|---|---|---|---|"]
        for label, curve in results["windows"].items():
            for w in curve:
                same = "yes" if w["same_bits"] else "no"
                lines.append(f"| {label} | {w['width']} | {w['window_ms']:.2f} | {w['singles_ms']:.2f} | {same} |")
        lines.append("")
    for label, result in results.get("restore", {}).items():
        lines += ["| D3: a prompt read before | ms | against prefill (min to max) |", "|---|---|---|"]
        for name, title in (("prefill", "first token, empty cache"), ("warm", "first token, warm cache"), ("restore", "restore alone")):
            low, high = result.get(name, {}).get("spread", (0.0, 0.0))
            ratio = f"{result[name]['ratio']:.1f}x ({low:.1f} to {high:.1f})" if name in result else ""
            lines.append(f"| {title}, {label} | {statistics.median(result['runs'][name]):.2f} | {ratio} |")
        lines.append("")
    for label, share in results.get("rows_agree", {}).items():
        lines.append(f"Rows of a batch against each alone, {label}: {share:.1%} of the tokens are the same.")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="windows,decode,levers,prefill,restore,quantised")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--long", type=int, default=4096, help="tokens of D3's prompt")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lever-rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmark-output"))
    options = parser.parse_args()
    parts, config = options.parts.split(","), {**FIXED, **SHAPES[options.shape]}
    kernels = on_cuda()
    device = str(mx.device_info().get("device_name", mx.default_device())) if kernels else str(mx.default_device())
    results: dict[str, Any] = {"facts": facts("mlx", "mlx-lm") | {"device": device}}
    results |= {name: getattr(options, name) for name in ("shape", "prompt", "steps", "rounds", "lever_rounds")}
    options.out.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        (options.out / "gpu.json").write_text(json.dumps(results, indent=1))
        (options.out / "gpu.md").write_text(table(results))

    model = build(config)
    assert make_prompt_cache(model)
    arms = bind(config, model, kernels)
    ours: Any = arms[1]
    results["submit_order"] = ours.submit
    sizes = [int(b) for b in options.batches.split(",")]
    many = {b: prompts(b, options.prompt, config["vocab_size"]) for b in {*sizes, 8}}

    def decode(chosen: list[Arm], rounds: int, part: str) -> None:
        results[part] = {}
        for batch in sizes:
            ids = many[batch]
            results[part][f"B={batch}"] = compare(chosen, rounds, lambda arm: step_ms(arm, ids, options.steps), f"{part} B={batch}")  # noqa: B023
            save()

    if "windows" in parts:
        results["windows"] = {}
        for batch in (1, 8):
            results["windows"][f"B={batch}"] = window_curve(ours.graph, ours.geometry, batch, options.prompt, options.rounds)
            save()
        results["rows_agree"] = {"B=8": rows_agree(ours, many[8], 48)}
    if "decode" in parts:
        decode(arms[:2], options.rounds, "decode")
    if "levers" in parts:
        decode(arms[1:], options.lever_rounds, "levers")
    long = prompts(1, options.long, config["vocab_size"])[0]
    if "prefill" in parts:
        results["prefill"] = {f"{options.long} tokens": compare(arms[:2], options.rounds + 1, lambda arm: prefill_ms(arm, long), "prefill")}
        save()
    if "restore" in parts:
        results["restore"] = {f"{options.long} tokens": restores(ours, long, options.rounds)}
        save()
    if "quantised" in parts:
        small = build(config, model)
        nn.quantize(small, group_size=64, bits=4)
        mx.eval(small)
        decode([MlxLm("mlx-lm", small), Ours("mlxnb", ModelGraph(small, config), ours.geometry, ours.submit)], options.rounds, "quantised")
    save()
    print(table(results))


if __name__ == "__main__":
    main()
