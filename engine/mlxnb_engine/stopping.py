"""`StopMatcher`: finds text stop strings in text that arrives in pieces, and never shows a piece of one."""

from __future__ import annotations


class StopMatcher:
    """Visible text is the text before the earliest occurrence of a stop string; of several that start there the longest matched.

    Owner: one row, one thread. Invariant: what it returns depends on the whole text alone, not on how it was cut into pieces; held
    back is only what may still belong to a stop string, less than the longest one (plus a match that an earlier or longer one may
    yet overtake). Cost per character: amortised O(number of stop strings).
    Source: Knuth, Morris, Pratt, "Fast pattern matching in strings" (1977), one automaton per stop string.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._tables = tuple(_borders(stop) for stop in self._stops)
        self._states = [0] * len(self._stops)
        self._held = ""
        self._position = 0
        self._best: tuple[int, str] | None = None
        self.matched: str | None = None
        """The stop string that ended the text, once that is decided by `push` or `flush`."""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text: (what became visible, the stop string if it is found). After a match, nothing more is visible."""
        if self.matched is not None:
            return "", self.matched
        if not self._stops:
            return text, None
        held_from = self._position - len(self._held)
        held = self._held + text
        for char in text:
            self._position += 1
            self._advance(char)
        open_from = self._open_from()
        if self._best is not None:
            start, stop = self._best
            if start < open_from:
                self._held, self.matched = "", stop
                return held[: start - held_from], stop
            open_from = min(open_from, start)
        self._held = held[open_from - held_from :]
        return held[: open_from - held_from], None

    def flush(self) -> str:
        """No more text comes: what was held back and is visible. Sets `matched` if a match had been waiting for a longer one."""
        held, self._held = self._held, ""
        if self._best is None or self.matched is not None:
            return held
        start, self.matched = self._best
        return held[: start - (self._position - len(held))]

    def _advance(self, char: str) -> None:
        for i, stop in enumerate(self._stops):
            table, state = self._tables[i], self._states[i]
            while state and (state == len(stop) or stop[state] != char):
                state = table[state]
            state += stop[state] == char
            self._states[i] = state
            if state == len(stop):
                start = self._position - state
                if self._best is None or (start, -state) < (self._best[0], -len(self._best[1])):
                    self._best = (start, stop)

    def _open_from(self) -> int:
        """Where the longest unfinished beginning of a stop string starts; the end of the text if there is none."""
        automata = zip(self._stops, self._tables, self._states, strict=True)
        return self._position - max(table[state] if state == len(stop) else state for stop, table, state in automata)


def _borders(stop: str) -> list[int]:
    """borders[n]: length of the longest proper prefix of stop[:n] that is also its suffix."""
    borders = [0, 0]
    for n in range(1, len(stop)):
        k = borders[n]
        while k and stop[k] != stop[n]:
            k = borders[k]
        borders.append(k + (stop[k] == stop[n]))
    return borders
