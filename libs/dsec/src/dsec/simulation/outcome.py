"""What comes of a simulation: who held what and when, and the cluster after each change."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dsec.simulation.work import Work
from dsec_common.compute.model import Slice


@dataclass(frozen=True, slots=True)
class Share:
    """Slices that were held from a moment on."""

    since_s: float
    slices: tuple[Slice, ...]

    @property
    def cu(self) -> float:
        """What they are worth."""
        return math.fsum(it.cu for it in self.slices)


@dataclass(slots=True)
class Served:
    """A piece of work that got its units, and when.

    Attributes:
        shares: what it held, one after the other; the last until ``ended_s``.
        ended_s: when it is done, as things are; a lost node ends it before that.
        left_cu_s: of its work, when the last share began.
    """

    work: Work
    node: str
    shares: list[Share]
    ended_s: float
    left_cu_s: float

    @classmethod
    def begun(cls, work: Work, node: str, slices: tuple[Slice, ...], now_s: float) -> Served:
        """Return the work with all of it left to do, on its first slices."""
        served = cls(work, node, [Share(now_s, slices)], 0.0, work.cu_seconds)
        served.ended_s = now_s + work.cu_seconds / served.useful_cu
        return served

    @property
    def started_s(self) -> float:
        """When it was granted."""
        return self.shares[0].since_s

    @property
    def wait_s(self) -> float:
        """From being asked for to the grant."""
        return self.started_s - self.work.at_s

    @property
    def slices(self) -> tuple[Slice, ...]:
        """What it held last."""
        return self.shares[-1].slices

    @property
    def held_cu(self) -> float:
        """Units that it held last."""
        return self.shares[-1].cu

    @property
    def useful_cu(self) -> float:
        """Units that it can use of those."""
        return self._useful(self.shares[-1])

    def _useful(self, share: Share) -> float:
        return min(share.cu, self.work.demand.max_cu)

    def resize(self, slices: tuple[Slice, ...], now_s: float) -> None:
        """Have it go on with other slices: what is left takes longer with fewer units."""
        done = self.useful_cu * (now_s - self.shares[-1].since_s)
        self.left_cu_s = max(0.0, self.left_cu_s - done)
        self.shares.append(Share(now_s, slices))
        self.ended_s = now_s + self.left_cu_s / self.useful_cu

    def useful_cu_s(self, until_s: float) -> float:
        """Return the work that was done by then."""
        ends = [*(share.since_s for share in self.shares[1:]), self.ended_s]
        return math.fsum(
            self._useful(share) * max(0.0, min(end, until_s) - share.since_s)
            for share, end in zip(self.shares, ends, strict=True)
        )

    def cost(self, price: dict[str, float], until_s: float) -> float:
        """Return the price of what it held until then, by each card's price of a unit and hour."""
        ends = [*(share.since_s for share in self.shares[1:]), until_s]
        return math.fsum(
            price[it.card] * it.cu * ((end - share.since_s) / 3600)
            for share, end in zip(self.shares, ends, strict=True)
            for it in share.slices
        )


@dataclass(slots=True)
class Moves:
    """What the elastic engine did.

    Attributes:
        shrinks, recoveries: how often a lease got fewer units, or more.
        ordered, given_up: nodes of the provider.
        elastic_cu: units that leases held beyond what was promised to them, after each change.
        nodes: of the provider that were there, after each change.
    """

    shrinks: int = 0
    recoveries: int = 0
    ordered: int = 0
    given_up: int = 0
    elastic_cu: list[float] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Outcome:
    """What came of a simulation.

    Attributes:
        served: in the order of their starts; work that a lost node broke off is there once more.
        left: never granted.
        times_s, useful_cu, held_cu, total_cu, waiting: after each change.
        cost: price x CU x hours of all that was held.
        moves: None where there was no elastic engine.
    """

    served: list[Served] = field(default_factory=list)
    left: list[Work] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    useful_cu: list[float] = field(default_factory=list)
    held_cu: list[float] = field(default_factory=list)
    total_cu: list[float] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    cost: float = 0.0
    moves: Moves | None = None
