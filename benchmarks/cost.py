"""What the same work costs when it goes where it is cheapest, beside first fit, at the same SLA.

Two days on 20 A100 and 15 L40 (`examples/clusters/cost.yaml`): on average 0.3 of the units are
wanted, a third more by day and a third less by night; half of the requests, and two thirds of the
work, is batch with an SLA of four hours, the rest must begin within a minute. An A100's unit costs
1.8 times an L40's, so nothing can save more than 44.4 %. First fit gives the same slices, by the
broker's own arithmetic, of the first node that has room, nodes in the order in which the cluster
names them: A100 first. Since that order decides what it costs, the saving beside first fit with the
cheap nodes first is shown too. Each round has a seed of its own; medians of the rounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from benchmarks._cluster import reports_of, scenario_of
from benchmarks.report import Options, Reach, Report, median

if TYPE_CHECKING:
    from dsec.simulation.report import Report as Told

SAVED_MIN: Final = 0.37
SLA_MIN: Final = 0.999


async def run(options: Options) -> Report:
    """Simulate; ``count`` is the hours of arrivals."""
    saved, saved_cheap_first, in_sla, in_sla_first_fit, prices = [], [], [], [], []
    for seed in range(1, options.rounds + 1):
        scenario = scenario_of("cost", seed, options.count)
        told = reports_of(scenario)
        ours, first_fit = told["scheduler"], told["first-fit"]
        turned = msgspec.structs.replace(
            scenario, cluster=scenario.cluster[::-1], compare=("first-fit",)
        )
        cheap_first = reports_of(turned)["first-fit"]
        saved.append(1 - ours.cost / first_fit.cost)
        saved_cheap_first.append(1 - ours.cost / cheap_first.cost)
        in_sla.append(_in_sla(ours))
        in_sla_first_fit.append(_in_sla(first_fit))
        prices.append(ours.cost_per_cu_hour)
    return Report(
        name="cost",
        figures={
            "saved": median(saved),
            "saved_beside_cheap_nodes_first": median(saved_cheap_first),
            "price_per_cu_hour": median(prices),
            "in_sla": min(in_sla),
            "in_sla_first_fit": min(in_sla_first_fit),
        },
        reach=(
            Reach.at_least("saved", median(saved), SAVED_MIN),
            Reach.at_least("in_sla", min(in_sla), SLA_MIN),
        ),
    )


def _in_sla(told: Told) -> float:
    """Return the part of all requests, of the worst class, that began within its SLA."""
    return min(waits.in_sla for waits in told.waits.values())
