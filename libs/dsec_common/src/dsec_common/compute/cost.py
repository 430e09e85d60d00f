"""Cost: the cheapest units that keep the promise.

    minimise sum(cost_per_CU x CU_i x duration_i) under each class's SLA

An A100's unit costs 1.8 times an L40's, so work that can run on either goes to the L40 for as long
as it can start there in time. Prices are per unit and hour, in the currency of the price table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, NamedTuple

_SECONDS_PER_HOUR: Final = 3600.0


class Offer(NamedTuple):
    """One way to serve a request.

    Attributes:
        name: which way; of equal ones the first by name is taken.
        cu: the units that it takes.
        cost_per_cu_hour: the price of one unit for an hour.
        wait_s: until it could begin.
        duration_s: how long it would hold the units.
    """

    name: str
    cu: float
    cost_per_cu_hour: float
    wait_s: float = 0.0
    duration_s: float = _SECONDS_PER_HOUR

    @property
    def cost(self) -> float:
        """The price of the whole: cost per unit x units x duration."""
        return self.cost_per_cu_hour * self.cu * self.duration_s / _SECONDS_PER_HOUR


def total_cost(taken: Iterable[Offer]) -> float:
    """Return the sum that is minimised, exactly rounded whatever the order."""
    return math.fsum(offer.cost for offer in taken)


def cheapest(offers: Iterable[Offer], sla_s: float = math.inf) -> Offer | None:
    """Return the cheapest offer that can begin within ``sla_s``, or None when none can.

    Requests are independent once what is free has been shared out among them, so the sum is least
    when each is. Of equally cheap offers the one that begins first, then the first by name.
    """
    in_time = (offer for offer in offers if offer.wait_s <= sla_s)
    return min(in_time, key=lambda offer: (offer.cost, offer.wait_s, offer.name), default=None)
