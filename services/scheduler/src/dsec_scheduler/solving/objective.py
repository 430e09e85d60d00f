"""What is minimised: money, fragmentation, and the price of leaving a request waiting.

For a request ``r`` on slices ``s`` that take the fraction ``f`` of their cards::

    money(r)    = sum over s of price(s) x CU(s) x duration(r)
    cost(r)     = money(r) x (1 + FRAGMENTATION x free fraction left on the cards of s)
    urgency(r)  = CLASS_WEIGHT x 2^priority x (1 + waited / SLA) / share of its project
    waiting(r)  = dearest cost(r) + urgency(r) x min CU(r) x K
    objective   = sum of cost over those placed + sum of waiting over those left

``K`` is the dearest price times the longest duration in the problem, and the dearest cost is that
of the kind of card, free or not, on which the request would cost most, rounded up as that card is
cut: whole, if it cannot be divided. So no request is left waiting to save money or room: placing it
costs less, whatever the card. It is a batch request itself that declines what is dear, as long as
its SLA leaves it the time: it takes no slices whose price exceeds ``limit(r)``, which grows from
the cheapest price in the cluster at first to the dearest one when ``PATIENCE`` of its SLA is over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from dsec_common.compute.model import ServiceClass
from dsec_scheduler.solving.problem import Waiting

#: How much dearer a place is when it leaves its whole card free (it cannot) than when none is left.
FRAGMENTATION: Final = 0.1
#: How long a request of each class may wait, in seconds.
SLA_S: Final[Mapping[ServiceClass, float]] = {
    ServiceClass.REALTIME: 0.1,
    ServiceClass.STANDARD: 60.0,
    ServiceClass.BATCH: 4 * 3600.0,
}
#: How much a waiting unit of each class weighs.
CLASS_WEIGHT: Final[Mapping[ServiceClass, float]] = {
    ServiceClass.REALTIME: 100.0,
    ServiceClass.STANDARD: 10.0,
    ServiceClass.BATCH: 1.0,
}
#: The part of its SLA after which a batch request takes what there is.
PATIENCE: Final = 0.5
#: Longer ones count as so long: one request that never ends must not drown all others' prices.
LONGEST_S: Final = 24 * 3600.0
_PRIORITY_MAX: Final = 16
_SHARE_MIN: Final = 0.05
_SECONDS_PER_HOUR: Final = 3600.0


def urgency(waiting: Waiting) -> float:
    """Return how much a unit of it weighs; it grows without end, so that nothing starves."""
    priority = max(-_PRIORITY_MAX, min(_PRIORITY_MAX, waiting.priority))
    ageing = 1 + waiting.waited_s / SLA_S[waiting.service_class]
    weight = CLASS_WEIGHT[waiting.service_class] * math.exp2(priority)
    return weight * ageing / max(waiting.share, _SHARE_MIN)


def price_limit(
    service_class: ServiceClass, waited_s: float, cheapest: float, dearest: float
) -> float:
    """Return the most that is paid for a unit and hour; ``inf`` for who does not look at it."""
    patience_s = PATIENCE * SLA_S[service_class]
    if service_class is not ServiceClass.BATCH or waited_s >= patience_s:
        return math.inf
    return cheapest + (dearest - cheapest) * waited_s / patience_s


def hours(waiting: Waiting) -> float:
    """Return for how many hours its units are counted."""
    return min(waiting.duration_s, LONGEST_S) / _SECONDS_PER_HOUR
