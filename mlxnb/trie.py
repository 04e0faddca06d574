"""`Trie`: several answers to one prompt merged by token ids, so that what they share is there once. Pure: no view, no engine.

    prompt -- found -- a -- bottle            each place knows how many samples went through it, how likely the model
                 |      \\- boat                held its token, and what else could have stood after it
                 \\- walked

The same merge is made by widgets/src/loom_data.ts for the screen; both read the runs and what `Row` says of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mlxnb_engine.events import Alternative, TokenRecord

Kind = Literal["sample", "more", "probe"]

LOGPROBS = 8
"""Alternatives kept at each token, where nobody says otherwise: a tree of continuations is about what else could have come."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the tree: the first `at` tokens of run `run`, then `token`, an alternative that no run took, if given."""

    run: int
    at: int
    token: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """What a run is in the tree. given: its first tokens that it went on from, which others have drawn.

    kind: "sample" for what was asked for at the start, "more" for a continuation, "probe" for one step that only shows what
    could come next: its own draw is no part of the tree.
    """

    kind: Kind = "sample"
    given: int = 0


@dataclass(eq=False, slots=True)
class Node:
    """The place after one token. samples: of those that were asked for, how many went through it; rows: the same of continuations.

    logprob: of its token, nats, before the filters; None if nobody captured it. ends: runs that ended here by themselves.
    next: the likeliest tokens after it, likeliest first; () if nobody captured them.
    """

    place: Place
    token: int
    text: str
    parent: Node | None
    kids: dict[int, Node] = field(default_factory=dict)
    samples: int = 0
    rows: int = 0
    logprob: float | None = None
    ends: list[int] = field(default_factory=list)
    next: tuple[Alternative, ...] = ()

    @property
    def path(self) -> list[Node]:
        """From the first token to this one; [] for the root."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def ids(self) -> list[int]:
        return [node.token for node in self.path]


class Trie:
    """The tree of these runs. Invariant: `samples` of a node >= the sum of `samples` of its kids."""

    def __init__(self) -> None:
        self.root = Node(Place(0, 0), -1, "", None)
        self.runs = 0

    @classmethod
    def of(cls, runs: Iterable[tuple[Sequence[TokenRecord], Row, bool]]) -> Trie:
        """runs: tokens, what the run is, and whether it ended by itself; in the order by which places name them."""
        trie = cls()
        for tokens, row, ended in runs:
            trie.add(tokens, row, ended)
        return trie

    def add(self, tokens: Sequence[TokenRecord], row: Row, ended: bool) -> None:
        run, self.runs = self.runs, self.runs + 1
        node = self.root
        node.samples += row.kind == "sample"
        node.rows += row.kind == "more"
        for at, token in enumerate(tokens):
            if token.top:
                node.next = node.next or token.top
            if row.kind == "probe" and at >= row.given:
                return
            kid = node.kids.get(token.id)
            if kid is None:
                kid = node.kids[token.id] = Node(Place(run, at + 1), token.id, token.text, node)
                kid.logprob = next((one.logprob for one in node.next if one.id == token.id), None)
            kid.logprob = token.logprob if kid.logprob is None else kid.logprob
            kid.samples += row.kind == "sample"
            kid.rows += row.kind == "more" and at >= row.given
            node = kid
        if ended and row.kind != "probe":
            node.ends.append(run)

    def find(self, ids: Sequence[int]) -> Node | None:
        """The node after these tokens; None if no run went there."""
        node: Node | None = self.root
        for token in ids:
            node = node.kids.get(token) if node is not None else None
        return node

    def leaves(self) -> list[Node]:
        """Where paths end or stop for now, the ones most samples took first."""
        found = [node for node in self._nodes() if node.ends or not node.kids]
        return sorted((node for node in found if node is not self.root), key=lambda node: -(node.samples + node.rows))

    def _nodes(self) -> Iterator[Node]:
        todo = [self.root]
        while todo:
            node = todo.pop()
            yield node
            todo.extend(reversed(node.kids.values()))

    @property
    def size(self) -> int:
        """Tokens of the tree, shared ones once."""
        return sum(1 for _ in self._nodes()) - 1


def cuts(tokens: Sequence[TokenRecord], text: str) -> list[int]:
    """Where in `text` each token ends. A character that several tokens make up ends with the last of them.

    What does not fit (a stop string that was taken off) ends with the text.
    """
    ends: list[int] = []
    here = 0
    for index, token in enumerate(tokens):
        piece = token.text.lstrip(" ") if index == 0 and not text.startswith(token.text) else token.text
        if text.startswith(piece, here):
            here += len(piece)
        else:
            after = next((one.text for one in tokens[index + 1 :] if one.text and "\ufffd" not in one.text), "")
            whole = index + 1 == len(tokens) or "\ufffd" not in tokens[index + 1].text
            found = text.find(after, here) if after else len(text)
            here = (found if found >= 0 else len(text)) if whole else here
        ends.append(here)
    return ends


def chains(node: Node) -> Iterator[list[Node]]:
    """The pieces of text below a node: each as long as nothing branches off, ends, or is taken by fewer. Likeliest first."""
    for kid in sorted(node.kids.values(), key=lambda one: -(one.samples + one.rows)):
        chain = [kid]
        while not chain[-1].ends and len(chain[-1].kids) == 1:
            (after,) = chain[-1].kids.values()
            if (after.samples, after.rows) != (kid.samples, kid.rows):
                break
            chain.append(after)
        yield chain


def outline(trie: Trie, width: int = 88, most: int = 60) -> list[str]:
    """The tree as lines of text, for readers without the view. most: lines; what is left out is said."""
    lines: list[str] = []
    left = _outline(trie.root, "", width, most, lines)
    return [*lines, f"({left} more)"] if left else lines


def _outline(node: Node, indent: str, width: int, most: int, lines: list[str]) -> int:
    below = list(chains(node))
    left = 0
    for index, chain in enumerate(below):
        if len(lines) >= most:
            left += 1
            continue
        last = index == len(below) - 1
        lines.append(f"{indent}{'└─ ' if last else '├─ '}{_line(chain, max(24, width - len(indent)))}")
        left += _outline(chain[-1], indent + ("   " if last else "│  "), width, most, lines)
    return left


def _line(chain: Sequence[Node], width: int) -> str:
    first = chain[0]
    count = f"{first.samples}×" if first.samples else "+"
    share = f" p {math.exp(min(0.0, first.logprob)):.2f}" if first.logprob is not None else ""
    text = " ".join("".join(node.text for node in chain).split())
    return f"{count}{share}  {text if len(text) <= width else text[: width - 1] + '…'}{' ■' if chain[-1].ends else ''}"
