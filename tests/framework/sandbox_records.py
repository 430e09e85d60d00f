"""Records and rules of a node that exists only in a test."""

from __future__ import annotations

from typing import Any

import msgspec

from dsec_common.wire.node import Resources
from dsec_common.wire.sandbox import Limits, SandboxState
from dsec_sandboxd.admission import NodeRules
from dsec_sandboxd.records import SandboxRecord

MIB = 1024 * 1024


def node_rules(**changes: Any) -> NodeRules:
    """Return the rules of a small node."""
    rules = NodeRules(
        node="n1",
        physical=Resources(cpus=2.0, memory_bytes=1024 * MIB, sandboxes=4),
        capacity=Resources(cpus=4.0, memory_bytes=2048 * MIB, sandboxes=4),
        memory_reserve_bytes=100 * MIB,
        ended_kept_s=60.0,
        ended_kept_max=3,
    )
    return msgspec.structs.replace(rules, **changes)


def record(local: str = "s1", **changes: Any) -> SandboxRecord:
    """Return the record of a sandbox that is being made."""
    made = SandboxRecord(
        local=local,
        project="p",
        placement_id=f"place-{local}",
        request_id=f"request-{local}",
        state=SandboxState.CREATING,
        created_at=10.0,
        layer_references=("base@1",),
        layer_digests=("sha256:00",),
        limits=Limits(),
    )
    return msgspec.structs.replace(made, **changes)
