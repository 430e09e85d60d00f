"""What the node's core must keep to, from its settings and from what the machine has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsec_common.wire.node import Resources
from dsec_sandboxd.admission import NodeRules

if TYPE_CHECKING:
    from dsec_sandboxd.config import SandboxdConfig
    from dsec_sandboxd.inventory import Inventory
    from dsec_sandboxd.kernel.interface import KernelFacts


def rules_of(config: SandboxdConfig, facts: KernelFacts, inventory: Inventory) -> NodeRules:
    """Return the rules of a node: never more sandboxes than its kernel part can hold."""
    sandboxes_max = min(config.sandboxes_max, facts.sandboxes_max)
    physical = inventory.physical(sandboxes_max)
    return NodeRules(
        node=config.node_name,
        physical=physical,
        capacity=Resources(
            cpus=physical.cpus * config.cpu_oversubscription,
            memory_bytes=int(physical.memory_bytes * config.memory_oversubscription),
            sandboxes=sandboxes_max,
        ),
        memory_reserve_bytes=config.memory_reserve_bytes,
        ended_kept_s=config.ended_kept_s,
        ended_kept_max=config.ended_kept_max,
    )
