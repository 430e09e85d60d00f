"""The constants of the elastic engine, as part of what the broker is told."""

from __future__ import annotations

import math

import msgspec

from dsec_common.compute.conservation import (
    BURST_FACTOR,
    RECOVERY_FACTOR,
    UTILISATION_FACTOR,
)
from dsec_common.config import ServiceConfig


class ElasticConfig(ServiceConfig, frozen=True, kw_only=True):
    """Settings of elasticity.

    Attributes:
        utilisation_factor: the part of all units that may be handed out before leases shrink, the
            least important first, and nodes are asked for.
        recovery_factor: the part of all units up to which shrunk leases grow back, and below which
            the cluster must be without a node that is given up.
        burst_factor: the use of the cluster's own units above which new work goes to nodes with
            the label ``capacity=burst`` and those of a node provider first, real-time work last.
        prices: cost of a Compute Unit for an hour by GPU model, before those of ``nodes_file`` and
            the built-in ones; a grant on any node takes the cheapest that can give it.
        elastic_interval_s: after a change, the cluster is looked at again so soon.
        elastic_lease_s: the broker that balances the cluster may be silent for so long before
            another does.
        node_provider: where further nodes come from; empty for nowhere.
        node_provider_settings: the provider's own settings.
        node_provider_cu: Compute Units that one of its nodes brings.
        node_provider_min: so many of its nodes always run.
        node_provider_max: so many at most.
        node_idle_s: one without sandboxes and leases for so long may be given up.
    """

    utilisation_factor: float = UTILISATION_FACTOR
    recovery_factor: float = RECOVERY_FACTOR
    burst_factor: float = BURST_FACTOR
    prices: dict[str, float] = msgspec.field(default_factory=dict)
    elastic_interval_s: float = 0.2
    elastic_lease_s: float = 5.0
    node_provider: str = ""
    node_provider_settings: dict[str, str] = msgspec.field(default_factory=dict)
    node_provider_cu: float = 100.0
    node_provider_min: int = 0
    node_provider_max: int = 8
    node_idle_s: float = 300.0

    def __post_init__(self) -> None:
        """Refuse values that nothing could be balanced with."""
        if not 0 < self.recovery_factor <= self.utilisation_factor <= 1:
            raise ValueError("it must be that 0 < recovery_factor <= utilisation_factor <= 1")
        if not 0 <= self.burst_factor <= 1:
            raise ValueError("burst_factor must be between 0 and 1")
        for model, price in self.prices.items():
            if not 0 <= price < math.inf:
                raise ValueError(f"prices[{model!r}] must be a number, 0 or more")
        for name in ("elastic_interval_s", "elastic_lease_s", "node_provider_cu", "node_idle_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be more than 0")
        if not 0 <= self.node_provider_min <= self.node_provider_max:
            raise ValueError("it must be that 0 <= node_provider_min <= node_provider_max")
