"""Which numbers of a sandbox's steps have been read, and which have not.

A step's number is its writer's: 1, 2, 3, … A daemon that was restarted may count anew under
another source. Its steps follow those of the first one in a block of their own, so that one number
still orders, pages and identifies all steps of a sandbox.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

#: The first source's steps keep their numbers, the second's are 1,000,000,001 and on.
BLOCK: Final = 1_000_000_000
SOURCES_MAX: Final = 16
HOLES_MAX: Final = 256


class Numbering(msgspec.Struct, kw_only=True):
    """The numbers of one source.

    Attributes:
        source: who counts.
        last: the largest number read.
        holes: intervals below it that were not read, in order, at most :data:`HOLES_MAX`; of more
            the lowest are given up, and what they lack is taken for read.
    """

    source: str
    last: int = 0
    holes: list[tuple[int, int]] = msgspec.field(default_factory=list)

    def take(self, seq: int) -> bool:
        """Note that ``seq`` was read; return False when it had been before."""
        if seq > self.last:
            if seq > self.last + 1:
                self.holes.append((self.last + 1, seq - 1))
                del self.holes[:-HOLES_MAX]
            self.last = seq
            return True
        for at, (low, high) in enumerate(self.holes):
            if low <= seq <= high:
                rest = ((low, seq - 1), (seq + 1, high))
                self.holes[at : at + 1] = [hole for hole in rest if hole[0] <= hole[1]]
                del self.holes[:-HOLES_MAX]
                return True
        return False


class TracedSandbox(msgspec.Struct, kw_only=True):
    """What is known of one sandbox besides its steps.

    Attributes:
        numberings: one for each source, in the order in which they were first read.
        steps: how many are kept.
        shed: how many were not, because of the limit.
        touched_at: Unix seconds at which the last one was read.
    """

    numberings: list[Numbering] = msgspec.field(default_factory=list)
    steps: int = 0
    shed: int = 0
    touched_at: float = 0.0

    def take(self, source: str, seq: int) -> int:
        """Note that a step was read; return its number in the trace, or 0 to pass it over.

        It is passed over when it was read before, when its number is none, and when it comes from
        more sources than a sandbox can have had.
        """
        if not 1 <= seq < BLOCK:
            return 0
        for at, numbering in enumerate(self.numberings):
            if numbering.source == source:
                return at * BLOCK + seq if numbering.take(seq) else 0
        if len(self.numberings) >= SOURCES_MAX:
            return 0
        numbering = Numbering(source=source)
        numbering.take(seq)
        self.numberings.append(numbering)
        return (len(self.numberings) - 1) * BLOCK + seq

    @property
    def last_seq(self) -> int:
        """The largest number in the trace."""
        return (len(self.numberings) - 1) * BLOCK + self.numberings[-1].last

    def missing(self, after_seq: int, up_to_seq: int) -> Iterator[int]:
        """Yield the numbers not read, above ``after_seq`` and not above ``up_to_seq``."""
        for at, numbering in enumerate(self.numberings):
            base = at * BLOCK
            for low, high in numbering.holes:
                first = max(base + low, after_seq + 1)
                yield from range(first, min(base + high, up_to_seq) + 1)
