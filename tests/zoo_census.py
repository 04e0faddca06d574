"""What each `mlx_lm` module asks of its caches, measured: the facts behind the engine's capability table.

`python tests/zoo_census.py [module ...]` prints one block a module. Every cache object of `make_prompt_cache(model)` is watched through
one prefill of 20 tokens and one step of 1: which layers touch it and with which members of the cache protocol, the masks that it is
asked for, the shapes that it is given. Types are those of a bfloat16 copy of the model, from shapes alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import mlx.core as mx
import zoo
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

PREFILL = 20
Facts = dict[str, Any]


def leaves(caches: list[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(place, object) of every cache that holds state: '3', or '3.0' inside a CacheList."""
    for i, cache in enumerate(caches):
        if isinstance(cache, CacheList):
            yield from leaves(list(cache.caches), f"{prefix}{i}.")
        else:
            yield f"{prefix}{i}", cache


class _Watch:
    """Collects what the model does with one cache object."""

    def __init__(self, paths: dict[int, str]) -> None:
        self.paths = paths
        self.members: set[str] = set()
        self.users: set[str] = set()
        self.masks: set[tuple[int, int | None, bool]] = set()
        self.stored: list[tuple[tuple[int, ...], tuple[int, ...], str]] = []

    def touched(self, member: str) -> None:
        """Note an access from outside mlx-lm's own cache module, and the innermost module of the model that made it."""
        frame = sys._getframe(2)
        if frame.f_code.co_filename.endswith("models/cache.py"):
            return
        self.members.add(member)
        while frame is not None:
            path = self.paths.get(id(frame.f_locals.get("self")))
            if path is not None:
                self.users.add(path)
                return
            frame = frame.f_back

    def attach(self, cache: Any) -> None:
        watch, base = self, type(cache)

        class Watched(base):  # type: ignore[misc, valid-type]
            def __getattribute__(self, name: str) -> Any:
                if not name.startswith("__"):
                    watch.touched(name)
                return super().__getattribute__(name)

            def __getitem__(self, index: int) -> Any:
                watch.touched("[]")
                return super().__getitem__(index)

            def __setitem__(self, index: int, value: Any) -> None:
                watch.touched("[]=")
                super().__setitem__(index, value)

            def make_mask(self, N: int, *args: Any, **kwargs: Any) -> Any:
                watch.masks.add((N, kwargs.get("window_size"), bool(kwargs.get("return_array"))))
                return super().make_mask(N, *args, **kwargs)

            def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
                watch.stored.append((keys.shape, values.shape, _dtype(keys)))
                return super().update_and_fetch(keys, values)

        Watched.__name__ = base.__name__
        cache.__class__ = Watched


def _dtype(array: mx.array) -> str:
    return str(array.dtype).rsplit(".", 1)[-1]


def census(name: str) -> Facts:
    """What the module asks of its caches: number of layers and caches, and one entry for each cache object."""
    model, _ = zoo.build(name)
    model.set_dtype(mx.bfloat16)  # shapes and types only: 16-bit experts cannot be evaluated on a CPU
    paths = {id(module): path for path, module in model.named_modules()}
    caches = make_prompt_cache(model)
    watches = {}
    for place, cache in leaves(caches):
        watches[place] = _Watch(paths)
        watches[place].attach(cache)
    model(mx.zeros((1, PREFILL), mx.int32), cache=caches)
    model(mx.zeros((1, 1), mx.int32), cache=caches)
    return {
        "module": name,
        "layers": len(model.layers),
        "caches": len(caches),
        "objects": {place: _object_facts(cache, watches[place]) for place, cache in leaves(caches)},
    }


def _object_facts(cache: Any, watch: _Watch) -> Facts:
    facts: Facts = {"kind": type(cache).__name__}
    members, users = sorted(watch.members), sorted(watch.users)
    for attribute in ("max_size", "keep", "chunk_size"):
        if hasattr(cache, attribute):
            facts[attribute] = getattr(cache, attribute)
    if isinstance(cache, ArraysCache):
        facts["arrays"] = [None if a is None else [list(a.shape), _dtype(a)] for a in cache.cache]
    if watch.stored:
        keys, values, dtype = watch.stored[0]
        facts["kv"] = {"heads": keys[1], "key": keys[3], "value_heads": values[1], "value": values[3], "dtype": dtype}
        facts["writes"] = [[k[2], v[2]] for k, v, _ in watch.stored]
    facts["masks"] = [list(mask) for mask in sorted(watch.masks, key=str)]
    return {**facts, "members": members, "users": users}


def describe(facts: Facts) -> str:
    """The facts of one module as a few lines; neighbours that differ only in their place are folded."""
    head = f"{facts['module']}: {facts['layers']} layers, {facts['caches']} caches"
    lines = [head + ("  <-- NOT ONE PER LAYER" if facts["layers"] != facts["caches"] else "")]
    rows = [(place, _row(o), " ".join(o["users"]) or "NOBODY") for place, o in facts["objects"].items()]
    for text, group in groupby(rows, key=lambda row: row[1]):
        members = list(group)
        lines.append(f"  [{' '.join(place for place, _, _ in members)}] {text}")
        lines += [f"      {place}: {users}" for place, _, users in members if len(members) < 3 or "." in place or " " in users]
    return "\n".join(lines)


def _row(o: Facts) -> str:
    kind = o["kind"] + "".join(f" {k}={o[k]}" for k in ("max_size", "keep", "chunk_size") if k in o)
    if "arrays" in o:
        kind += f" {o['arrays']}"
    if kv := o.get("kv"):
        heads = kv["heads"] if kv["heads"] == kv["value_heads"] else f"{kv['heads']}/{kv['value_heads']}"
        kind += f" heads {heads} K {kv['key']} V {kv['value']} {kv['dtype']}"
        kind += "" if o["writes"] == [[PREFILL, PREFILL], [1, 1]] else f" writes {o['writes']}"
    masks = "; ".join(f"N={n} window={w}{' array' if a else ''}" for n, w, a in o["masks"])
    return f"{kind} | masks: {masks or '-'} | uses: {' '.join(o['members'])}"


def main(names: list[str]) -> None:
    for name in names or zoo.names():
        print(describe(census(name)), flush=True)


if __name__ == "__main__":
    if "--json" in sys.argv:
        print(json.dumps([census(name) for name in zoo.names()], indent=1))
    else:
        main(sys.argv[1:])
