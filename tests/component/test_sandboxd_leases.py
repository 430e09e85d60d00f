"""Which leases a node's heartbeats name."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec_common.wire.sandbox import CreateSandbox, DeleteSandbox, SandboxDeleted
from refusals import refused
from sandboxd_node import NODE, NodeForTests, node_for_tests

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")


@pytest.fixture
async def node(tmp_path: Path, layers: Path) -> AsyncIterator[NodeForTests]:
    """Yield a node whose sandboxes come and go between two heartbeats."""
    async with node_for_tests(tmp_path, layers, heartbeat_interval_s=1.0) as running:
        yield running


def named(node: NodeForTests) -> list[str]:
    return [lease_id for beat in node.heartbeats for lease_id in beat.lease_ids]


async def test_a_lease_is_named_once_even_if_its_sandbox_is_over_before_a_heartbeat(
    node: NodeForTests,
) -> None:
    leases = [f"{NODE}.{number}" for number in range(5)]
    for lease_id in leases:
        created = await node.place(lease_id=lease_id)
        await node.ask(created.sandbox_id, "delete", DeleteSandbox(), SandboxDeleted)
    await node.until(lambda: set(named(node)) == set(leases))
    await node.until(lambda: not node.heartbeats[-1].lease_ids)


async def test_a_lease_whose_sandbox_was_refused_is_not_named(node: NodeForTests) -> None:
    await refused(node.place(CreateSandbox(base="nothing@1"), lease_id=f"{NODE}.refused"))
    before = len(node.heartbeats)
    await node.until(lambda: len(node.heartbeats) > before + 1)
    assert named(node) == []
