"""Some nodes of which one is drawn, quickly however many there are and however full. No I/O."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from dsec_scheduler.remaining import Remaining

_DRAWS_PER_CHOICE: Final = 4
#: Sizes of sandboxes for which nearly all nodes are full, at most; the oldest is forgotten.
_SIZES_MAX: Final = 64

Size = tuple[float, int]
"""A sandbox's cpus and memory."""

Test = Callable[[str], bool]
"""Whether a node will do, by its name."""


class Crowd:
    """The names of some nodes; it is told when one comes, goes, or may have more room than before.

    The draw comes first and the check second, so that the cost does not grow with the cluster. Once
    most nodes are full those with room are kept in mind; they are all looked through when that
    begins.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        # Where room is left for sandboxes that a random draw found none for.
        self._remaining: dict[Size, Remaining] = {}

    def __len__(self) -> int:
        return len(self._names)

    @property
    def sizes(self) -> int:
        """For how many sizes of sandboxes it keeps in mind where room is left."""
        return len(self._remaining)

    def add(self, name: str) -> None:
        """Take in a node."""
        self._names.append(name)
        self.freed(name)

    def remove(self, name: str) -> None:
        """Drop a node."""
        self._names.remove(name)
        for remaining in self._remaining.values():
            remaining.forget(name)

    def freed(self, name: str) -> None:
        """Note that a node may have more room than before."""
        for remaining in self._remaining.values():
            remaining.add(name)

    def draw(self, size: Size, fits: Test, choices: int, randomness: random.Random) -> list[str]:
        """Return at most ``choices`` random nodes that fit; maybe none once most nodes are full."""
        return [] if size in self._remaining else self._draw(fits, choices, randomness)

    def with_room(
        self, size: Size, usable: Test, has_room: Test, choices: int, randomness: random.Random
    ) -> list[str]:
        """Return at most ``choices`` random nodes; none only if none is usable and has room."""
        remaining = self._remaining.get(size)
        if remaining is None:
            remaining = self._keep_in_mind(size)
        drawn = remaining.draw(choices, usable, has_room, randomness)
        if 2 * len(remaining) > len(self._names):
            del self._remaining[size]
        return drawn

    def _keep_in_mind(self, size: Size) -> Remaining:
        if len(self._remaining) >= _SIZES_MAX:
            del self._remaining[next(iter(self._remaining))]
        remaining = self._remaining[size] = Remaining(self._names)
        return remaining

    def any_that(self, fits: Test, choices: int, randomness: random.Random) -> list[str]:
        """Return at most ``choices`` random nodes that fit; none only if none does."""
        drawn = self._draw(fits, choices, randomness)
        if drawn:
            return drawn
        found = [name for name in self._names if fits(name)]
        return randomness.sample(found, min(choices, len(found)))

    def _draw(self, fits: Test, choices: int, randomness: random.Random) -> list[str]:
        """Return ``choices`` random nodes that fit, or fewer when they are not quickly found."""
        draws, names = choices * _DRAWS_PER_CHOICE, self._names
        if len(names) <= draws:
            return []
        found: list[str] = []
        drawn: set[int] = set()
        while len(drawn) < draws:
            at = int(randomness.random() * len(names))
            if at in drawn:
                continue
            drawn.add(at)
            name = names[at]
            if fits(name):
                found.append(name)
                if len(found) == choices:
                    break
        return found
