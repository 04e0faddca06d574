"""From a parsed option line and a cell body to requests: insertion, `--each`, `--sweep`. No engine, no display."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mlxnb_engine import policy
from mlxnb_engine.errors import RequestError
from mlxnb_engine.types import CompletionRequest, Message

from . import insert, runtime
from .options import Cell, Sweep

MAX_ROWS = 10_000
ITEM_NAMES = ("item", "index")


@dataclass(frozen=True, slots=True)
class Prompt:
    """The texts of a cell after insertion."""

    body: str
    system: str | None
    prefill: str


@dataclass(frozen=True, slots=True)
class Planned:
    """One request and what tells it from the others of its cell: columns of the item, swept values."""

    request: CompletionRequest
    labels: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Item:
    """One element of `--each`. names: what `{{ }}` sees. labels: the columns of the result."""

    names: Mapping[str, Any]
    labels: Mapping[str, Any]


def plan(cell: Cell, body: str, notebook: Mapping[str, Any], namespace: Mapping[str, Any]) -> list[Planned]:
    """Every request of a cell, checked, in order: items, then points of the grid. Samples are rows of one request.

    notebook: the policy layer of `%mlx config`. namespace: the notebook's variables. Raises RequestError before anything is
    submitted, so a cell runs as a whole or not at all.
    """
    base = {name: value for name, value in cell.policy_layer().items() if name not in ("system", "prefill")}
    policy.resolve(notebook=notebook, cell=base)
    system = cell.get("system", notebook.get("system"))
    texts = [body, system or "", cell.get("prefill", "")]
    parts = [[text] if cell.get("raw_text") else insert.parse(text) for text in texts]
    items = [Item({}, {})]
    if "each" in cell.given:
        items = _items(cell.given["each"], namespace)
        _must_use(parts, items[0], cell.given["each"])
    points = grid(cell.get("sweep", ()))
    rows = len(items) * len(points) * base.get("samples", 1)
    if rows > MAX_ROWS:
        raise RequestError(f"This cell asks for {rows} answers; the most is {MAX_ROWS}.", "Split the list or the grid.")
    planned: list[Planned] = []
    for item in items:
        body_text, system_text, prefill = (insert.insert(part, {**namespace, **item.names}) for part in parts)
        if not body_text.strip() and not cell.get("no_template"):
            where = f"item {item.names['index']!r} of --each {cell.given['each']}" if "each" in cell.given else "this cell"
            raise RequestError(f"The prompt of {where} is empty once its variables are filled in.", "Write what the model should answer.")
        prompt = Prompt(body_text, None if system is None or cell.get("no_template") else system_text, prefill)
        for point in points:
            request = _request(prompt, policy.resolve(notebook=notebook, cell={**base, **point}), bool(cell.get("no_template")))
            planned.append(Planned(request, {**item.labels, **point}))
    return planned


def _request(prompt: Prompt, chosen: policy.Policy, raw: bool) -> CompletionRequest:
    values = chosen.values
    system = [] if prompt.system is None else [Message("system", prompt.system)]
    request = CompletionRequest(
        id=runtime.new_request_id(),
        model=values["model"],
        messages=None if raw else (*system, Message("user", prompt.body)),
        text=prompt.body if raw else None,
        prefill=prompt.prefill,
        thinking=None if raw else values["thinking"],
        samples=values["samples"],
        max_tokens=values["max_tokens"],
        stop=tuple(values["stop"]),
        sampling=chosen.sampling(),
        dtype=values["dtype"],
        open_fields=chosen.open_fields,
    )
    request.validate()
    return request


def grid(sweeps: Iterable[Sweep]) -> list[dict[str, Any]]:
    """Every combination of the swept values, the last axis fastest; one empty point without a sweep."""
    axes = [[(sweep.name, value) for value in sweep.values] for sweep in sweeps]
    size = 1
    for axis in axes:
        size *= len(axis)
        if size > MAX_ROWS:
            raise RequestError(f"The grid has more than {MAX_ROWS} points.", "Sweep fewer values.")
    return [dict(point) for point in itertools.product(*axes)]


# -- --each ----------------------------------------------------------------------------------------------------------------


def _items(source: str, namespace: Mapping[str, Any]) -> list[Item]:
    """The elements of a list, Series or DataFrame, or of anything that can be iterated.

    A row of a DataFrame and a dict give a name per column; `index` is the label of the row, or the position in a list.
    """
    try:
        value = insert.evaluate(source, namespace)
    except RequestError as error:
        raise RequestError(f"--each {source}: {error.message}", _quoted(source) or error.hint) from error
    kind = type(value).__name__
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        raise RequestError(f"--each {source} is a {kind}, not a list, Series or DataFrame.", f"For one item: a list, [{source}].")
    labels: Iterable[Any] = itertools.count()
    indexed = hasattr(value, "index") and (hasattr(value, "columns") or hasattr(value, "to_list"))
    if hasattr(value, "columns") and hasattr(value, "to_dict"):
        labels, value = list(value.index), value.to_dict("records")
    elif hasattr(value, "index") and hasattr(value, "to_list"):
        labels, value = list(value.index), value.to_list()
    elements = list(itertools.islice(value, MAX_ROWS + 1))
    if not elements:
        raise RequestError(f"--each {source} is empty.", "There is nothing to ask.")
    if (unknown := insert.undefined(elements)) is not None:
        hint = _quoted(source) or insert.near(unknown, namespace) or "Define it in an earlier cell."
        raise RequestError(f"--each {source}: `{unknown}` is not defined.", hint)
    if len(elements) > MAX_ROWS:
        raise RequestError(f"--each {source} has more than {MAX_ROWS} items.", f"Take a part: --each '{source}[:{MAX_ROWS}]'.")
    return [_item(label, element, indexed) for label, element in zip(labels, elements, strict=False)]


def _quoted(source: str) -> str:
    """The option line takes the quotes away from a list that is written in it."""
    return """Put a list in quotes: --each '["Oslo", "Rome"]'.""" if source.startswith(("[", "(")) else ""


def _item(label: Any, element: Any, indexed: bool) -> Item:
    """indexed: the label is that of a Series or DataFrame, and a column of the result, by which it can be joined back."""
    names: dict[str, Any] = {"item": element, "index": label}
    columns = {str(key): value for key, value in element.items()} if isinstance(element, Mapping) else {"item": element}
    names |= {key: value for key, value in columns.items() if key.isidentifier()}
    return Item(names, {"index_" if "index" in columns else "index": label, **columns} if indexed else columns)


def _must_use(parts: list[list[insert.Part]], item: Item, source: str) -> None:
    """A prompt that never mentions the item would be asked again and again, word for word the same."""
    used = set().union(*(insert.names_in(part) for part in parts))
    if used.isdisjoint(item.names):
        columns = [name for name in item.names if name not in ITEM_NAMES][:5]
        example = " or ".join(f"{{{{ {name} }}}}" for name in ("item", *columns))
        raise RequestError(f"The prompt does not use the items of --each {source}.", f"Write {example} where an item belongs.")
