"""Numbers on records: the writer counts; the reader knows what it has seen and what it lacks."""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from dsec_common.behavior import BehaviorLog

_TRACKED: Final = 100_000
_HOLES: Final = 256


class SequenceCounter:
    """Gives each sandbox's records their ``seq``: 1, 2, 3, …, one counter per source and process.

    A writer that restarts and no longer knows its numbers must use another ``source``, or else
    readers take its new records for old ones.
    """

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def next(self, sandbox_id: str) -> int:
        """Return the number of the sandbox's next record."""
        number = self._last.get(sandbox_id, 0) + 1
        self._last[sandbox_id] = number
        return number

    def last(self, sandbox_id: str) -> int:
        """Return the number given last; 0 when none was. Keep it to :meth:`resume` later."""
        return self._last.get(sandbox_id, 0)

    def resume(self, sandbox_id: str, last: int) -> None:
        """Go on after ``last``, a number that an earlier process gave."""
        self._last[sandbox_id] = max(last, self._last.get(sandbox_id, 0))

    def forget(self, sandbox_id: str) -> None:
        """Drop the counter of a sandbox that has written its last record."""
        self._last.pop(sandbox_id, None)


class Arrival(StrEnum):
    """What a record's number says about it."""

    NEW = "new"
    DUPLICATE = "duplicate"
    AFTER_GAP = "after_gap"
    LATE = "late"


class _Track:
    __slots__ = ("first", "holes", "last")

    def __init__(self, first: int) -> None:
        self.first = first
        self.last = first
        #: Intervals below `last` that have not been seen. What lies before the first record seen
        #: is one of them: an adopted spool may deliver it later.
        self.holes: list[tuple[int, int]] = [(1, first - 1)] if first > 1 else []


class SequenceTracker:
    """Knows which numbers of each sandbox and source have arrived.

    It remembers the 100,000 pairs heard of last and up to 256 holes of each; unnumbered records
    (``seq`` 0) are always new.

    Attributes:
        duplicates: records seen before.
        missing: numbers skipped and not arrived since, over all pairs.
    """

    def __init__(self) -> None:
        self.duplicates = 0
        self.missing = 0
        self._tracks: OrderedDict[tuple[str, str, str], _Track] = OrderedDict()

    def observe(self, record: BehaviorLog) -> Arrival:
        """Note a record's arrival and return what it is; handle all but duplicates."""
        if record.seq == 0:
            return Arrival.NEW
        pair = (record.project, record.sandbox_id, record.source)
        track = self._tracks.get(pair)
        if track is None:
            self._tracks[pair] = _Track(record.seq)
            if len(self._tracks) > _TRACKED:
                self._tracks.popitem(last=False)
            return Arrival.NEW
        self._tracks.move_to_end(pair)
        if record.seq <= track.last:
            return self._below(track, record.seq)
        skipped = record.seq - track.last - 1
        if skipped:
            self.missing += skipped
            track.holes.append((track.last + 1, record.seq - 1))
            del track.holes[:-_HOLES]
        track.last = record.seq
        return Arrival.AFTER_GAP if skipped else Arrival.NEW

    def _below(self, track: _Track, seq: int) -> Arrival:
        for at, (low, high) in enumerate(track.holes):
            if low <= seq <= high:
                rest = [(low, seq - 1), (seq + 1, high)]
                track.holes[at : at + 1] = [hole for hole in rest if hole[0] <= hole[1]]
                self.missing -= seq > track.first  # what came before the first was never counted
                return Arrival.LATE
        self.duplicates += 1
        return Arrival.DUPLICATE
