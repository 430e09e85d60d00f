"""What a simulated cluster is asked for: a mix drawn from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from dsec_common.compute.model import COUNT_MAX, GpuDemand, ServiceClass
from dsec_common.compute.units import UNITS_MAX

WORKS_MAX: Final = 2_000_000
"""Sandboxes that one mix may ask for: some GiB of memory, and hours."""

_MOST: Final = 1e9

Amount = Annotated[float, msgspec.Meta(ge=0, le=_MOST)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=_MOST)]
Units = Annotated[float, msgspec.Meta(gt=0, le=COUNT_MAX * UNITS_MAX)]


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox that somebody will want.

    Attributes:
        at_s: when it is asked for, from the start of the trace.
        duration_s: how long it holds its units when it has all that it can use; with less it takes
            longer in proportion, as the same work is done.
    """

    name: str
    at_s: float
    duration_s: float
    demand: GpuDemand
    project: str = "default"
    service_class: ServiceClass = ServiceClass.STANDARD
    priority: int = 0

    @property
    def cu_seconds(self) -> float:
        """All of its work."""
        return self.demand.max_cu * self.duration_s


class Kind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of work in a mix.

    Attributes:
        share: of all that arrives, in relation to the other kinds.
        cu: from the least to the most Compute Units, evenly; or the sizes to choose from.
        sizes: sizes to choose from, instead of ``cu``.
        stretch: it can use so many times its units.
        minutes: the median of its durations; they are spread log-normally, by ``spread``.
        projects: who sends it, evenly.
    """

    name: str
    share: Positive
    cu: tuple[Units, Units] = (10.0, 10.0)
    sizes: tuple[Units, ...] = ()
    stretch: Annotated[float, msgspec.Meta(ge=1, le=1e6)] = 1.0
    count: Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)] = 0
    same_island: bool = False
    models: tuple[str, ...] = ()
    minutes: Positive = 10.0
    spread: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.5
    projects: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ("default",)
    service_class: ServiceClass = ServiceClass.STANDARD
    priority: int = 0


class Surge(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """More of some kinds for a while, on top of a mix.

    Attributes:
        times: so many times as much of them arrives.
        kinds: names; empty for all.
    """

    from_hour: Amount
    until_hour: Positive
    times: Annotated[float, msgspec.Meta(ge=1, le=1e6)]
    kinds: tuple[str, ...] = ()


class Mix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arrivals at random moments (a Poisson process), its rate swinging over the day.

    Attributes:
        hours: how long work arrives.
        load: the units that the work needs on average, as a part of the cluster's; a surge comes
            on top.
        swing: how far the rate goes above and below its average within a day, 0 to 1.
    """

    kinds: Annotated[tuple[Kind, ...], msgspec.Meta(min_length=1)]
    hours: Positive = 8.0
    load: Positive = 0.9
    swing: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    surge: Surge | None = None
    seed: int = 1


def draw(mix: Mix, total_cu: float) -> list[Work]:
    """Return the work of a mix for a cluster of so many units; the same for the same seed.

    Raises:
        ValueError: it would be more than :data:`WORKS_MAX`.
    """
    source = random.Random(mix.seed)  # noqa: S311  it must be repeatable
    shares = [kind.share for kind in mix.kinds]
    sample = [_draw_one(source, mix.kinds, shares, "", 0.0) for _ in range(4000)]
    mean = math.fsum(work.demand.max_cu * work.duration_s for work in sample) / len(sample)
    rate = mix.load * total_cu / mean
    surging = _surging(mix)
    peak = math.fsum(surging) / math.fsum(shares)
    expected = rate * (mix.hours + _surge_hours(mix) * (peak - 1)) * 3600
    if not expected <= WORKS_MAX:
        raise ValueError(
            f"the mix asks for about {expected:.3g} sandboxes; at most {WORKS_MAX} are simulated: "
            "use fewer hours, less load, or longer work"
        )
    found: list[Work] = []
    at_s = 0.0
    while True:
        # Thinning: candidates at the highest rate, each kept with the moment's part of it.
        at_s += source.expovariate(rate * (1 + mix.swing) * peak)
        if at_s >= mix.hours * 3600:
            return found
        surges = mix.surge and mix.surge.from_hour <= at_s / 3600 < mix.surge.until_hour
        now = (1 + mix.swing * math.sin(2 * math.pi * at_s / 86400)) * (peak if surges else 1)
        if source.random() * (1 + mix.swing) * peak < now:
            parts = surging if surges else shares
            found.append(_draw_one(source, mix.kinds, parts, f"w{len(found)}", at_s))


def _surging(mix: Mix) -> list[float]:
    """Return the shares of the kinds in a surge."""
    surge = mix.surge
    return [
        kind.share * (surge.times if surge and (not surge.kinds or kind.name in surge.kinds) else 1)
        for kind in mix.kinds
    ]


def _surge_hours(mix: Mix) -> float:
    surge = mix.surge
    return max(0.0, min(surge.until_hour, mix.hours) - surge.from_hour) if surge else 0.0


def _draw_one(
    source: random.Random, kinds: Sequence[Kind], shares: Sequence[float], name: str, at_s: float
) -> Work:
    (kind,) = source.choices(kinds, shares)
    cu = source.choice(kind.sizes) if kind.sizes else source.uniform(*kind.cu)
    duration_s = 60 * kind.minutes * math.exp(kind.spread * source.gauss(0, 1))
    demand = GpuDemand(
        min_cu=cu,
        max_cu=cu * kind.stretch,
        count=kind.count,
        same_island=kind.same_island,
        models=kind.models,
    )
    return Work(
        name=name,
        at_s=at_s,
        duration_s=duration_s,
        demand=demand,
        project=source.choice(kind.projects),
        service_class=kind.service_class,
        priority=kind.priority,
    )
