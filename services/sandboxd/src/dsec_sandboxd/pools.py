"""The core of warm pools: what is wanted, what waits, what is being made. No I/O.

A sandbox waits under a handle, in the pool of its kind, until it is taken, lost or dropped; it is
taken once. How many are wanted comes from two sides, of which the larger counts: what the scheduler
says, and for function calls what their rate asks for (:func:`size_for_rate`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from dsec_common.wire.sandbox import CpuClass, Limits
from dsec_sandboxd.records import SandboxRecord

#: A pool whose sandboxes cannot be made waits this long, doubled each time.
RETRY_FIRST_S: Final = 0.5
RETRY_LONGEST_S: Final = 30.0
#: An arrival counts for this long, on average.
RATE_MEMORY_S: Final = 30.0
#: A pool of calls is given up when not one is expected in so many seconds.
_RATE_FORGOTTEN_S: Final = 300.0
#: How many standard deviations above the mean arrivals of one refill the pool is to cover.
_SAFETY: Final = 3.0


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """What sandboxes must have in common for one to stand in for another."""

    project: str
    digests: tuple[str, ...]
    cpu_class: CpuClass = CpuClass.LATENCY_SENSITIVE
    core_scheduling: bool = False
    oom_group: bool = False
    cpu_quota: bool = False


def kind_of(project: str, digests: tuple[str, ...], limits: Limits) -> Kind:
    """Return the kind of a sandbox with these layers and limits."""
    return Kind(
        project=project,
        digests=digests,
        cpu_class=limits.cpu_class,
        core_scheduling=limits.core_scheduling,
        oom_group=limits.oom_group,
        cpu_quota=limits.cpu_quota,
    )


def kind_of_record(record: SandboxRecord) -> Kind | None:
    """Return the kind that a sandbox could come from.

    None when it has a snapshot's files, or a GPU, which those that wait have not.
    """
    if record.snapshot_layers or record.slices:
        return None
    return kind_of(record.project, record.layer_digests, record.limits)


class Rate:
    """Arrivals a second, of which those long ago count less and less.

    An exponentially weighted count: each arrival adds ``1 / RATE_MEMORY_S`` and what there was
    shrinks by ``e`` in that time. It rises within a few seconds and is halved after 21 s of quiet.
    """

    def __init__(self) -> None:
        self._per_s = 0.0
        self._at_s = 0.0

    def count(self, now_s: float, arrivals: int = 1) -> None:
        """Count arrivals at a moment of a clock that never goes backwards."""
        self._per_s = self.per_s(now_s) + arrivals / RATE_MEMORY_S
        self._at_s = now_s

    def per_s(self, now_s: float) -> float:
        """Return the rate as of now."""
        return self._per_s * math.exp(-max(now_s - self._at_s, 0.0) / RATE_MEMORY_S)


def size_for_rate(rate_per_s: float, refill_s: float, ceiling: int) -> int:
    """Return how many sandboxes to have ready for calls that arrive at random at this rate.

    While one is replaced, ``rate * refill`` others are taken on average; the pool covers that and
    three standard deviations more of it (arrivals at random: its root), and one to begin with. No
    call in five minutes expected: none. Never more than ``ceiling``.
    """
    if rate_per_s * _RATE_FORGOTTEN_S < 1.0:
        return 0
    taken = rate_per_s * max(refill_s, 0.0)
    return min(1 + math.ceil(taken + _SAFETY * math.sqrt(taken)), ceiling)


@dataclass(slots=True)
class Pool:
    """The sandboxes of one kind. ``asked`` comes from the scheduler, ``adaptive`` from calls."""

    limits: Limits = field(default_factory=Limits)
    asked: int = 0
    adaptive: int = 0
    ready: deque[str] = field(default_factory=deque)
    making: int = 0
    failures: int = 0
    retry_at_s: float = 0.0
    error: str = ""

    @property
    def wanted(self) -> int:
        """How many are to be ready."""
        return max(self.asked, self.adaptive)

    @property
    def missing(self) -> int:
        """How many are neither ready nor being made."""
        return self.wanted - len(self.ready) - self.making


class Pools:
    """All pools of a node. Whatever is returned to be dropped is no longer known here."""

    def __init__(self) -> None:
        self._pools: dict[Kind, Pool] = {}
        self._kind_of: dict[str, Kind] = {}

    # --- Looking ------------------------------------------------------------------------------

    def find(self, kind: Kind) -> Pool | None:
        """Return the pool of a kind, if any is wanted or there."""
        return self._pools.get(kind)

    def ready(self, kind: Kind) -> int:
        """Return how many of a kind wait."""
        pool = self._pools.get(kind)
        return len(pool.ready) if pool else 0

    def knows(self, handle: str) -> bool:
        """Return whether a sandbox waits under this handle."""
        return handle in self._kind_of

    def limits(self) -> Iterable[tuple[Limits, int]]:
        """Return what sandboxes that wait or are being made were given, and how many of them."""
        return [(pool.limits, len(pool.ready) + pool.making) for pool in self._pools.values()]

    @property
    def held(self) -> int:
        """How many wait or are being made."""
        return sum(len(pool.ready) + pool.making for pool in self._pools.values())

    @property
    def fullness(self) -> float:
        """Which share of what is wanted waits, in the emptiest pool; 1 without any."""
        shares = (len(pool.ready) / pool.wanted for pool in self._pools.values() if pool.wanted)
        return min(shares, default=1.0)

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._kind_of)

    # --- What is wanted -----------------------------------------------------------------------

    def ask(self, wishes: Mapping[Kind, tuple[int, Limits]]) -> list[str]:
        """Take what the scheduler wants, all of it; return the handles of what is too much."""
        for kind, pool in self._pools.items():
            if kind not in wishes:
                pool.asked = 0
        for kind, (size, limits) in wishes.items():
            pool = self._pools.setdefault(kind, Pool())
            pool.asked, pool.limits = size, limits
        return self._surplus()

    def adapt(self, sizes: Mapping[Kind, tuple[int, Limits]]) -> list[str]:
        """Take what calls want, all of it; return the handles of what is too much."""
        for kind, pool in self._pools.items():
            if kind not in sizes:
                pool.adaptive = 0
        for kind, (size, limits) in sizes.items():
            pool = self._pools.setdefault(kind, Pool())
            pool.adaptive = size
            if not pool.asked:
                pool.limits = limits
        return self._surplus()

    def _surplus(self) -> list[str]:
        dropped = []
        for kind, pool in list(self._pools.items()):
            while len(pool.ready) > pool.wanted:
                dropped.append(self._pop(pool))
            if not pool.wanted and not pool.making and not pool.ready:
                del self._pools[kind]
        return dropped

    # --- Making -------------------------------------------------------------------------------

    def begin(self, now_s: float) -> Kind | None:
        """Return the kind to make one of now, the emptiest first; None when nothing is to do.

        :meth:`made` or :meth:`not_made` must follow.
        """
        lacking = [
            (len(pool.ready) / pool.wanted, index, kind, pool)
            for index, (kind, pool) in enumerate(self._pools.items())
            if pool.missing > 0 and pool.retry_at_s <= now_s
        ]
        if not lacking:
            return None
        _, _, kind, pool = min(lacking, key=lambda lack: lack[:2])
        pool.making += 1
        return kind

    def made(self, kind: Kind, handle: str) -> bool:
        """Take in one that was made; return False when it is to be dropped after all."""
        pool = self._pools[kind]
        pool.making -= 1
        pool.failures, pool.retry_at_s, pool.error = 0, 0.0, ""
        if len(pool.ready) >= pool.wanted:
            self._surplus()
            return False
        pool.ready.append(handle)
        self._kind_of[handle] = kind
        return True

    def not_made(self, kind: Kind, now_s: float, error: str) -> None:
        """Note that one could not be made; the next attempt waits a while.

        Longer each time, unless ``error`` is empty: then there was merely no room.
        """
        pool = self._pools[kind]
        pool.making -= 1
        pool.retry_at_s = now_s + min(RETRY_FIRST_S * 2**pool.failures, RETRY_LONGEST_S)
        if error:
            pool.failures = min(pool.failures + 1, 16)
        pool.error = error
        self._surplus()

    # --- Giving away --------------------------------------------------------------------------

    def take(self, kind: Kind) -> str | None:
        """Return the handle of one that has waited longest, which is the caller's now, or None."""
        pool = self._pools.get(kind)
        return self._pop(pool) if pool and pool.ready else None

    def put_back(self, kind: Kind, handle: str) -> bool:
        """Have one that was taken wait again, the first; return False when it is to be dropped."""
        pool = self._pools.get(kind)
        if pool is None or len(pool.ready) >= pool.wanted:
            return False
        pool.ready.appendleft(handle)
        self._kind_of[handle] = kind
        return True

    def lost(self, handle: str) -> bool:
        """Forget one that has ended by itself; return whether it was waiting here."""
        kind = self._kind_of.pop(handle, None)
        if kind is None:
            return False
        self._pools[kind].ready.remove(handle)
        self._surplus()
        return True

    def give_way(self, count: int) -> list[str]:
        """Return the handles of so many that have to make room, of the fullest pools."""
        dropped: list[str] = []
        while len(dropped) < count:
            pool = max(self._pools.values(), key=lambda pool: len(pool.ready), default=None)
            if pool is None or not pool.ready:
                break
            dropped.append(self._pop(pool))
        return dropped

    def _pop(self, pool: Pool) -> str:
        handle = pool.ready.popleft()
        del self._kind_of[handle]
        return handle

    def validate_state(self) -> None:
        """Return if every invariant holds; tests call it after each step.

        Raises:
            AssertionError: naming the invariant.
        """
        waiting = [handle for pool in self._pools.values() for handle in pool.ready]
        assert len(set(waiting)) == len(waiting), "a handle waits twice"  # noqa: S101  invariant
        assert set(waiting) == set(self._kind_of), "handles and pools differ"  # noqa: S101  invariant
        for pool in self._pools.values():
            assert len(pool.ready) <= pool.wanted, "more wait than wanted"  # noqa: S101  invariant
            assert pool.making >= 0, "more were made than begun"  # noqa: S101  invariant
