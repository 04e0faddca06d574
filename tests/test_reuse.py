"""The prefix cache at work: state taken from it has the bits of a cold run, and what is kept is what was consumed (G62-G67, G73)."""

from __future__ import annotations

import functools
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import zoo
from rig import GREEDY, Recorder, Rig, differences, geometries

from mlxnb_engine.admission import Entry
from mlxnb_engine.cache.blocks import Block, Reuse, T, Tail
from mlxnb_engine.cache.nodes import Node
from mlxnb_engine.cache.tree import PrefixCache
from mlxnb_engine.errors import ModelError
from mlxnb_engine.graph import ModelGraph, Scores
from mlxnb_engine.methods import reuse as reuse_module
from mlxnb_engine.methods import window as window_module
from mlxnb_engine.methods.reuse import Shared
from mlxnb_engine.methods.window import Row
from mlxnb_engine.state import payload
from mlxnb_engine.state.payload import StatePayload
from mlxnb_engine.state.spec import Geometry
from mlxnb_engine.types import SamplingSpec, StateSpec

PLAIN = Geometry()

# kind -> (module, options of the rig). Windows of the sliding models are 8 and 100 tokens: within a block, and over several.
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "full": ("qwen3", {}, {}),
    "full and sliding, shared K/V": ("gemma3n", {}, {}),
    "sliding": ("gemma3_text", {}, {}),
    "sliding, wide": ("gemma3_text", {"sliding_window": 100}, {}),
    "ring": ("gemma3_text", {}, {"ring": True}),
    "ring, wide": ("gemma3_text", {"sliding_window": 100}, {"ring": True}),
    "one class": ("gemma2", {}, {}),
    "hybrid": ("lfm2", {}, {}),
    "hybrid, float state": ("qwen3_next", {}, {}),
    "recurrent, cut by position": ("mamba2", {}, {}),
    "recurrent, read alone": ("mamba", {}, {}),
    "latent": ("deepseek_v3", {}, {}),
}
WIDE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "recurrent and latent": ("kimi_linear", {}, {"chunk": 512}),
    "recurrent and latent, normed": ("bailing_moe_v3", {}, {"chunk": 512}),
}
"""One-token windows take other arithmetic than wider ones, and whole prompts fit into one window."""
CHEAP = {"hybrid", "hybrid, float state"}
"""Their recurrent state takes no more bytes than the K/V of a block, so that it is kept wherever a window ends at a block."""
RECURRENT = {kind for kind in KINDS if kind.startswith(("hybrid", "recurrent"))}
DELICATE = {"recurrent, cut by position", "recurrent, read alone", "latent"}
"""Of these only prompts are kept where bits are promised."""


@functools.cache
def graph_of(kind: str) -> ModelGraph:
    module, changes, _ = (KINDS | WIDE)[kind]
    model, config = zoo.build(module, **changes)
    return ModelGraph(model, config)


class Reusing(Rig):
    """A rig that also notes recurrent state where a row ends."""

    def __init__(self, kind: str, shared: Shared | None = None, **options: Any) -> None:
        super().__init__(graph_of(kind), shared=shared, **{**(KINDS | WIDE)[kind][2], **options})
        self.kind = kind
        self.recurrent: dict[Any, list[bytes]] = {}

    def state_of(self, row: Row) -> list[tuple[np.ndarray, np.ndarray]]:
        layers = self.group.slots.extract_recurrent(row.slot)  # type: ignore[union-attr]
        self.recurrent[row.spec.consumer] = [np.array(a).tobytes() for layer in layers for a in layer if a is not None]
        return super().state_of(row)

    def turn(self, ids: Sequence[int], tokens: int = 4, **how: Any) -> Recorder:
        """One request, from its first tick to its last."""
        row = self.ask(ids, tokens, **how)
        self.run()
        assert row.end == "length", row.end
        return row

    @property
    def read(self) -> int:
        """Prompt tokens that the model has read."""
        return self.group.read_tokens


def shared_of(budget_bytes: int = 2**28) -> Shared:
    return Shared(PrefixCache(budget_bytes=budget_bytes))


@pytest.fixture
def shared() -> Iterator[Shared]:
    made = shared_of()
    yield made
    made.cache.check()
    assert len(made.pending) == 0, "somebody still announces blocks"
    made.cache.close()


def ids_of(length: int, seed: object = 0) -> tuple[int, ...]:
    rng = random.Random(f"{length} {seed}")
    return tuple(rng.randrange(zoo.BASE["vocab_size"]) for _ in range(length))


@functools.cache
def cold(kind: str, ids: tuple[int, ...], tokens: int, geometry: Geometry = PLAIN) -> tuple[Recorder, list[bytes]]:
    """The row without a cache, alone, and its recurrent state at the end."""
    rig = Reusing(kind, geometry=geometry)
    row = rig.turn(ids, tokens)
    return row, rig.recurrent[row]


def unlike(rig: Reusing, row: Recorder, ids: Sequence[int], geometry: Geometry = PLAIN) -> list[str]:
    """How a row differs from its cold run: ids, hidden rows, recurrent state, K/V (of a sliding layer, what it still sees)."""
    want, recurrent = cold(rig.kind, tuple(ids), len(row.ids), geometry)
    found = [line for line in differences(row, want) if not line.startswith(("K of", "V of"))]
    if rig.recurrent[row] != recurrent:
        found.append("recurrent state")
    specs = [spec for spec in graph_of(rig.kind).specs if spec.kind in ("full", "sliding")]
    for layer, (spec, a, b) in enumerate(zip(specs, row.state, want.state, strict=True)):
        for name, x, y in zip("KV", a, b, strict=True):
            n = min(x.shape[2], y.shape[2], spec.window - 1 if spec.window is not None else y.shape[2])
            if x[:, :, x.shape[2] - n :].tobytes() != y[:, :, y.shape[2] - n :].tobytes():
                found.append(f"{name} of layer {layer}")
    return found


def all_kinds(test: Any) -> Any:
    return pytest.mark.parametrize("kind", KINDS)(test)


def test_the_kinds_are_what_they_are_called() -> None:
    held = {kind: {(spec.kind, spec.window) for spec in graph_of(kind).specs} - {("unused", None)} for kind in KINDS}
    assert all({k for k, _ in held[kind]} <= {"recurrent", "full"} and ("recurrent", None) in held[kind] for kind in RECURRENT)
    assert held["full"] == held["one class"] == held["latent"] == {("full", None)}
    assert ("sliding", 8) in held["sliding"] and ("sliding", 100) in held["ring, wide"]
    assert all(graph_of(kind).family.windows == (kind not in DELICATE) for kind in KINDS)
    assert not graph_of("one class").family.split


# -- a warm run has the bits of a cold one ---------------------------------------------------------------------------------


@all_kinds
@pytest.mark.parametrize("submit", ["before", "after"])
def test_a_prompt_that_continues_another_is_read_from_there_with_the_same_bits(kind: str, submit: str, shared: Shared) -> None:
    rig = Reusing(kind, shared, submit=submit)
    first = ids_of(300)
    rig.turn(first)
    longer = (*first, *ids_of(70, "more"))
    warm = rig.turn(longer, 6)
    least = 256 if kind in RECURRENT else 297
    assert least <= warm.cached < len(longer), f"{warm.cached} of {len(longer)} tokens came from the cache"
    assert rig.read == 299 + len(longer) - 1 - warm.cached, "more was read than was missing"
    assert unlike(rig, warm, longer) == []
    assert rig.reuse is not None and rig.reuse.failures == 0


@all_kinds
def test_every_turn_of_a_conversation_hits(kind: str, shared: Shared) -> None:
    """G64: prompt, answer and the next question; the answer's ids as they were produced."""
    rig = Reusing(kind, shared)
    ids = ids_of(270)
    before = 0
    for turn in range(2):
        row = rig.turn(ids, 75)
        assert row.cached >= before, f"turn {turn}: {row.cached} of {len(ids)} tokens came from the cache"
        assert unlike(rig, row, ids) == [], f"turn {turn}"
        kept = len(ids) - 1 if kind in DELICATE else len(ids) + 74
        before = kept // T * T if kind in RECURRENT else kept
        before -= 2 if kind == "latent" else 0  # a window of one token is not kept, nor left over
        ids = (*ids, *row.ids, *ids_of(20 + turn, turn))


@all_kinds
def test_an_edited_history_falls_back_to_the_prefix_that_is_left(kind: str, shared: Shared) -> None:
    rig = Reusing(kind, shared)
    ids = ids_of(300)
    rig.turn(ids)
    edited = (*ids[:200], (ids[200] + 1) % 90, *ids[201:])
    first = rig.turn(edited)
    again = rig.turn((*ids[:200], 91, *ids_of(99, "third")))
    if kind in RECURRENT:
        assert first.cached == (192 if kind in CHEAP else 0), "no state was kept where the two part"
        assert again.cached == 192, "the second prompt showed where they part, and the third one starts there"
    else:
        assert 199 <= first.cached <= 200 and 199 <= again.cached <= 200
    assert unlike(rig, first, edited) == []


@all_kinds
@pytest.mark.parametrize("length", [2, 64, 65, 257, 320])
def test_at_least_one_token_of_a_prompt_is_run(kind: str, length: int, shared: Shared) -> None:
    """G63: the same prompt again, ending within a block or at its end."""
    rig = Reusing(kind, shared)
    ids = ids_of(length)
    rig.turn(ids)
    again = rig.turn(ids)
    assert again.cached <= length - 1
    if kind in RECURRENT:
        assert again.cached == ((length - 1) // T * T if length > 256 or kind in CHEAP else 0)
    elif kind == "latent":
        assert again.cached >= length - 1 - T
    else:
        assert again.cached == length - 1
    assert unlike(rig, again, ids) == []
    assert len(again.scores) == 4, "each token is drawn from a forward of its own"


@pytest.mark.parametrize("length", [66, 130, 258, 322])
@pytest.mark.parametrize("donor", [200, 400])
def test_a_last_token_that_a_cold_run_reads_alone_is_read_alone(length: int, donor: int, shared: Shared) -> None:
    """Its chunk ends with a window of one, which the longer prompt read in a wider one: other bits where attention is latent."""
    rig, first = Reusing("latent", shared), ids_of(donor)
    rig.turn(first)
    ids = (*first, *ids_of(length, "rest"))[:length]
    again = rig.turn(ids)
    assert again.cached >= min(length - 2, donor) - T and unlike(rig, again, ids) == []


@pytest.mark.parametrize("kind", WIDE)
@pytest.mark.parametrize("more", [1, 2, 3])
def test_no_cut_leaves_one_token_of_a_window_by_itself(kind: str, more: int, shared: Shared) -> None:
    """Neither where an attachment is due (258 ids of an empty cache: a mark at 256) nor behind what was taken."""
    rig, first = Reusing(kind, shared), ids_of(300)
    begun = ids_of(256 + more, "alone")
    assert unlike(rig, rig.turn(begun), begun) == []
    rig.turn(first)
    ids = (*first[:256], *ids_of(more, "other"))
    assert unlike(rig, rig.turn(ids), ids) == []
    rig.turn((*first, *ids_of(40, "on")))
    assert unlike(rig, rig.turn(ids), ids) == []


@pytest.mark.parametrize(("kind", "rows"), [("full", 4), ("sliding", 4), ("one class", 4), ("hybrid", 4), ("latent", 2), ("ring", 2)])
def test_rows_next_to_each_other_take_and_give_as_each_alone(kind: str, rows: int, shared: Shared) -> None:
    rig = Reusing(kind, shared)
    common = ids_of(270)
    prompts = [(*common, *ids_of(10 + 37 * i, i)) for i in range(rows)]
    rig.turn(common)
    asked = [rig.ask(ids, 64 + i) for i, ids in enumerate(prompts)]
    rig.run()
    later = [(*ids, *row.ids, 5) for ids, row in zip(prompts, asked, strict=True)]
    again = [rig.ask(ids, 5) for ids in later]
    rig.run()
    for row, ids in zip([*asked, *again], [*prompts, *later], strict=True):
        assert row.cached >= (256 if kind != "latent" else 200) and unlike(rig, row, ids) == []


def test_a_corrupt_byte_of_a_block_is_seen_by_the_comparison(shared: Shared) -> None:
    """Negative control: without it, equal bits might only mean that nothing was taken."""
    for kind in ("full", "ring, wide", "hybrid"):
        rig = Reusing(kind, shared)
        ids = ids_of(300, kind)
        rig.turn(ids)
        for node in shared.cache._roots[rig.namespace].nodes():  # type: ignore[index]
            held = [node.value.payload, node.attachment]  # type: ignore[union-attr]
            for part in held:
                if isinstance(part, StatePayload):
                    part.stacks = tuple(array + 1e-3 for array in part.stacks)
        assert unlike(rig, rig.turn((*ids, 7)), (*ids, 7)) != []


def test_copies_that_cannot_be_submitted_end_what_a_row_keeps_and_not_the_row(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, ids = Reusing("full", shared, submit="before"), ids_of(60)
    real = window_module.mx.async_eval

    def without_room(*arrays: Any) -> None:
        if arrays and isinstance(arrays[0], list) and arrays[0]:
            raise RuntimeError("[malloc] no room")
        real(*arrays)

    monkeypatch.setattr(window_module.mx, "async_eval", without_room)
    row = rig.turn(ids, 80)
    assert unlike(rig, row, ids) == [] and [node for _, node in held(shared, rig) if node.block is not None] == []


def test_a_waiting_prompt_is_looked_up_again_only_when_something_changed(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, ids = Reusing("full", shared), ids_of(300)
    asked: list[int] = []
    real = shared.cache.can_take
    monkeypatch.setattr(shared.cache, "can_take", lambda *how: asked.append(1) or real(*how))
    assert rig.reuse is not None
    entry = Entry(ids, deque())
    for _ in range(5):
        assert rig.reuse.can_claim(entry) and entry.known == 0
    assert len(asked) == 1
    rig.turn(ids)
    assert rig.reuse.can_claim(entry) and entry.known == 299
    rig.reuse.release(entry)


# -- what is kept ----------------------------------------------------------------------------------------------------------


def held(shared: Shared, rig: Reusing) -> list[tuple[tuple[int, ...], Node]]:
    """Every block and tail of a rig's namespace, with all ids from the start of the sequence to its end."""
    found: list[tuple[tuple[int, ...], Node]] = []
    paths: dict[Node | None, tuple[int, ...]] = {}
    for node in shared.cache._roots[rig.namespace].nodes():
        path = paths[node] = (*paths.get(node.parent, ()), *node.ids)
        found.append((path, node))
    return found


@pytest.mark.parametrize("kind", ["full", "one class", "hybrid", "hybrid, float state", "recurrent, cut by position", "latent"])
@pytest.mark.parametrize("submit", ["before", "after"])
def test_every_block_tail_and_attachment_is_the_state_of_exactly_its_ids(kind: str, submit: str, shared: Shared) -> None:
    """G65: nothing leads or trails by the token in flight, whoever published it: prompt, answer, row that joined late."""
    rig = Reusing(kind, shared, submit=submit)
    rows = [rig.ask(ids_of(n, n), tokens) for n, tokens in ((300, 40), (30, 110))]
    rig.tick(9)
    rows.append(rig.ask((*ids_of(300, 300), 1, 2), 70))
    rig.run()
    nodes = held(shared, rig)
    if kind not in DELICATE:
        assert max(len(path) for path, _ in nodes) >= 320, "blocks of the answers"
    for path, node in nodes:
        reference = Reusing(kind)
        reference.turn((*path, 0), 1)
        want = reference.recorders[0].state
        specs = graph_of(kind).specs
        attending = [layer for layer, spec in enumerate(specs) if spec.kind in ("full", "sliding")]
        assert isinstance(node.value, Block | Tail) and isinstance(node.value.payload, StatePayload)
        for (layer, part), array in node.value.payload.tensors().items():
            whole = want[attending.index(layer)]["kv".index(part)]
            assert np.array(array).tobytes() == whole[0, :, len(path) - len(node.ids) : len(path)].tobytes(), (len(path), layer, part)
        if node.attachment is not None:
            assert len(path) % T == 0
            assert [np.array(a).tobytes() for a in node.attachment.arrays()] == state_after(kind, path)  # type: ignore[attr-defined]
    assert (kind not in RECURRENT) == all(node.attachment is None for _, node in nodes)
    assert (kind in RECURRENT) != any(isinstance(node.value, Tail) for _, node in nodes)


def state_after(kind: str, ids: tuple[int, ...]) -> list[bytes]:
    """Recurrent state of a row that has consumed these ids, read in windows of 64."""
    rig = Reusing(kind)
    rig.ask((*ids, 0), 1)
    while rig.group.preparation is None or rig.group.preparation.entries[0].done < len(ids):
        rig.tick()
        if rig.group.ready:
            break
    prep, entry = rig.group.ready[0]
    return [np.array(a).tobytes() for layer in prep.slots.extract_recurrent(entry.state) for a in layer]  # type: ignore[union-attr]


def test_donors_stay_as_they_were_while_two_borrowers_decode_and_retire(shared: Shared) -> None:
    """G62."""
    for kind in ("full", "ring, wide", "hybrid"):
        rig = Reusing(kind, shared)
        first = ids_of(300, kind)
        rig.turn(first)
        before = {node: contents(node) for _, node in held(shared, rig)}
        rows = [rig.ask((*first, i, i), 70) for i in range(2)]
        rig.run()
        assert [row.cached >= 256 for row in rows] == [True, True]
        after = {node: contents(node) for _, node in held(shared, rig)}
        assert before.items() <= after.items() and len(after) > len(before), kind


def contents(node: Node) -> list[bytes]:
    payloads = [node.value.payload if node.value is not None else None, node.attachment]
    return [np.array(a).tobytes() for part in payloads if isinstance(part, StatePayload) for a in part.arrays()]


@pytest.mark.parametrize("kind", ["full", "hybrid", "ring"])
def test_samples_of_one_prompt_are_read_once_and_their_common_blocks_stored_once(kind: str, shared: Shared) -> None:
    """G66."""
    rig = Reusing(kind, shared)
    rows = rig.ask_many(ids_of(300), 100, [(SamplingSpec(temp=1.0), seed) for seed in range(4)] + [(GREEDY, 0)] * 4)
    rig.run()
    assert rig.read == 299 and [row.cached for row in rows] == [0] * 8
    starts = Counter(len(path) - len(node.ids) for path, node in held(shared, rig) if node.block is not None)
    greedy = {tuple(row.ids) for row in rows[4:]}
    assert len(greedy) == 1 and all(starts[start] == 1 for start in (0, 64, 128, 192))
    assert starts[256] == len({tuple(row.ids[:20]) for row in rows}) < 8, "four greedy rows wrote the same block"


def test_a_token_is_copied_once_as_a_block_however_long_the_row_gets(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of keeping is linear in new tokens, never in history: whole blocks once, and two tails of at most 63 tokens a row."""
    copied: list[int] = []
    cut = payload.cut

    def counting(slots: Any, row: Any, start: int, stop: int) -> StatePayload:
        copied.append(stop - start)
        return cut(slots, row, start, stop)

    monkeypatch.setattr(payload, "cut", counting)
    rig = Reusing("full", shared)
    ids = ids_of(100)
    for turn in range(6):
        copied.clear()
        row = rig.turn(ids, 90)
        new = len(ids) + 89 - row.cached
        assert sum(copied) <= new + 64 + 2 * 63, f"turn {turn}: {sum(copied)} tokens copied for {new} new ones"
        ids = (*ids, *row.ids, *ids_of(30, turn))


# -- requests that come together -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "sliding", "hybrid", "one class"])
def test_a_prefix_that_eight_requests_share_is_read_once(kind: str, shared: Shared) -> None:
    """They are submitted at once, and nothing of them is kept yet. Whoever lacks the same blocks waits for the first."""
    rig = Reusing(kind, shared, chunk=512)
    common = ids_of(200)
    prompts = [(*common, *ids_of(20 + i, i)) for i in range(8)]
    rows = [rig.ask(ids, 5) for ids in prompts]
    rig.run()
    assert [row.cached for row in rows] == [0] + [192 if kind == "hybrid" else 200] * 7
    assert rig.read == sum(len(ids) - 1 - row.cached for ids, row in zip(prompts, rows, strict=True)), "the prefix was read again"
    for row, ids in zip(rows, prompts, strict=True):
        assert unlike(rig, row, ids) == []


def test_who_waited_for_a_prefix_shares_one_window_for_the_rest(shared: Shared) -> None:
    rig = Reusing("full", shared, chunk=512)
    common = ids_of(200)
    for i in range(5):
        rig.ask((*common, *ids_of(20, i)), 3)
    rig.run()
    assert rig.watched.windows[0] == (1, 219)
    assert rig.watched.windows[1] == (4, 19), rig.watched.windows


def test_requests_without_a_common_block_do_not_wait_for_each_other(shared: Shared) -> None:
    rig = Reusing("full", shared, chunk=512)
    for i in range(4):
        rig.ask(ids_of(70, i), 3)
    rig.run()
    assert rig.watched.windows == [(4, 69)]


@pytest.mark.parametrize("how", ["cancel", "fail", "dispose"])
def test_whoever_waits_for_a_maker_that_ends_goes_on_without_it(how: str, shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Reusing("full", shared, chunk=64)
    common = ids_of(300)
    first = rig.ask((*common, 1), 5)
    second = rig.ask((*common, 2), 5)
    rig.tick(3)
    assert len(shared.pending) > 0 and not first.ids and second.admitted == 0
    if how == "cancel":
        first.cancelled = True
    elif how == "fail":
        with monkeypatch.context() as patch:
            patch.setattr(rig.watched, "feed", failing)
            rig.tick()
        assert isinstance(first.end, ZeroDivisionError)
    else:
        rig.scheduler.fail_all(RuntimeError("closed"))
        assert isinstance(second.end, RuntimeError) and len(shared.pending) == 0
        return
    rig.run()
    assert second.cached >= 128, "what the first had read is kept"
    assert unlike(rig, second, (*common, 2)) == []


def failing(*_: Any) -> None:
    raise ZeroDivisionError("injected")


def test_two_groups_of_one_model_make_a_prefix_once(shared: Shared) -> None:
    """A model that is resident under two names: its groups have one namespace."""
    one, other = Reusing("full", shared), Reusing("full", shared)
    other.namespace = one.namespace
    ids = ids_of(300)
    first, second = one.ask((*ids, 1), 4), other.ask((*ids, 2), 4)
    for _ in range(200):
        if not (one.tick() | other.tick()):
            break
    assert first.end == second.end == "length"
    assert one.read == 300 and second.cached >= 256 and other.read == 300 - second.cached


# -- rows that do not end well ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_a_cancelled_row_leaves_its_whole_blocks_and_nothing_after_the_cancel(kind: str, shared: Shared) -> None:
    rig = Reusing(kind, shared)
    row = rig.ask(ids_of(300), 200)
    while len(row.ids) < 30:
        rig.tick()
    before = {path: node.attachment is not None for path, node in held(shared, rig)}
    row.cancelled = True
    rig.run()
    assert row.end == "cancelled"
    assert {path: node.attachment is not None for path, node in held(shared, rig)} == before
    assert max(map(len, before)) == 320


def test_a_prompt_that_is_cancelled_while_it_is_read_puts_no_tail(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Reusing("full", shared)
    row = rig.ask(ids_of(100), 5)

    def cancelling(*args: Any) -> None:
        row.cancelled = len(rig.watched.windows) == 1  # during the second and last window
        feed(*args)

    feed = rig.watched.feed
    monkeypatch.setattr(rig.watched, "feed", cancelling)
    rig.run()
    assert row.end == "cancelled" and [len(path) for path, _ in held(shared, rig)] == [64]


@pytest.mark.parametrize("submit", ["before", "after"])
def test_a_row_without_a_finite_score_publishes_nothing_of_that_step_and_its_neighbour_everything(submit: str, shared: Shared) -> None:
    rig = Reusing("full", shared, submit=submit)
    bad, good = rig.ask(ids_of(60, 1), 20), rig.ask(ids_of(60, 2), 20)
    rig.watched.fault = lambda rows, scores: poisoned(rows, scores, bad)
    rig.run()
    assert isinstance(bad.end, ModelError) and good.end == "length"
    paths = [path for path, node in held(shared, rig)]
    assert not any(path[:59] == ids_of(60, 1)[:59] and len(path) >= 64 for path in paths), "a block of the failed step"
    assert any(path[:59] == ids_of(60, 2)[:59] and len(path) >= 64 for path in paths)


def poisoned(rows: list[Row], scores: Scores, bad: Recorder) -> Scores:
    """Not a number for this row in the step that fills its first block."""
    hit = [i for i, row in enumerate(rows) if row.spec.consumer is bad and row.slot.length == 63]
    mask = mx.array([[i in hit] for i in range(len(rows))])
    return Scores(mx.where(mask, mx.nan, scores.logits), scores.hidden)


def test_a_step_that_fails_publishes_nothing(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Reusing("full", shared)
    rows = [rig.ask(ids_of(60, i), 20) for i in range(2)]
    while rig.group.rows == [] or rig.group.rows[0].slot.length < 64:
        rig.tick()
    before = held(shared, rig)
    monkeypatch.setattr(rig.group, "_read", failing)
    rig.tick()
    assert all(isinstance(row.end, ZeroDivisionError) for row in rows)
    assert held(shared, rig) == before


def test_a_reader_that_raises_leaves_no_tail(shared: Shared) -> None:
    rig = Reusing("full", shared)
    row = rig.ask(ids_of(30), 20, raise_at=10)
    rig.run()
    assert isinstance(row.end, RuntimeError) and [len(path) for path, _ in held(shared, rig)] == [29]


# -- a cache problem is a miss ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "hybrid", "ring"])
@pytest.mark.parametrize("what", ["paste", "evaluate", "cut"])
def test_copies_that_cannot_be_made_cost_time_only(kind: str, what: str, shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Reusing(kind, shared)
    ids = ids_of(300)
    rig.turn(ids)
    with monkeypatch.context() as patch:
        patch.setattr(payload, what, failing)
        warm = rig.turn((*ids, 1), 70)
    assert unlike(rig, warm, (*ids, 1)) == []
    assert rig.reuse is not None and rig.reuse.failures > 0
    assert (warm.cached == 0) == (what == "paste")
    again = rig.turn((*ids, 1, *warm.ids))
    assert again.cached >= 256 and unlike(rig, again, (*ids, 1, *warm.ids)) == []


def test_state_of_another_layout_is_refused_before_anything_changes() -> None:
    donor, other = Reusing("full", shared_of()), Reusing("hybrid")
    donor.turn(ids_of(130))
    slots: Any = other.group._new_slots()
    row = slots.add(130)
    cache = donor.reuse._cache  # type: ignore[union-attr]
    with cache.take(ids_of(130), donor.namespace, Reuse()) as lease:
        pieces = reuse_module._pieces(lease, 128)
        for broken in (pieces, []):
            with pytest.raises(ValueError, match="layout|state to go on"):
                payload.paste(slots, row, broken, None)
    assert row.length == 0 and not any(np.array(a).any() for a in slots.arrays())


@pytest.mark.parametrize("kind", ["full", "ring, wide", "hybrid", "latent"])
def test_a_payload_survives_the_way_over_host_bytes(kind: str, shared: Shared) -> None:
    rig = Reusing(kind, shared)
    ids = ids_of(300)
    rig.turn(ids)
    specs = graph_of(kind).specs
    for _, node in held(shared, rig):
        if node.block is None:
            continue
        pairs = [(node.block.payload, payload.block_parts(specs, T)), (node.attachment, payload.attachment_parts(specs))]
        for state, parts in pairs:
            if isinstance(state, StatePayload):
                back = StatePayload.from_host(parts, state.to_host())
                assert list(back.tensors()) == list(state.tensors()) and back.nbytes == state.nbytes
                assert all(map(mx.array_equal, back.arrays(), state.arrays()))
    parts = (payload.PartSpec(0, "k", "bfloat16", (1, 1, 3), 0), payload.PartSpec(0, "v", "bfloat16", (1, 1, 0), 1))
    half = StatePayload(parts, [mx.array([[[[1.5, -0.0, float("nan")]]]], mx.bfloat16), mx.zeros((1, 1, 1, 0), mx.bfloat16)])
    back = StatePayload.from_host(parts, half.to_host())
    assert [a.view(mx.uint16).tolist() if a.size else a.shape for a in back.arrays()] == [
        half.arrays()[0].view(mx.uint16).tolist(),
        (1, 1, 1, 0),
    ]
    with pytest.raises(ValueError):
        StatePayload.from_host(parts, [b"123", b""])
    with pytest.raises(ValueError, match="another layout"):
        StatePayload(parts, half.stacks[::-1])


def test_layers_of_one_shape_and_window_lie_in_one_array() -> None:
    def attends(window: int | None = None, dim: int = 8, layer: int = 0) -> StateSpec:
        return StateSpec("full" if window is None else "sliding", 2, dim, 8, "float32", window, place=(layer,))

    specs = (attends(), attends(128), attends(), attends(128), attends(256), attends(dim=16))
    stacks = [part.stack for part in payload.block_parts(specs, T)]
    assert stacks == [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 0]


# -- the budget ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "conversations", "turns"), [("full", 10, 50), ("hybrid", 10, 50), ("recurrent, cut by position", 3, 20)])
def test_conversations_stay_in_a_budget_of_64_mib_and_read_what_is_new(kind: str, conversations: int, turns: int) -> None:
    """exact=False: of the last kind answers are kept only where their bits are not promised to be those of a prompt."""
    shared = shared_of(64 * 2**20)
    worst = converse(Reusing(kind, shared, exact=False), shared, conversations, turns)
    assert worst <= 64, f"{worst} tokens more than the new ones were read in a turn"


@pytest.mark.parametrize("kind", ["full", "sliding", "hybrid", "recurrent, cut by position"])
def test_a_budget_that_is_far_too_small_costs_time_only(kind: str) -> None:
    shared = shared_of(60_000 if kind.startswith("recurrent") else 400_000)
    converse(Reusing(kind, shared), shared, 4, 6)
    assert shared.cache.stats()["evictions"] > 0


def converse(rig: Reusing, shared: Shared, conversations: int, turns: int) -> int:
    """Conversations that take turns; the most tokens that a turn read beyond its new ones."""
    rng = random.Random(3)
    histories: list[tuple[int, ...]] = [ids_of(256, i) for i in range(conversations)]
    read, worst = [len(ids) for ids in histories], 0
    for ids in histories:
        rig.turn(ids, 1)
    for turn in range(turns):
        for i, history in enumerate(histories):
            ids = (*history, *ids_of(rng.randrange(3, 20), (i, turn)))
            before = rig.read
            row = rig.turn(ids, rng.randrange(2, 9))
            worst = max(worst, rig.read - before - (len(ids) - read[i]))
            histories[i], read[i] = (*ids, *row.ids), len(ids) + len(row.ids) - 1
            stats = shared.cache.stats()
            assert stats["used_bytes"] <= stats["budget_bytes"] and stats["leases"] == 0
        shared.cache.check()
    return worst


# -- in every BLAS mode ----------------------------------------------------------------------------------------------------


@pytest.mark.modes("none", "mkl-strict")
@pytest.mark.parametrize("kind", ["full", "sliding, wide", "hybrid"])
def test_reuse_is_exact_in_every_geometry_in_which_batches_are(kind: str, blas_mode: str, shared: Shared) -> None:
    for geometry in geometries(graph_of(kind), blas_mode):
        rig = Reusing(kind, shared, geometry=geometry)
        ids = ids_of(300, geometry.width_multiple)
        first = rig.turn(ids, 70)
        longer = (*ids, *first.ids, 3, 4, 5)
        rows = [rig.ask((*longer, i), 10) for i in range(3)]
        rig.run()
        for i, row in enumerate(rows):
            assert row.cached >= 320 and unlike(rig, row, (*longer, i), geometry) == []


@pytest.mark.parametrize("submit", ["before", "after"])
def test_compiled_steps_give_and_take_the_same_state(submit: str, shared: Shared) -> None:
    geometry = Geometry(bucketed=True, compiled=True)
    rig = Reusing("full", shared, geometry=geometry, submit=submit)
    ids = ids_of(300)
    first = rig.turn(ids, 100)
    assert rig.group._compiled is not None and rig.group._compiled._functions, "nothing was compiled"
    longer = (*ids, *first.ids, 3)
    again = rig.turn(longer, 10)
    assert again.cached == 399
    for row, asked in ((first, ids), (again, longer)):
        want, _ = cold("full", tuple(asked), len(row.ids))
        assert row.ids == want.ids
        assert [part.tobytes() for kv in row.state for part in kv] == [part.tobytes() for kv in want.state for part in kv]


@pytest.mark.modes("mkl")
@pytest.mark.parametrize("kind", KINDS)
def test_a_fast_blas_takes_as_much_and_keeps_all_that_is_generated(kind: str, shared: Shared) -> None:
    rig = Reusing(kind, shared, exact=False)
    ids = ids_of(300)
    first = rig.turn(ids, 90)
    again = rig.turn((*ids, *first.ids, 1))
    assert again.cached >= (384 if kind in RECURRENT else 389)
    assert rig.reuse is not None and rig.reuse.failures == 0
