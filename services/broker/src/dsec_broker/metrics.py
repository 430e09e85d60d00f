"""What the broker counts."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge

NODES: Final = Gauge("dsec_broker_nodes", "Nodes known to the broker", ["ready"])
CU_TOTAL: Final = Gauge("dsec_broker_cu_total", "Compute Units of all nodes")
CU_ALLOCATED: Final = Gauge("dsec_broker_cu_allocated", "Compute Units under lease")
REQUESTS: Final = Counter(
    "dsec_broker_lease_requests_total", "Requests about leases", ["verb", "outcome"]
)
WRITES: Final = Counter(
    "dsec_broker_record_writes_total", "Writes of node records by what became of them", ["outcome"]
)
BROKEN: Final = Counter(
    "dsec_broker_conservation_broken_total",
    "Written records in which allocated and free units do not add up; any is an alarm",
)
UNLOCKED: Final = Counter("dsec_broker_leases_unlocked_total", "Leases ended by force")
RESIZES: Final = Counter("dsec_broker_resizes_total", "Leases told to shrink or grow for balance")
ORDERS: Final = Counter(
    "dsec_broker_node_orders_total", "Orders to the node provider by outcome", ["outcome"]
)
