"""The StateDB: versioned state with snapshots and rollbacks in RocksDB; see ``docs/statedb.md``."""

from dsec_common.statedb.changes import Changes
from dsec_common.statedb.checkpoints import repair, restore
from dsec_common.statedb.compaction import Compacted
from dsec_common.statedb.database import StateDB
from dsec_common.statedb.hot_keys import HotKey
from dsec_common.statedb.namespace import Namespace
from dsec_common.statedb.prefixes import KeyPrefix, shard_of
from dsec_common.statedb.reading import Difference, DiffPage, Entry, Page
from dsec_common.statedb.versions import version_at, version_ms

__all__ = [
    "Changes",
    "Compacted",
    "DiffPage",
    "Difference",
    "Entry",
    "HotKey",
    "KeyPrefix",
    "Namespace",
    "Page",
    "StateDB",
    "repair",
    "restore",
    "shard_of",
    "version_at",
    "version_ms",
]
