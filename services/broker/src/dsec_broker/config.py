"""What the broker is told."""

from __future__ import annotations

import math
from typing import Self

import msgspec

from dsec_broker.elastic_config import ElasticConfig
from dsec_common.compute.units import flaw_of_units
from dsec_common.nodes_file import NODES_FILE, read_nodes_file


class BrokerConfig(ElasticConfig, frozen=True, kw_only=True):
    """The broker: inventory of nodes, leases on Compute Units.

    Attributes:
        node_timeout_s: a node is ready while its last heartbeat is younger than this.
        node_forget_s: a silent node without leases is forgotten after this long.
        lease_ttl_s: what a heartbeat that names a lease prolongs it to.
        lease_ttl_max_s: the longest life that a grant or a renewal may ask for.
        clock_skew_s: how far the clocks of brokers may be apart: a lease counts as run out so much
            later, so that a broker whose clock is ahead takes nothing from its holder.
        sweep_interval_s: how often ended leases and forgotten nodes are tidied away.
        cu_table: Compute Units by GPU model, before those of ``nodes_file`` and the built-in ones.
        nodes_file: ``nodes.yaml``, of which brokers read units and prices.
        metering_interval_s: what a lease holds is told on ``dsec-metering`` at least so often, and
            when it changes or ends.
        replicas: how many NATS servers keep the node records.
    """

    node_timeout_s: float = 3.0
    node_forget_s: float = 86_400.0
    lease_ttl_s: float = 1800.0
    lease_ttl_max_s: float = 86_400.0
    clock_skew_s: float = 60.0
    sweep_interval_s: float = 10.0
    cu_table: dict[str, float] = msgspec.field(default_factory=dict)
    nodes_file: str = NODES_FILE
    metering_interval_s: float = 300.0
    replicas: int = 1

    @property
    def meters(self) -> bool:
        """Whether there is a log to tell of what leases hold."""
        return bool(self.kafka_bootstrap)

    def __post_init__(self) -> None:
        """Refuse values that no broker could work with."""
        ElasticConfig.__post_init__(self)
        for name in (
            "node_timeout_s",
            "node_forget_s",
            "lease_ttl_s",
            "lease_ttl_max_s",
            "sweep_interval_s",
            "metering_interval_s",
        ):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a positive number of seconds")
        if not 0 <= self.clock_skew_s < math.inf:
            raise ValueError("clock_skew_s must be a number of seconds, 0 or more")
        for model, units in self.cu_table.items():
            if flaw := flaw_of_units(model, units):
                raise ValueError(f"cu_table: {flaw}")

    def completed(self) -> Self:
        """Return the settings with units and prices of ``nodes_file`` behind their own."""
        file = read_nodes_file(self.nodes_file)
        return msgspec.structs.replace(
            self,
            cu_table={**file.cu_table, **self.cu_table},
            prices={**file.prices, **self.prices},
        )
