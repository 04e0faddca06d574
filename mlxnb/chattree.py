"""A conversation's tree as rows, top to bottom, and those as text: what `%mlx show` and the tree of the chat view draw.

    ● Start
    ● t1  What is it?        [3]
    ├─◌ t2  And then?        [4]  stale
    ● t4  And now?           [6]  head

Filled is on the way to the head, hollow aside, dotted stale. A branch that leaves a line stands before the line goes on.
"""

from __future__ import annotations

from dataclasses import dataclass

from .conversation import Conversation, Turn, current, short


@dataclass(frozen=True, slots=True)
class Row:
    """A turn in the drawing. parent: index of the row it hangs on, -1 for the start.

    lines: for each lane to its left, whether a line goes on downwards there. branch: whether it leaves the line of its parent,
    which is the last of `lines`. on_path: whether it leads to the head.
    """

    turn: Turn
    parent: int
    lines: tuple[bool, ...]
    branch: bool
    stale: bool
    on_path: bool
    head: bool


def rows(tree: Conversation) -> list[Row]:
    """Every turn once, a stale one under what stands in the place of the turn it answered.

    The line that leads to the head stays in its lane, elsewhere that of the newest branch; other branches come before it. What
    is stale never goes on the line of what is not.
    """
    head = tree.head
    path = {id(turn) for turn in head.path} if head is not None else set()
    stale: dict[int, bool] = {}
    for one in tree.history:
        stale[id(one)] = one.replaced_by is not None or (one.parent is not None and stale[id(one.parent)])
    below: dict[int, list[Turn]] = {}
    for one in tree.turns:
        below.setdefault(id(current(one.parent)), []).append(one)
    found: list[Row] = []
    waiting: list[tuple[Turn | None, int, tuple[bool, ...], bool]] = [(None, -1, (), False)]
    while waiting:
        turn, parent, lines, branch = waiting.pop()
        index = -1
        if turn is not None:
            index = len(found)
            found.append(Row(turn, parent, lines, branch, stale[id(turn)], id(turn) in path, turn is head))
        kids = below.get(id(turn), [])
        like = [kid for kid in kids if stale[id(kid)] == (turn is not None and stale[id(turn)])]
        main = next((kid for kid in kids if id(kid) in path), like[-1] if like else None)
        sides = [kid for kid in kids if kid is not main]
        if main is not None:
            waiting.append((main, index, lines, False))
        waiting += [(kid, index, (*lines, main is not None or kid is not sides[-1]), True) for kid in reversed(sides)]
    return found


def heading(tree: Conversation) -> str:
    """What there is, in a line."""
    turns, head = tree.turns, tree.head
    stale = sum(turn.stale for turn in turns)
    count = f"{len(turns)} turn{'s' * (len(turns) != 1)}"
    facts = [tree.name or "Chat", count, *([f"{stale} stale"] if stale else []), *([f"head {head.id}"] if head is not None else [])]
    return " · ".join(facts)


def tree_text(tree: Conversation) -> str:
    """The drawing in characters. A sign is never alone: the words stale and head stand beside them."""
    drawn = rows(tree)
    opening = f"System: {short(tree.system_after(tree.head) or '', 60)}" if tree.system_after(tree.head) else "Start"
    lines = [heading(tree), f"● {opening}"]
    table: list[tuple[str, str, str]] = []
    for row in drawn:
        bars = "".join("│ " if goes_on else "  " for goes_on in row.lines)
        if row.branch:
            bars = bars[:-2] + ("├─" if row.lines[-1] else "└─")
        mark = "◌" if row.stale else "●" if row.on_path else "○"
        cell = f"[{row.turn.count}]" if row.turn.count is not None else ""
        state = "stale" if row.stale else "head" if row.head else ""
        table.append((f"{bars}{mark} {row.turn.id}  {short(row.turn.question)}", cell, state))
    wide = [max((len(line[i]) for line in table), default=0) for i in range(3)]
    lines += ["  ".join(part.ljust(width) for part, width in zip(line, wide, strict=True)).rstrip() for line in table]
    if any(row.stale for row in drawn):
        lines.append("A stale turn answers an earlier version of a turn before it: run its cell again, or fork it to keep it.")
    return "\n".join(lines)
