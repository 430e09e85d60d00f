"""What Prometheus reads of a node."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

_SECONDS: Final = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 60.0)

SANDBOXES_ALIVE: Final = Gauge("dsec_sandboxd_sandboxes_alive", "Sandboxes that are not over")
CREATES: Final = Counter(
    "dsec_sandboxd_creates_total", "Placements by outcome: created or an error's code", ["outcome"]
)
CREATE_SECONDS: Final = Histogram(
    "dsec_sandboxd_create_seconds", "From the placement to a running sandbox", buckets=_SECONDS
)
EXEC_SECONDS: Final = Histogram(
    "dsec_sandboxd_exec_seconds", "From the request to a command's end", buckets=_SECONDS
)
ORPHANS: Final = Counter(
    "dsec_sandboxd_orphans_removed_total", "Things of nobody that were removed, by kind", ["kind"]
)
ENDS: Final = Counter("dsec_sandboxd_ends_total", "Sandboxes that ended, by cause", ["cause"])
LAYER_FETCHES: Final = Counter(
    "dsec_sandboxd_layer_fetches_total", "Images fetched from a remote layer store"
)
LAYER_EVICTIONS: Final = Counter(
    "dsec_sandboxd_layer_evictions_total", "Images that had to make room for others in the cache"
)
LAYER_CACHE_BYTES: Final = Gauge(
    "dsec_sandboxd_layer_cache_bytes", "Bytes of images of a remote layer store kept on this node"
)
SNAPSHOT_MEMORY_BYTES: Final = Gauge(
    "dsec_sandboxd_snapshot_memory_bytes", "Memory that copies of writable layers take"
)
SNAPSHOT_DISK_BYTES: Final = Gauge(
    "dsec_sandboxd_snapshot_disk_bytes", "Disk that durable snapshots take"
)
SNAPSHOTS_NOT_PACKED: Final = Counter(
    "dsec_sandboxd_snapshots_not_packed_total", "Snapshots that could not be made durable"
)
ACTIONS: Final = Counter(
    "dsec_sandboxd_actions_total", "Actions that ended, by how they did", ["outcome"]
)
WARM_READY: Final = Gauge("dsec_sandboxd_warm_ready", "Sandboxes made ahead of need that wait")
WARM_HAND_OUTS: Final = Counter(
    "dsec_sandboxd_warm_hand_outs_total",
    "Creations while there are pools: warm, cold, or dead for each that was thrown away",
    ["outcome"],
)
