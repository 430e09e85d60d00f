"""A daemon, or its spawner, is killed around snapshots: sandboxes run on, nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.exec import ExecInfo, ExecState, StartExec
from dsec_common.wire.network import InspectNetwork, NetworkInfo, NetworkMode, NetworkPolicy
from dsec_common.wire.sandbox import MIB, CreateSandbox, InspectSandbox, Limits, SandboxInfo
from dsec_sandboxd.kernel.cgroups_layout import detect_layout
from dsec_sandboxd.making import Maker
from sandboxd_node import BASE, NODE, NodeForTests
from sandboxd_process import DaemonProcess, daemon_for_tests
from snapshot_node import Asker

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")

Both = tuple[DaemonProcess, NodeForTests]
LARGE = Limits(memory_bytes=900 * MIB, disk_bytes=800 * MIB)


@pytest.fixture
async def both(tmp_path: Path, layers: Path) -> AsyncIterator[Both]:
    async with daemon_for_tests(tmp_path, layers) as running:
        yield running


def frozen(sandbox_id: str) -> bool:
    local = sandbox_id.partition(".")[2]
    (found,) = Path("/sys/fs/cgroup").glob(f"*/dsec-{NODE}/{local}/cgroup.freeze")
    return found.read_text().strip() == "1"


async def begun(ask: Asker, sandbox_id: str) -> asyncio.Future[object]:
    """Begin a snapshot of something large; return it once the sandbox stands still."""
    await ask.shell(sandbox_id, "dd if=/dev/zero of=/tmp/big bs=1M count=600 2>/dev/null")
    taking: asyncio.Future[object] = asyncio.ensure_future(ask.take(sandbox_id))
    async with asyncio.timeout(10):
        while not frozen(sandbox_id):
            await asyncio.sleep(0.001)
    return taking


async def abandoned(taking: asyncio.Future[Any]) -> None:
    taking.cancel()
    with contextlib.suppress(asyncio.CancelledError, DsecError):
        await taking


async def test_kill_9_of_the_daemon_meanwhile_leaves_a_running_sandbox_and_nothing_else(
    both: Both,
) -> None:
    daemon, node = both
    ask = Asker(node)
    sandbox = (await node.place(CreateSandbox(base=BASE, limits=LARGE))).sandbox_id
    await ask.shell(sandbox, "mkdir /srv; echo kept > /srv/x")
    durable = await ask.take(sandbox, wait_durable_s=20.0)
    assert durable.durable
    taking = await begun(ask, sandbox)
    await daemon.kill()
    await abandoned(taking)
    async with asyncio.timeout(10):
        while frozen(sandbox):
            await asyncio.sleep(0.001)
    await daemon.start()
    assert await ask.tree(sandbox) == {"x": "kept"}
    (only,) = await ask.list()
    assert only.snapshot_id == durable.snapshot_id
    assert len([*node.config.snapshots_path.iterdir()]) == 1
    # The adopted sandbox is as good as any: it has its place in the tree, and snapshots work.
    await ask.shell(sandbox, "rm /tmp/big; echo more > /srv/y")
    again = await ask.take(sandbox)
    assert again.parent == durable.snapshot_id
    restored = await ask.restore(again.snapshot_id)
    assert await ask.tree(restored) == {"x": "kept", "y": "more"}


async def test_kill_9_of_the_spawner_meanwhile_is_told_and_the_sandbox_runs_on(both: Both) -> None:
    daemon, node = both
    ask = Asker(node)
    sandbox = (await node.place(CreateSandbox(base=BASE, limits=LARGE))).sandbox_id
    taking = await begun(ask, sandbox)
    os.kill(daemon.spawner_pid(), signal.SIGKILL)
    with pytest.raises(DsecError) as caught:
        await taking
    assert caught.value.code in {ErrorCode.UNAVAILABLE, ErrorCode.TIMEOUT}
    assert await ask.shell(sandbox, "echo runs") == "runs\n"
    assert await ask.list() == []
    await ask.shell(sandbox, "rm /tmp/big; mkdir /srv; echo 1 > /srv/x")
    restored = await ask.restore((await ask.take(sandbox)).snapshot_id)
    assert await ask.tree(restored) == {"x": "1"}


async def test_a_child_of_a_snapshot_is_adopted_and_what_it_stands_on_is_kept(both: Both) -> None:
    daemon, node = both
    ask = Asker(node)
    parent = (await node.place()).sandbox_id
    await ask.shell(parent, "mkdir /srv; echo 1 > /srv/x")
    taken = await ask.take(parent)
    await ask.inspect(taken.snapshot_id, 20.0)
    child = await ask.restore(taken.snapshot_id)
    await ask.roll_back(parent, taken.snapshot_id)
    await ask.drop(taken.snapshot_id)
    await daemon.kill()
    await daemon.start()
    for sandbox in (parent, child):
        assert await ask.tree(sandbox) == {"x": "1"}
        info = await node.ask(sandbox, "inspect", InspectSandbox(), SandboxInfo)
        assert info.end_cause is None
    await ask.shell(child, "echo 2 > /srv/y")
    again = await ask.take(child)
    assert again.depth == 2
    restored = await ask.restore(again.snapshot_id)
    assert await ask.tree(restored) == {"x": "1", "y": "2"}
    # This daemon has not mounted the layers below yet.
    await ask.roll_back(parent, again.snapshot_id)
    assert await ask.tree(parent) == {"x": "1", "y": "2"}


def cgroups_of(sandbox_id: str) -> set[str]:
    """Return the names of the directories that a sandbox has in the version 2 tree."""
    local = sandbox_id.partition(".")[2]
    node = detect_layout().unified / f"dsec-{NODE}"
    return {name for name in os.listdir(node) if name.startswith(local)}  # noqa: PTH208  short


async def put_back_while_killed(both: Both, after_s: float) -> str:
    """Kill the daemon at a moment of a rollback; return the number that the next one's files say.

    The snapshot has 1, and since then the sandbox has 2.
    """
    daemon, node = both
    ask = Asker(node)
    wide = CreateSandbox(base=BASE, network=NetworkPolicy(mode=NetworkMode.OPEN))
    sandbox = (await node.place(wide)).sandbox_id
    await ask.shell(sandbox, "mkdir /srv; echo 1 > /srv/x")
    taken = await ask.take(sandbox, wait_durable_s=20.0)
    await ask.shell(sandbox, "echo 2 > /srv/x; rm -f /srv/y")
    rolling = asyncio.ensure_future(ask.roll_back(sandbox, taken.snapshot_id))
    await asyncio.sleep(after_s)
    await daemon.kill()
    await abandoned(rolling)
    await daemon.start()
    # Whole, with all that is its own, whichever it is.
    (tree,) = (await ask.tree(sandbox)).items()
    assert tree[0] == "x"
    assert await ask.shell(sandbox, "grep -c eth0 /proc/net/dev") == "1\n"
    info = await node.ask(sandbox, "inspect_network", InspectNetwork(), NetworkInfo)
    assert info.policy.mode is NetworkMode.OPEN
    assert len(cgroups_of(sandbox)) == 1
    await ask.roll_back(sandbox, taken.snapshot_id)
    assert await ask.tree(sandbox) == {"x": "1"}
    await ask.delete(sandbox)
    return tree[1]


async def test_kill_9_at_any_moment_of_a_rollback_leaves_the_files_before_or_after_it(
    both: Both,
) -> None:
    chance = random.Random(5)  # noqa: S311  no secret
    found = set()
    for latest_s in (0.005, 0.01, 0.02, 0.04) * 2:
        found.add(await put_back_while_killed(both, chance.uniform(0.0, latest_s)))
    assert found <= {"1", "2"}


async def test_a_rollback_that_a_killed_daemon_had_begun_is_finished_by_the_next(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, node = both
    ask = Asker(node)
    await daemon.kill()
    service = node.make_service()
    await service.start()

    async def die(_self: Maker, _record: object, _heir: str) -> None:
        raise RuntimeError("killed here")

    wide = CreateSandbox(base=BASE, network=NetworkPolicy(mode=NetworkMode.OPEN))
    sandbox = (await node.place(wide)).sandbox_id
    await ask.shell(sandbox, "mkdir /srv; echo 1 > /srv/x")
    taken = await ask.take(sandbox, wait_durable_s=20.0)
    await ask.shell(sandbox, "echo 2 > /srv/x")
    begun = StartExec(argv=("sh", "-c", "echo ran > /srv/y; sleep 1000"))
    first = await node.ask(sandbox, "start_exec", begun, ExecInfo)
    with monkeypatch.context() as patched:
        patched.setattr(Maker, "_inherit", die)
        with pytest.raises(DsecError):
            await ask.roll_back(sandbox, taken.snapshot_id, message_id="one")
        service.fail(OSError("as if killed"))
        await service.stop()
    await daemon.start()
    assert await ask.tree(sandbox) == {"x": "1"}
    assert await ask.shell(sandbox, "grep -c eth0 /proc/net/dev") == "1\n"
    assert len(cgroups_of(sandbox)) == 1
    # What was begun in the old one is over, and not run in the new one.
    again = await node.ask(sandbox, "start_exec", begun, ExecInfo)
    assert (again.exec_id, again.state) == (first.exec_id, ExecState.FAILED)
    assert again.error_code == "conflict"
    assert await ask.tree(sandbox) == {"x": "1"}
    # Asked for again it is told so, and what came since stays.
    await ask.shell(sandbox, "echo 3 > /srv/x")
    assert (await ask.roll_back(sandbox, taken.snapshot_id, message_id="one")).duration_ms == 0
    assert await ask.tree(sandbox) == {"x": "3"}


async def test_what_was_not_durable_is_told_as_lost_by_what_stands_on_it(both: Both) -> None:
    daemon, node = both
    ask = Asker(node)
    parent = (await node.place()).sandbox_id
    await ask.shell(parent, "mkdir /srv; echo 1 > /srv/x")
    forked = await ask.fork(parent, 1)
    assert forked.children[0].created is not None
    child = forked.children[0].created.sandbox_id
    await daemon.kill()
    await daemon.start()
    assert await ask.tree(child) == {"x": "1"}
    with pytest.raises(DsecError) as caught:
        await ask.take(child)
    assert caught.value.details["reason"] == "snapshot_lost"
    assert await ask.tree(child) == {"x": "1"}
    await ask.take(parent)
