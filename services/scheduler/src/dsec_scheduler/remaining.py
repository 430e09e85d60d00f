"""Where room is left, once most nodes are full. No I/O."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable


class Remaining:
    """The nodes that may have room for sandboxes of one size: all that have any are among them.

    Each draw throws out those it finds full, and one comes back when something on it has become
    free. So a draw costs what has become free since the last, however many nodes are full.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(names)
        self._known = set(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str) -> None:
        """Take in a node on which something has become free."""
        if name not in self._known:
            self._known.add(name)
            self._names.append(name)

    def forget(self, name: str) -> None:
        """Drop a node that is no more."""
        if name in self._known:
            self._known.discard(name)
            self._names.remove(name)

    def draw(
        self,
        most: int,
        usable: Callable[[str], bool],
        has_room: Callable[[str], bool],
        randomness: random.Random,
    ) -> list[str]:
        """Return at most so many random nodes that are usable for who asks and have room."""
        names, kept = self._names, 0
        found: list[str] = []
        while kept < len(names) and len(found) < most:
            # Those looked at and kept are moved to the front.
            at = kept + int(randomness.random() * (len(names) - kept))
            name = names[at]
            if usable(name):
                if not has_room(name):
                    names[at] = names[-1]
                    names.pop()
                    self._known.discard(name)
                    continue
                found.append(name)
            names[at], names[kept] = names[kept], name
            kept += 1
        return found
