"""From a located model to rows that run: the backend of the engine thread and what is bound to it.

Everything here runs on the engine thread, after the BLAS library is in place. Importing this module loads MLX.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import mlx.core as mx

from . import fingerprint, layouts, loader, policy, qualify, resume
from .admission import Entry, RowSpec
from .blas import BlasChoice
from .cache.blocks import Namespace
from .cache.tree import PrefixCache
from .config import RuntimeConfig
from .cuda import linear
from .delivery import Delivery
from .errors import CapacityExceeded, ModelError
from .graph import ModelGraph, module_name
from .methods.checkpoints import Checkpoints
from .methods.disk import Disk
from .methods.reuse import Namespaces, PrefixReuse, Shared
from .methods.turns import Turns
from .methods.window import GroupLimits, WindowGroup
from .prompt import PromptPreparer
from .resume import Resumes, Trail
from .sampling import draw_seed, row_seed
from .scheduler import Scheduler
from .session import Generation
from .state import families
from .state.spec import Geometry
from .types import CompletionRequest, ModelInfo, PreparedPrompt, SamplingSpec

DeviceKind = Literal["cpu", "metal", "cuda"]
_CACHE_KEPT_BYTES = 256 * 2**20
_ENDED_KEPT = 64
_LAYOUT_BYTES = 2**30
_TALL = 8192
"""A vocabulary from which the order of the projection's product is worth measuring."""
_DETAIL_EVERY_S = 0.25
_NUMERICS = 1
"""Raise it when code of ours that decides bits of K/V changes: kernels, rotary angles, windows."""
_HOW = {"finished": "done", "cancelled": "stopped", "failed": "failed"}
_FUSED_HEAD_DIMS: dict[DeviceKind, set[int]] = {"cpu": set(), "metal": {64, 80, 128}, "cuda": {64, 80, 96, 128}}
"""Head widths whose multi-token attention runs in one kernel, without scores in memory. Source: MLX 0.32 `fast` dispatch."""


@dataclass(frozen=True, slots=True)
class Backend:
    """The device that this engine computes on, and what was measured on it."""

    device: DeviceKind
    mlx: str
    blas: BlasChoice
    submit: qualify.SubmitOrder

    @property
    def exact(self) -> bool:
        """Equal tokens give equal bits whatever the shapes of the steps."""
        return self.device == "cpu" and (self.blas.strict or self.blas.geometry_invariant is True)

    @property
    def numerics(self) -> str:
        """What decides the bits of a computation besides its operands: part of the identity of kept state."""
        blas = f"{self.blas.name} {self.blas.cbwr_branch or ''} {'strict' if self.blas.strict else ''}" if self.device == "cpu" else ""
        return f"{_NUMERICS} {self.device} {' '.join(blas.split())} mlx {self.mlx}"

    def describe(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "mlx": self.mlx,
            "blas": self.blas.name,
            "blas_path": self.blas.path and str(self.blas.path),
            "blas_note": self.blas.note,
            "strict": self.blas.strict,
            "submit_order": self.submit,
        }


def start_backend(config: RuntimeConfig, blas: BlasChoice) -> Backend:
    """Look at the device and measure the submission order. Engine thread only."""
    device: DeviceKind = "cpu"
    if mx.default_device().type == mx.DeviceType.gpu:
        device = "metal" if mx.metal.is_available() else "cuda"
    order: qualify.SubmitOrder = qualify.submit_order() if config.submit_order == "auto" else _order(config.submit_order)
    return Backend(device, mx.__version__, blas, order)


def stop_backend() -> None:
    """The engine thread's last MLX call: without it the process may abort at exit (engine-facts section 0)."""
    mx.synchronize()
    mx.clear_cache()
    mx.clear_streams()


def trim_memory() -> None:
    """Give back the allocator's free buffers while idle, except for a modest reserve."""
    if mx.get_cache_memory() > _CACHE_KEPT_BYTES:
        mx.clear_cache()


def memory() -> dict[str, int]:
    """Bytes of the allocator: live arrays, free buffers it keeps, and its limit. Any thread."""
    return {"active_bytes": mx.get_active_memory(), "cache_bytes": mx.get_cache_memory(), "limit_bytes": loader.memory_bytes()}


def prefix_cache(config: RuntimeConfig, wake: Callable[[], None], notice: Callable[[str], None]) -> Shared | None:
    """An engine's cache, once the weights of its first model are in memory; None if it is switched off.

    wake: the disk has brought something. notice: gets what people should know of the disk. Both are called on any thread.
    """
    budget = config.prefix_cache_for(loader.memory_bytes() - mx.get_active_memory())
    if not budget:
        return None
    folder = next(path for path in (config.prefix_dir, *config.prefix_dir.parents) if path.exists())
    disk_bytes = config.prefix_disk_for(shutil.disk_usage(folder).total)
    if not disk_bytes:
        return Shared(PrefixCache(budget_bytes=budget))
    disk = Disk.start(config.prefix_dir, disk_bytes, budget, wake, notice)
    return Shared(disk.cache, disk=disk)


def resumes(config: RuntimeConfig, shared: Shared | None, notice: Callable[[str], None]) -> Resumes:
    """An engine's interrupted runs. They have records on disk where the prefix cache has files."""
    return Resumes.start(config, shared is not None and shared.disk is not None, notice)


def _order(name: str) -> qualify.SubmitOrder:
    return "before" if name == "before" else "after"


def _label(spec: RowSpec) -> dict[str, str]:
    """Which row, for a person: its id, and the beginning of what was asked."""
    delivery = _delivery(spec)
    return {"id": delivery.generation.id, "label": delivery.label}


def _end(delivery: Delivery) -> dict[str, Any]:
    """How a row ended, and when it was at work on the monotonic clock: what is shorter than a watcher's beat is seen by this only."""
    generation = delivery.generation
    end, timing = generation.terminal, generation.timing
    times = {"from": _moment(delivery, timing.started), "to": _moment(delivery, timing.ended)}
    return {"id": generation.id, "how": _HOW.get(end.kind if end else "", "done"), "label": delivery.label, **times}


def _started(spec: RowSpec) -> float | None:
    delivery = _delivery(spec)
    return _moment(delivery, delivery.generation.timing.started)


def _moment(delivery: Delivery, seconds: float | None) -> float | None:
    """Seconds since submit, on the monotonic clock."""
    return None if seconds is None else round(delivery.generation.submitted_at + seconds, 3)


def _delivery(spec: RowSpec) -> Delivery:
    assert isinstance(spec.consumer, Delivery)
    return spec.consumer


class Resident:
    """One loaded model with its group and scheduler.

    Owner: engine thread; `info`, `preparer` and the counters of `describe` may be read from any.
    Lifetime: until unloaded; `close` ends its rows and drops its arrays.
    """

    def __init__(
        self, loaded: loader.Loaded, config: RuntimeConfig, backend: Backend, shared: Shared | None = None, resumes: Resumes | None = None
    ) -> None:
        """shared: the engine's prefix cache; None computes every prompt anew. resumes: its interrupted runs."""
        self.tokenizer = loaded.tokenizer
        self.context = min(loaded.info.context_length, config.context_limit or loaded.info.context_length)
        self.preparer = PromptPreparer(loaded.tokenizer, loaded.template, context_tokens=self.context)
        self._layout_bytes = _second_layouts(loaded, config, backend)
        graph = _graph(loaded, backend)
        layout = fingerprint.with_layout(loaded.info.fingerprint, graph.specs)
        self.info: ModelInfo = replace(loaded.info, fingerprint=layout)
        self.geometry, self.geometry_note = _geometry(graph, config, backend)
        chunk = config.chunk_for(cpu=backend.device == "cpu")
        self._chunk, self._explicit_chunk = chunk, config.prefill_chunk
        self._heads = int(loaded.model_config.get("num_attention_heads", 1))
        self._fused = {s.key_dim for s in graph.specs if s.key_dim} <= _FUSED_HEAD_DIMS[backend.device]
        limits = GroupLimits(chunk, backend.submit, self.geometry, tight=config.max_kv_bytes is not None, ring=config.sliding_ring)
        self.group: WindowGroup | Turns
        self._resumes, self._exact, checkpoints = resumes or Resumes(), backend.exact, Checkpoints(graph.specs)
        # What names its weights, and what decides the bits of their results: all but the chunk, which depends on the prompt.
        self._numerics = f"{layout} {backend.numerics}{' fused' if self.geometry.fused else ''}"
        if graph.family.mode == "lone":
            self.group = Turns(graph, limits, checkpoints)
        else:
            reuse = self._reuse(graph, shared, backend) if shared is not None else None
            self.group = WindowGroup(graph, limits, reuse, checkpoints)
        self.scheduler = Scheduler(
            self.group, max_rows=config.max_rows, prefill_chunk=chunk, max_kv_bytes=config.max_kv_bytes
        )
        self.reuse_note = _reuse_note(self.group, shared)
        self._counts: dict[str, Any] = {}
        self._detail: dict[str, Any] = {}
        self._detailed_at = 0.0
        self._shown: dict[str, Delivery] = {}
        self._ended: deque[dict[str, Any]] = deque(maxlen=_ENDED_KEPT)
        self.ended: tuple[dict[str, Any], ...] = ()
        self.note()

    def _reuse(self, graph: ModelGraph, shared: Shared, backend: Backend) -> PrefixReuse:
        fused = " fused" if self.geometry.fused else ""
        namespaces = _namespaces(graph, self.info, backend.numerics + fused, shared)
        return PrefixReuse(shared, namespaces, graph.specs, graph.family, chunk=self._chunk, exact=backend.exact)

    def admit(self, generations: list[Generation], prompt: PreparedPrompt) -> None:
        """Queue the rows of one prepared request. Raises CapacityExceeded if they can never run."""
        request = self._resumes.whole(generations[0].request)
        ids = prompt.ids + tuple(c.id for c in request.continuation)
        if max(ids) >= self.group.graph.vocab_size:
            # MLX does not report an index out of range (P3).
            raise ModelError(
                f"The prompt has token id {max(ids)}, but the model has {self.group.graph.vocab_size} tokens.",
                "Tokenizer and weights do not belong together: load the model with its own tokenizer.",
            )
        resumed = request.resumed
        full = resumed is not None and len(ids) == self.context + 1  # its last token was drawn, and nothing can follow it
        if len(ids) > self.context and not full:
            raise CapacityExceeded(
                f"The prompt has {len(ids):,} tokens, and the context is {self.context:,}.",
                "Shorten the prompt, or raise context_limit if it is below the model's own.",
            )
        sampling = policy.with_model(request, self.info.defaults).sampling
        chunk = self._chunk_for(len(prompt.ids) if resumed is not None else len(ids))
        base = sampling.seed
        rows: deque[RowSpec] = deque()
        for generation in generations:
            seed = draw_seed() if base is None else row_seed(base, generation.index)
            seed = seed if resumed is None else resumed.seed
            trail = self._trail(request, prompt, sampling, seed, chunk)
            delivery = Delivery(generation, prompt, self.tokenizer, self.info.name, seed, trail)
            self._shown[generation.id] = delivery  # from now on: one that is short would never be seen at work
            if request.max_tokens == 0 or request.continuation:
                delivery.admit()
                if (reason := delivery.settled or ("length" if full else None)) is not None:
                    self._adopt(request)
                    delivery.finish(reason)
                    continue
            exempt = tuple(i for i in sorted(self.tokenizer.eos_ids) if 0 <= i < self.group.graph.vocab_size)
            rows.append(RowSpec(delivery, sampling, seed, request.max_tokens, self.context, exempt, len(request.continuation)))
        if rows:
            entry = Entry(ids, rows, chunk=chunk, stable=prompt.stable, session=request.session)
            if resumed is not None:
                entry.left = resumed.left
                entry.steps_from = None if self._exact and self.group.graph.family.windows else len(prompt.ids) - 1
            self.scheduler.submit(entry)
            self._adopt(request)

    def _adopt(self, request: CompletionRequest) -> None:
        """Nothing refuses it any more: the record of the run whose rest it is, if it is one, is ours."""
        if request.resumed is not None:
            self._resumes.adopt(request.resumed.key)

    def _trail(self, request: CompletionRequest, prompt: PreparedPrompt, sampling: SamplingSpec, seed: int, chunk: int) -> Trail:
        """By what a row can be resumed. Raises RequestError if it is the rest of one that ran under another policy."""
        model = f"{self._numerics} chunk {chunk}"
        policy = resume.policy_of(prompt, request, sampling, seed, model=model, context=self.context)
        if request.resumed is not None:
            resume.check(request.resumed, policy)
        named = request.model or ("" if self.info.source == "embedded" else self.info.name)
        ticket = resume.ticket_of(request, prompt, seed, policy)
        return Trail(replace(request, model=named), ticket, self.info.name, self._resumes)

    def _chunk_for(self, tokens: int) -> int:
        """An explicit chunk wins; else the backend's, less where a long prompt's scores would be materialised."""
        if self._explicit_chunk:
            return self._explicit_chunk
        return policy.prefill_chunk(self._chunk, heads=self._heads, context=tokens, fused=self._fused)

    def describe(self) -> dict[str, Any]:
        """JSON-able state: plain numbers only, safe to call from any thread."""
        info = self.info
        return {
            "name": info.name,
            "source": info.source,
            "family": info.family,
            "weights": info.weights,
            "weight_bytes": info.weight_bytes,
            "layout_bytes": self._layout_bytes,
            "context_length": self.context,
            "defaults": policy.model_layer(info.defaults),
            **self._counts,
            **self._detail,
            "geometry": self.geometry_note,
            "step_mode": self.group.graph.family.mode,
            "step_note": self.group.graph.family.note,
            "reuse": self.reuse_note,
        }

    def note(self) -> None:
        """Publish the counters that `describe` shows: other threads must not walk queues and buffers that change under them."""
        group = self.group
        self._counts = {
            "rows": group.active,
            "preparing": group.waiting_rows,
            "queue": sum(len(entry.rows) for entry in self.scheduler.queue),
            "kv_bytes": group.kv_bytes,
            "steps": group.steps,
            "tokens": group.tokens,
            "codec": "bf16",
        }
        now = time.monotonic()
        if self.scheduler.idle or now - self._detailed_at >= _DETAIL_EVERY_S:
            self._detailed_at = now
            self._detail = self._who()

    def _who(self) -> dict[str, Any]:
        """The rows themselves, for whoever watches: in slots, waiting, and how the last ones ended."""
        self.group.check()
        queued = [spec for entry in self.scheduler.queue for spec in entry.rows][:_ENDED_KEPT]
        for key in [key for key, delivery in self._shown.items() if delivery.generation.done]:
            self._ended.append(_end(self._shown.pop(key)))
        waiting = [_label(spec) | {"why": "a place in the batch"} for spec in queued]
        self.ended = tuple(self._ended)
        return {"slots": self._slots(), "waiting": waiting}

    def _slots(self) -> list[dict[str, Any]]:
        """Who sits where: the running rows in batch order, then those whose prompt is being read."""
        per_token, recurrent = self.group.slots.bytes_per_token, self.group.slots.bytes_per_row
        running = [
            _label(row.spec)
            | {"slot": i, "phase": "running", "tokens": row.slot.length, "cached_tokens": _delivery(row.spec).cached_tokens}
            | {"prompt_tokens": _delivery(row.spec).prompt_tokens, "from": _started(row.spec)}
            | {"kv_bytes": row.slot.home.capacity * per_token + recurrent}
            for i, row in enumerate(self.group.in_batch_order())
        ]
        reading = [
            _label(spec) | {"phase": "prefill", "tokens": entry.done, "prompt_tokens": len(entry.ids), "cached_tokens": entry.cached}
            for entry in self.group.staged()
            for spec in entry.rows
        ]
        return [*running, *(row | {"slot": len(running) + i} for i, row in enumerate(reading))]

    def close(self, error: Exception) -> None:
        self.scheduler.fail_all(error)


def _reuse_note(group: WindowGroup | Turns, shared: Shared | None) -> str:
    """What of this model's work is kept for later prompts, for a person."""
    if shared is None:
        return "nothing: the prefix cache is off"
    if group.reuse is None:
        return "nothing: each of its rows runs alone, in caches that are not cut into blocks"
    return "any prefix" if group.reuse.reuse.trimmable else "prefixes that end where recurrent state was kept"


def _namespaces(graph: ModelGraph, info: ModelInfo, numerics: str, shared: Shared) -> Namespaces:
    """The namespaces of one model's state. K/V are kept as they were computed: the codec of a layer is its type."""
    specs, codec = graph.specs, tuple(spec.dtype for spec in graph.specs)
    made: dict[int, bytes | None] = {}

    def namespace(chunk: int) -> bytes | None:
        if chunk not in made:
            cut = f" chunk {chunk}" if chunk else ""
            made[chunk] = digest = Namespace(info.fingerprint or None, codec, numerics=numerics + cut).digest()
            if digest is not None:
                shared.introduce(digest, info.name, specs, codec)
        return made[chunk]

    return namespace


def _graph(loaded: loader.Loaded, backend: Backend) -> ModelGraph:
    """The model bound by what the table says of its family; a module the table does not know shares a batch if it can."""
    model, config = loaded.model, loaded.model_config
    if backend.device == "cuda" and families.FAMILIES.get(module_name(model), families.UNKNOWN).split:
        linear.install(model)
    graph = ModelGraph(model, config, weight_first=_weight_first(config, backend))
    if graph.family is not families.UNKNOWN:
        return graph
    return qualify.shared_if_exact(model, config) or graph


def _loose(backend: Backend) -> bool:
    """Rows of a batch differ in bits anyway, so the fastest form of a product may be taken: a fast CPU BLAS that is not strict."""
    return backend.device == "cpu" and backend.blas.geometry_invariant is False and not backend.blas.strict


def _second_layouts(loaded: loader.Loaded, config: RuntimeConfig, backend: Backend) -> int:
    """Bytes of transposed copies made for steps of one row."""
    budget = config.layout_bytes if config.layout_bytes is not None else min(_LAYOUT_BYTES, loader.memory_bytes() // 16)
    return layouts.install(loaded.model, budget) if _loose(backend) and budget else 0


def _weight_first(config: Mapping[str, Any], backend: Backend) -> bool:
    vocab, width = config.get("vocab_size"), config.get("hidden_size")
    return _loose(backend) and isinstance(vocab, int) and isinstance(width, int) and vocab >= _TALL and qualify.weight_first(vocab, width)


def _geometry(graph: ModelGraph, config: RuntimeConfig, backend: Backend) -> tuple[Geometry, str]:
    """The shapes that steps take: measured in strict mode, bucketed on CUDA, exact extents elsewhere."""
    if not graph.family.padded or graph.family.mode == "lone":
        exact = "" if backend.blas.geometry_invariant else "; batches may differ in the last bits"
        return Geometry(), f"no padding for this family{exact}"
    if backend.blas.strict and backend.device == "cpu":
        verdict = qualify.strict_geometry(graph.projection_shapes(), {s.value_dim for s in graph.specs if s.value_dim})
        if verdict.geometry is None:
            raise ModelError(f"mkl-strict is not exact on this machine: {verdict.note}.", "Use MLXNB_BLAS=none for exact results.")
        return verdict.geometry, f"strict: {verdict.note}"
    if config.attention_extent is None and backend.device == "cuda" and graph.family.split:
        return Geometry(config.min_width or 1, bucketed=True, fused=True, compiled=True), "own CUDA kernels, compiled steps"
    bucketed = config.attention_extent == "bucket" or (config.attention_extent is None and backend.device == "cuda")
    return Geometry(config.min_width or 1, bucketed), "bucketed extents" if bucketed else "exact extents"
