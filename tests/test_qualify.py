"""What is measured on the running backend: geometries whose products do not depend on the batch, the order of submission (G31, P76)."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest
from rig import GREEDY, Rig, differences, graph_of, prompt

from mlxnb_engine import qualify
from mlxnb_engine.methods.window import WindowGroup
from mlxnb_engine.qualify import StrictVerdict, strict_geometry, submit_order
from mlxnb_engine.state.spec import Geometry

Product = Callable[[mx.array, mx.array], mx.array]
SHAPES = [(48, 32), (32, 80)]


def verdict(product: Product = mx.matmul) -> StrictVerdict:
    return strict_geometry(SHAPES, {16}, product)


def split_at(x: mx.array, w: mx.array, at: int) -> mx.array:
    """The product as a sum of two parts: other bits than the whole, the same value."""
    return x[..., :at] @ w[..., :at, :] + x[..., at:] @ w[..., at:, :]


def by_width(odd: Callable[[int], bool]) -> Product:
    """A product whose sum order is another one for the widths that `odd` names."""
    return lambda x, w: split_at(x, w, x.shape[-1] // 2) if odd(x.shape[-2]) else x @ w


def by_extent(odd: Callable[[int], bool]) -> Product:
    """A product whose sum order is another one for the summed lengths that `odd` names."""
    return lambda x, w: split_at(x, w, 96) if odd(x.shape[-1]) else x @ w


def test_the_stubs_change_bits_and_not_values() -> None:
    x, w = (mx.random.normal(shape, key=mx.random.key(i)) for i, shape in enumerate(((8, 192), (192, 16))))
    split, whole = split_at(x, w, 96), x @ w
    assert not mx.array_equal(split, whole)
    assert mx.allclose(split, whole, rtol=1e-3, atol=1e-3)


def test_the_invariant_product_is_accepted_with_windows_of_one() -> None:
    assert verdict().geometry == Geometry(1, True, 192, ())


@pytest.mark.modes("none", "mkl-strict")
def test_every_backend_of_an_exact_mode_has_an_exact_geometry() -> None:
    graph = graph_of()
    found = strict_geometry(graph.projection_shapes(), {spec.key_dim for spec in graph.specs})
    assert found.geometry is not None, found.note
    assert found.geometry.bucketed and str(found.geometry.width_multiple) in found.note


@pytest.mark.parametrize("multiple", [2, 4, 8, 16])
def test_the_smallest_multiple_of_widths_that_agree_is_found(multiple: int) -> None:
    found = verdict(by_width(lambda width: width % multiple != 0))
    assert found.geometry == Geometry(multiple, True, 192, ()), found.note


def test_a_product_that_depends_on_every_width_is_rejected() -> None:
    found = verdict(lambda x, w: split_at(x, w, 1 + x.shape[-2] % (x.shape[-1] - 1)))
    assert found.geometry is None
    assert "same bits" in found.note


def test_one_odd_width_among_the_prefill_windows_is_enough_to_reject() -> None:
    assert verdict(by_width(lambda width: width == 512)).geometry is None


def test_a_sum_over_attended_keys_that_depends_on_the_width_is_rejected() -> None:
    """The projections and the scores sum over short axes; only probabilities times values runs over the extent."""

    def product(x: mx.array, w: mx.array) -> mx.array:
        return split_at(x, w, 96) if x.shape[-1] >= 192 and x.shape[-2] > 16 else x @ w

    assert verdict(product).geometry is None


def test_a_product_that_depends_on_zero_padding_is_rejected() -> None:
    found = verdict(lambda x, w: split_at(x, w, x.shape[-1] // 3) if x.shape[-1] >= 192 else x @ w)
    assert found.geometry is None


@pytest.mark.parametrize(
    ("odd", "geometry"),
    [
        ({192}, Geometry(1, True, 384, ())),
        ({384}, Geometry(1, True, 192, (384,))),
        ({768}, Geometry(1, True, 192, (768,))),
        ({192, 768}, Geometry(1, True, 384, (768,))),
    ],
)
def test_a_capacity_with_other_bits_is_skipped_and_the_others_stay(odd: set[int], geometry: Geometry) -> None:
    assert verdict(by_extent(lambda extent: extent in odd)).geometry == geometry


def test_skipped_capacities_are_never_used() -> None:
    geometry = Geometry(4, True, 192, (384,))
    assert [geometry.capacity_for(n) for n in (1, 192, 193, 384, 385, 769)] == [192, 192, 768, 768, 768, 1536]
    assert [geometry.width_for(n) for n in (1, 4, 5, 64)] == [4, 4, 8, 64]
    assert [geometry.reach_for(n) for n in (1, 4, 64)] == [4, 7, 67]


def test_a_batch_on_a_sensitive_product_differs_until_its_windows_have_the_found_multiple(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole chain: a stub in place of the model's matrices, the self-check's verdict, and rows in a batch."""
    product = by_width(lambda width: width % 4 != 0)

    def linear(self: object, x: mx.array) -> mx.array:
        # Rows of a batch meet in one matrix, as they do in a BLAS.
        weight = self["weight"]  # type: ignore[index]
        return product(x.reshape(-1, x.shape[-1]), weight.T).reshape(*x.shape[:-1], -1)

    graph = graph_of()
    monkeypatch.setattr("mlx.nn.Linear.__call__", linear)
    found = strict_geometry(graph.projection_shapes(), {16}, product)
    assert found.geometry is not None and found.geometry.width_multiple == 4

    def changed_by_neighbours(geometry: Geometry) -> list[str]:
        lone, full = Rig(graph, geometry, chunk=16), Rig(graph, geometry, chunk=16)
        want = [lone.ask(prompt(9), 6, GREEDY)]
        lone.run()
        rows = [full.ask(prompt(n), 6, GREEDY) for n in (9, 12, 40, 7)]
        full.run()
        return differences(rows[0], want[0])

    assert changed_by_neighbours(Geometry(1, True)), "the stub is not sensitive enough to test anything"
    assert changed_by_neighbours(found.geometry) == []


# -- the order of submission ----------------------------------------------------------------------------------------------


def test_the_order_of_submission_is_measured() -> None:
    assert submit_order(rounds=1) in ("before", "after")


@pytest.mark.parametrize(("copy_s", "wait_s", "order"), [(3.0, 1.0, "after"), (0.0, 1.0, "before")])
def test_a_device_that_copies_pinned_buffers_is_given_the_step_after_the_read(
    copy_s: float, wait_s: float, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device on a virtual clock: submitting while a step is unread copies its buffers, an empty queue waits."""
    clock, unread = [0.0], [0]

    class Flight:
        def __add__(self, other: object) -> Flight:
            return self

        def __getitem__(self, key: object) -> mx.array:
            return mx.zeros((2, 1, 1, 1))

        def tolist(self) -> list[float]:
            unread[0] -= 1
            return [0.0]

    class Device:
        int32 = mx.int32

        def __getattr__(self, name: str) -> object:
            return getattr(mx, name)

        def zeros(self, shape: tuple[int, ...]) -> object:
            return Flight() if len(shape) == 1 else mx.zeros((*shape[:2], 256, shape[3]))

        def eval(self, *arrays: object) -> None:
            unread[0] = 0

        def async_eval(self, *arrays: object) -> None:
            clock[0] += copy_s if unread[0] else wait_s
            unread[0] += 1

    monkeypatch.setattr(qualify, "mx", Device())
    monkeypatch.setattr(qualify.time, "perf_counter", lambda: clock[0])
    assert submit_order() == order


def test_both_orders_give_the_same_rows() -> None:
    results = []
    for order in ("before", "after"):
        rig = Rig(graph_of(), submit=order)
        rows = [rig.ask(prompt(n), 7) for n in (5, 66, 12)]
        assert isinstance(rig.group, WindowGroup)
        results.append((rig.run(), rows)[1])
    assert not [d for pair in zip(*results, strict=True) for d in differences(*pair)]
