"""What the broker is told."""

from __future__ import annotations

import math

import msgspec

from dsec_common.config import ServiceConfig


class BrokerConfig(ServiceConfig, frozen=True, kw_only=True):
    """The broker: inventory of nodes, leases on Compute Units.

    Attributes:
        node_timeout_s: a node is ready while its last heartbeat is younger than this.
        node_forget_s: a silent node without leases is forgotten after this long.
        lease_ttl_s: what a heartbeat that names a lease prolongs it to.
        lease_ttl_max_s: the longest life that a grant or a renewal may ask for.
        sweep_interval_s: how often ended leases and forgotten nodes are looked for.
        cu_table: Compute Units by GPU model, added to the built-in table (A100, L40, V100).
        replicas: how many NATS servers keep the node records.
    """

    node_timeout_s: float = 3.0
    node_forget_s: float = 86_400.0
    lease_ttl_s: float = 1800.0
    lease_ttl_max_s: float = 86_400.0
    sweep_interval_s: float = 1.0
    cu_table: dict[str, float] = msgspec.field(default_factory=dict)
    replicas: int = 1

    def __post_init__(self) -> None:
        """Refuse values that no broker could work with."""
        for name in (
            "node_timeout_s",
            "node_forget_s",
            "lease_ttl_s",
            "lease_ttl_max_s",
            "sweep_interval_s",
        ):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a positive number of seconds")
        for model, units in self.cu_table.items():
            if not model.strip() or not 0 <= units < math.inf:
                raise ValueError(f"cu_table[{model!r}] must be a number of units, 0 or more")
