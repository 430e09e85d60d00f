"""The core of bills: segments and steps in, sums by project, agent and hour out. It does no I/O.

What ends in an hour counts in that hour, whole. A segment counts once, by its number; one whose
amounts are not known gives way to the same one measured.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

import msgspec

from dsec_common.behavior import BehaviorLog
from dsec_common.metering import MeterRecord, SandboxSegment
from dsec_common.subjects import DEFAULT_PROJECT
from dsec_common.wire.cost import Amounts, CostRow

HOUR_MS: Final = 3_600_000
#: Things that have ended are remembered so that what comes twice is known; the newest so many.
ENDED_KEPT: Final = 50_000
_NOTHING: Final = Amounts()
_COUNTED_ACTIONS: Final = frozenset({"exec", "read_file", "write_file"})


class Bucket(msgspec.Struct, frozen=True, order=True):
    """What sums are kept for: a kind of agent of a project in one hour, counted from 1970."""

    hour: int
    project: str
    agent: str


class Thing(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a sandbox or a lease.

    Attributes:
        last: the highest number that was counted.
        holes: numbers below it that were not.
        ended: whether the last segment was seen.
        unmeasured: where the last one was counted, if its amounts were not known.
    """

    last: int = 0
    holes: tuple[int, ...] = ()
    ended: bool = False
    unmeasured: Bucket | None = None


class Bills:
    """Sums of everything that was held and used."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._sums: dict[Bucket, Amounts] = {}
        self._open: dict[str, Thing] = {}
        self._ended: OrderedDict[str, Thing] = OrderedDict()
        self._changed_sums: set[Bucket] = set()
        self._changed_things: set[str] = set()
        self._forgotten: set[str] = set()

    # --- What comes in ------------------------------------------------------------------------

    def load(self, sums: Iterable[tuple[Bucket, Amounts]], things: dict[str, Thing]) -> None:
        """Begin with what an earlier life knew."""
        self._sums.update(sums)
        for name, thing in things.items():
            self._place(name, thing)

    def segment(self, record: MeterRecord) -> bool:
        """Count a segment; false when it was counted before."""
        name = f"{type(record).__name__}|{record.thing}"
        thing = self._open.get(name) or self._ended.get(name) or Thing()
        bucket = Bucket(record.to_ms // HOUR_MS, record.project, record.agent)
        is_known = record.number <= thing.last and record.number not in thing.holes
        if is_known:
            if thing.unmeasured is None or record.number != thing.last or not _measured(record):
                return False
            # The same piece of time, now with its amounts.
            self._add(thing.unmeasured, _amounts(record, time=False), unmeasured=-1)
            self._note(name, msgspec.structs.replace(thing, unmeasured=None))
            return True
        holes = tuple(number for number in thing.holes if number != record.number)
        if record.number > thing.last + 1:
            holes += tuple(range(thing.last + 1, record.number))
        unmeasured = None if _measured(record) else bucket
        self._add(bucket, _amounts(record, time=True), unmeasured=int(unmeasured is not None))
        is_newest = record.number > thing.last
        self._note(
            name,
            Thing(
                last=max(thing.last, record.number),
                holes=holes[-1000:],
                ended=thing.ended or record.last,
                unmeasured=unmeasured if is_newest else thing.unmeasured,
            ),
        )
        return True

    def step(self, record: BehaviorLog) -> None:
        """Count a step of a sandbox."""
        if record.action not in _COUNTED_ACTIONS and not record.tokens_in and not record.tokens_out:
            return
        size = record.attributes.get("size_bytes", "")
        size_bytes = int(size) if size.isdecimal() and len(size) < 19 else 0  # noqa: PLR2004  an int64
        amounts = Amounts(
            execs=int(record.action == "exec"),
            tokens_in=record.tokens_in,
            tokens_out=record.tokens_out,
            bytes_read=size_bytes if record.action == "read_file" else 0,
            bytes_written=size_bytes if record.action == "write_file" else 0,
        )
        if amounts == _NOTHING:
            return
        agent = "" if record.agent == "sandbox" else record.agent
        hour = record.time_us // (HOUR_MS * 1000)
        self._add(Bucket(hour, record.project or DEFAULT_PROJECT, agent), amounts)

    def forget_before(self, hour: int) -> list[Bucket]:
        """Drop the sums of hours before this one; return them."""
        old = [bucket for bucket in self._sums if bucket.hour < hour]
        for bucket in old:
            del self._sums[bucket]
            self._changed_sums.discard(bucket)
        return old

    def _add(self, bucket: Bucket, amounts: Amounts, *, unmeasured: int = 0) -> None:
        if unmeasured:
            amounts = msgspec.structs.replace(amounts, unmeasured=unmeasured)
        self._sums[bucket] = self._sums.get(bucket, _NOTHING).plus(amounts)
        self._changed_sums.add(bucket)

    def _note(self, name: str, thing: Thing) -> None:
        self._place(name, thing)
        self._changed_things.add(name)

    def _place(self, name: str, thing: Thing) -> None:
        if not thing.ended or thing.holes:
            self._open[name] = thing
            return
        self._open.pop(name, None)
        self._ended[name] = thing
        self._ended.move_to_end(name)
        if len(self._ended) > ENDED_KEPT:
            oldest, _ = self._ended.popitem(last=False)
            self._changed_things.discard(oldest)
            self._forgotten.add(oldest)

    # --- What is kept -------------------------------------------------------------------------

    def take_changes(
        self,
    ) -> tuple[dict[Bucket, Amounts], dict[str, Thing], set[str]]:
        """Return what changed since the last call: sums, things, and things to be dropped."""
        sums = {bucket: self._sums[bucket] for bucket in self._changed_sums}
        things = {name: self._open.get(name) or self._ended[name] for name in self._changed_things}
        forgotten, self._forgotten = self._forgotten, set()
        self._changed_sums.clear()
        self._changed_things.clear()
        return sums, things, forgotten

    # --- What is asked ------------------------------------------------------------------------

    def rows(
        self, project: str, first_hour: int, last_hour: int, *, by_agent: bool
    ) -> tuple[CostRow, ...]:
        """Return the sums of hours ``first_hour`` to ``last_hour``, both of them in it.

        Args:
            project: whose.
            first_hour: counted from 1970.
            last_hour: same.
            by_agent: whether each kind of agent has a row.
        """
        found: dict[str, Amounts] = {}
        for bucket, amounts in self._sums.items():
            if bucket.project == project and first_hour <= bucket.hour <= last_hour:
                agent = bucket.agent if by_agent else ""
                found[agent] = found.get(agent, _NOTHING).plus(amounts)
        return tuple(
            CostRow(project=project, agent=agent, amounts=amounts)
            for agent, amounts in sorted(found.items())
        )

    @property
    def missing(self) -> int:
        """How many segments are known to be somewhere and were not counted."""
        return sum(len(thing.holes) for thing in self._open.values())


def _measured(record: MeterRecord) -> bool:
    return not isinstance(record, SandboxSegment) or record.measured


def _amounts(record: MeterRecord, *, time: bool) -> Amounts:
    if isinstance(record, SandboxSegment):
        return Amounts(
            sandboxes=int(record.last and time),
            sandbox_ms=record.lasted_ms if time else 0,
            cpu_us=record.cpu_us,
            memory_byte_ms=record.memory_byte_ms,
            gpu_memory_byte_ms=record.gpu_memory_byte_ms,
            gpu_memory_unknown_ms=record.gpu_memory_unknown_ms,
            cu_used_micro_ms=record.cu_used_micro_ms,
            cu_used_unknown_ms=record.cu_used_unknown_ms,
        )
    return Amounts(
        lease_ms=record.lasted_ms,
        cu_micro_ms=record.cu_micro_ms,
        cost_nano=record.cost_micro_per_hour * record.lasted_ms * 1000 // HOUR_MS,
    )
