"""Snapshots of one node over real NATS on the real kernel: taken, restored, forked, rolled back."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.layer import LayerKind
from dsec_common.wire.network import (
    EnterAgentPhase,
    InspectNetwork,
    NetworkInfo,
    NetworkMode,
    NetworkPhase,
    NetworkPolicy,
)
from dsec_common.wire.sandbox import (
    MIB,
    CreateSandbox,
    EndCause,
    ExecCommand,
    ExecResult,
    InspectSandbox,
    Limits,
    SandboxInfo,
    SandboxState,
)
from dsec_common.wire.snapshot import FORK_CHILDREN_MAX, SnapshotInfo, TakeSnapshot
from dsec_sandboxd.snapshot_tree import CHAIN_MAX
from refusals import refused
from sandboxd_node import BASE, NODE, NodeForTests, node_for_tests
from snapshot_node import Asker

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")


async def test_a_sandbox_made_from_a_snapshot_has_its_files_when_the_original_is_gone(
    node: NodeForTests, ask: Asker
) -> None:
    original = (await node.place()).sandbox_id
    await ask.shell(original, "mkdir -p /srv/d; echo one > /srv/d/x; rm -r /etc")
    taken = await ask.take(original, name="before", labels={"step": "1"})
    assert (taken.sandbox_id, taken.parent, taken.name) == (original, "", "before")
    assert (taken.durable, taken.depth, taken.labels) == (False, 1, {"step": "1"})
    assert 0 < taken.frozen_ms < 1000
    await ask.delete(original)
    restored = await ask.restore(taken.snapshot_id, env={"A": "b"})
    assert await ask.tree(restored) == {"d/x": "one"}
    assert await ask.shell(restored, "test -e /etc || echo $A") == "b\n"
    info = await node.ask(restored, "inspect", InspectSandbox(), SandboxInfo)
    assert (info.snapshot, info.layers) == (taken.snapshot_id, (BASE,))


async def test_a_snapshot_becomes_durable_and_is_there_after_a_restart(
    node: NodeForTests, ask: Asker
) -> None:
    original = (await node.place()).sandbox_id
    await ask.shell(original, "mkdir /srv; echo one > /srv/x; rm -r /home; mkdir /home")
    first = await ask.take(original)
    await ask.shell(original, "echo two > /srv/x")
    second = await ask.take(original)
    waited = await ask.inspect(second.snapshot_id, 20.0)
    assert (waited.durable, waited.detail) == (True, "")
    await ask.inspect(first.snapshot_id, 20.0)
    stray = node.config.snapshots_path / "stray.erofs"
    stray.write_bytes(b"left by a crash")
    before = await ask.list()
    assert await node.stop_service() == 0
    await node.start_service()
    assert not stray.exists()
    after = await ask.list()
    assert [(s.snapshot_id, s.parent, s.durable) for s in after] == [
        (first.snapshot_id, "", True),
        (second.snapshot_id, first.snapshot_id, True),
    ]
    assert [s.size_bytes for s in before] == [s.size_bytes for s in after]
    for snapshot, content in ((first, "one"), (second, "two")):
        restored = await ask.restore(snapshot.snapshot_id)
        assert await ask.tree(restored) == {"x": content}
        assert await ask.shell(restored, "ls /home") == ""


async def test_a_rollback_puts_the_same_sandbox_back(node: NodeForTests, ask: Asker) -> None:
    sandbox = (await node.place(CreateSandbox(base=BASE, env={"A": "b"}))).sandbox_id
    await ask.shell(sandbox, "mkdir /srv; echo one > /srv/x; ls /run/dsec > /srv/agent")
    taken = await ask.take(sandbox)
    await ask.shell(sandbox, "rm -r /srv; (sleep 1000 &) ; echo late > /late")
    command = ExecCommand(argv=("sleep", "1000"))
    running = asyncio.ensure_future(node.ask(sandbox, "exec", command, ExecResult))
    await ask.shell(sandbox, "true")
    answer = await ask.roll_back(sandbox, taken.snapshot_id)
    assert answer.duration_ms < 5000
    gone = await refused(running)
    assert (gone.code, gone.details["reason"]) == (ErrorCode.CONFLICT, "rolled_back")
    assert "create a new one" not in gone.message
    # Whoever lost that answer and asks again gets no second run, on other files.
    repeated = await refused(node.ask(sandbox, "exec", command, ExecResult))
    assert repeated.details["reason"] == "result_lost"
    assert (await ask.tree(sandbox))["x"] == "one"
    assert await ask.shell(sandbox, "test -e /late || echo $A; ls /run/dsec") == "b\nagent.sock\n"
    info = await node.ask(sandbox, "inspect", InspectSandbox(), SandboxInfo)
    assert (info.state, info.snapshot) == (SandboxState.RUNNING, taken.snapshot_id)
    assert info.pids_used == 1
    again = await ask.take(sandbox)
    assert (again.parent, again.depth) == (taken.snapshot_id, 2)


async def test_a_fork_makes_children_with_the_same_files_and_lives_of_their_own(
    node: NodeForTests, ask: Asker
) -> None:
    parent = (
        await node.place(CreateSandbox(base=BASE, env={"A": "b"}, labels={"l": "1"}))
    ).sandbox_id
    await ask.shell(parent, "mkdir /srv; echo one > /srv/x")
    forked = await ask.fork(parent, 10, labels={"l": "2"})
    ids = [child.created.sandbox_id for child in forked.children if child.created]
    assert len(set(ids)) == 10
    for number, child in enumerate(ids):
        await ask.shell(child, f"echo {number} > /srv/own; test $A = b")
    for number, child in enumerate(ids):
        assert await ask.tree(child) == {"x": "one", "own": str(number)}
        info = await node.ask(child, "inspect", InspectSandbox(), SandboxInfo)
        assert (info.labels, info.snapshot) == ({"l": "2"}, forked.snapshot_id)
    assert await ask.tree(parent) == {"x": "one"}
    assert (await ask.inspect(forked.snapshot_id)).references == 10
    for child in ids:
        await ask.delete(child)
    # Nobody asked for the snapshot, so it goes with the last child.
    assert (await refused(ask.inspect(forked.snapshot_id))).code is ErrorCode.NOT_FOUND
    assert await ask.list() == []


async def test_children_beyond_the_nodes_room_are_refused_one_by_one(
    tmp_path: Path, layers: Path
) -> None:
    async with node_for_tests(tmp_path, layers, sandboxes_max=4) as node:
        ask = Asker(node)
        parent = (await node.place()).sandbox_id
        forked = await ask.fork(parent, 5)
        made = [child for child in forked.children if child.created]
        errors = [child.error for child in forked.children if child.error]
        assert (len(made), len(errors)) == (3, 2)
        assert {error.code for error in errors} == {ErrorCode.EXHAUSTED}
        assert await ask.shell(parent, "echo runs") == "runs\n"


@pytest.mark.parametrize(
    "fields",
    [
        {"count": 0},
        {"count": FORK_CHILDREN_MAX + 1},
        {"count": 1, "limits": Limits(cu=0.5)},
        {"count": 1, "env": {"not a name": "x"}},
        {"count": 1, "timeout_s": 0.0},
    ],
)
async def test_a_fork_that_makes_no_sense_changes_nothing(
    node: NodeForTests, ask: Asker, fields: dict[str, Any]
) -> None:
    parent = (await node.place()).sandbox_id
    assert (await refused(ask.fork(parent, **fields))).code is ErrorCode.INVALID
    assert await ask.list() == []


async def test_forty_steps_of_a_chain_keep_to_a_model(node: NodeForTests, ask: Asker) -> None:
    """Snapshots, rollbacks and forks at random; files compared at each step."""
    dice = random.Random(7)  # noqa: S311  no secret
    sandbox = (await node.place()).sandbox_id
    await ask.shell(sandbox, "mkdir -p /srv/a /srv/b")
    model: dict[str, str] = {}
    known: dict[str, dict[str, str]] = {}
    deepest = 0
    for step in range(40):
        for _ in range(3):
            name = dice.choice(["top", "a/x", "a/y", "b/x", "b/y", "a/c/z"])
            match dice.randrange(4):
                case 0:
                    await ask.shell(sandbox, f"rm -rf /srv/{name.partition('/')[0]}")
                    model = {k: v for k, v in model.items() if k.partition("/")[0] != name[:1]}
                    model.pop(name.partition("/")[0], None)
                case 1:
                    await ask.shell(sandbox, f"rm -f /srv/{name}")
                    model.pop(name, None)
                case _:
                    line = f"d=$(dirname /srv/{name}); mkdir -p $d; echo {step} > /srv/{name}"
                    await ask.shell(sandbox, line)
                    model[name] = str(step)
        taken = await ask.take(sandbox)
        deepest = max(deepest, taken.depth)
        known[taken.snapshot_id] = dict(model)
        if step % 7 == 3:
            chosen = dice.choice([*known])
            await ask.roll_back(sandbox, chosen)
            model = dict(known[chosen])
        elif step % 5 == 1:
            forked = await ask.fork(sandbox, 1)
            assert forked.children[0].created is not None
            await ask.delete(sandbox)
            sandbox = forked.children[0].created.sandbox_id
        else:
            await ask.roll_back(sandbox, taken.snapshot_id)  # so that the chain grows
        assert await ask.tree(sandbox) == model, step
    assert deepest == CHAIN_MAX
    for snapshot_id in dice.sample([*known], 8):
        restored = await ask.restore(snapshot_id)
        assert await ask.tree(restored) == known[snapshot_id]
        await ask.delete(restored)
    node.service._snapshots.store.tree.validate()


async def test_deleted_snapshots_go_with_the_last_that_needs_them(
    node: NodeForTests, ask: Asker
) -> None:
    sandbox = (await node.place()).sandbox_id
    await ask.shell(sandbox, "mkdir /srv; echo 1 > /srv/one")
    first = await ask.take(sandbox)
    child = await ask.restore(first.snapshot_id)
    await ask.shell(child, "echo 2 > /srv/two")
    second = await ask.take(child)
    assert (second.parent, second.depth) == (first.snapshot_id, 2)
    for snapshot in (first, second):
        await ask.inspect(snapshot.snapshot_id, 20.0)
    images = node.config.snapshots_path
    assert len([*images.iterdir()]) == 2
    deleted = await ask.drop(first.snapshot_id)
    assert deleted.kept_bytes > 0
    assert (await refused(ask.inspect(first.snapshot_id))).code is ErrorCode.NOT_FOUND
    assert (await ask.inspect(second.snapshot_id)).parent == ""
    grandchild = await ask.restore(second.snapshot_id)
    assert await ask.tree(grandchild) == {"one": "1", "two": "2"}
    # Also when the node has forgotten that it was ever asked for.
    for sandbox_id in (sandbox, child, grandchild):
        await ask.delete(sandbox_id)
    assert await node.stop_service() == 0
    await node.start_service()
    grandchild = await ask.restore(second.snapshot_id)
    assert await ask.tree(grandchild) == {"one": "1", "two": "2"}
    assert (await ask.drop(second.snapshot_id)).kept_bytes > 0
    await ask.delete(grandchild)
    store = node.service._snapshots.store
    while store._work:
        await asyncio.wait(set(store._work))
    assert [*images.iterdir()] == []
    assert (store.room.memory_bytes, store.room.disk_bytes) == (0, 0)


async def test_another_projects_snapshot_is_not_there(node: NodeForTests, ask: Asker) -> None:
    mine = (await node.place()).sandbox_id
    taken = await ask.take(mine)
    for asking in (
        ask.inspect(taken.snapshot_id, project="other"),
        ask.drop(taken.snapshot_id, project="other"),
        node.place(CreateSandbox(base="", snapshot=taken.snapshot_id), project="other"),
        node.ask(mine, "snapshot", TakeSnapshot(), SnapshotInfo, bus=node.other, project="other"),
    ):
        assert (await refused(asking)).code is ErrorCode.NOT_FOUND
    elsewhere = f"other-node.{taken.snapshot_id.partition('.')[2]}"
    assert (await refused(ask.inspect(elsewhere))).code is ErrorCode.NOT_FOUND
    assert (await refused(ask.roll_back(mine, elsewhere))).code is ErrorCode.NOT_FOUND
    assert (await refused(ask.inspect("*.>"))).code is ErrorCode.INVALID


async def test_process_memory_is_refused_and_nothing_is_done(
    node: NodeForTests, ask: Asker
) -> None:
    sandbox = (await node.place()).sandbox_id
    error = await refused(ask.take(sandbox, memory=True))
    assert (error.code, error.details["reason"]) == (ErrorCode.UNSUPPORTED, "criu")
    assert await ask.list() == []


async def test_one_request_takes_a_snapshot_and_waits_until_it_is_durable(
    node: NodeForTests, ask: Asker
) -> None:
    sandbox = (await node.place()).sandbox_id
    for wait_s in (-1.0, 301.0, float("nan")):
        error = await refused(ask.take(sandbox, wait_durable_s=wait_s))
        assert error.code is ErrorCode.INVALID
    assert await ask.list() == []
    taken = await ask.take(sandbox, wait_durable_s=20.0)
    assert taken.durable
    await ask.drop(taken.snapshot_id)


async def test_a_layer_of_a_snapshot_adds_and_deletes(node: NodeForTests, ask: Asker) -> None:
    sandbox = (await node.place()).sandbox_id
    await ask.shell(
        sandbox,
        "mkdir -p /srv/keep/__pycache__ /srv/skip /root; echo 1 > /srv/keep/x; "
        "echo 1 > /srv/skip/x; echo 1 > /srv/keep/__pycache__/c; echo h > /root/.bash_history; "
        "echo t > /tmp/t; rm -r /etc; mkdir /etc; echo only > /etc/this",
    )
    taken = await ask.take(sandbox)
    restored = await ask.restore(taken.snapshot_id)
    await ask.shell(restored, "rm /srv/keep/x; echo 2 > /srv/keep/y")
    chained = await ask.take(restored)
    layer = await ask.pack(chained.snapshot_id, "1", clean=True, exclude=("/srv/sk*",))
    assert (layer.reference, layer.kind) == ("packed@1", LayerKind.TOOLKIT)
    whole = await ask.pack(chained.snapshot_id, "2", kind=LayerKind.WORKSPACE)
    stacked = (await node.place(CreateSandbox(base=BASE, toolkits=("packed@1",)))).sandbox_id
    assert await ask.tree(stacked) == {"keep/y": "2"}
    assert await ask.shell(stacked, "ls /etc /tmp; ls -A /root; ls /srv/keep") == (
        "/etc:\nhosts\nthis\n\n/tmp:\ny\n"
    )
    other = (await node.place(CreateSandbox(base=BASE, workspace="packed@2"))).sandbox_id
    assert await ask.tree(other) == {"keep/y": "2", "keep/__pycache__/c": "1", "skip/x": "1"}
    assert (
        await ask.shell(other, "cat /tmp/t /root/.bash_history; ls /etc") == "t\nh\nhosts\nthis\n"
    )
    assert whole.digest != layer.digest
    assert (await refused(ask.pack(chained.snapshot_id, "1"))).code is ErrorCode.CONFLICT
    bad = ask.pack(chained.snapshot_id, "3", exclude=("relative",))
    assert (await refused(bad)).code is ErrorCode.INVALID


async def test_snapshots_have_a_bound_of_memory_and_number(tmp_path: Path, layers: Path) -> None:
    async with node_for_tests(
        tmp_path, layers, snapshot_memory_bytes=4 * MIB, snapshots_max=2
    ) as node:
        ask = Asker(node)
        sandbox = (await node.place()).sandbox_id
        await ask.shell(sandbox, "dd if=/dev/zero of=/tmp/big bs=1M count=8 2>/dev/null")
        error = await refused(ask.take(sandbox))
        assert (error.code, error.details["reason"]) == (ErrorCode.EXHAUSTED, "snapshot_room")
        await ask.shell(sandbox, "rm /tmp/big")
        for _ in range(2):
            await ask.take(sandbox)
        error = await refused(ask.take(sandbox))
        assert (error.code, error.details["reason"]) == (ErrorCode.EXHAUSTED, "snapshot_count")
        assert await ask.shell(sandbox, "echo runs") == "runs\n"


async def test_a_rollback_to_a_snapshot_of_other_layers_changes_nothing(
    node: NodeForTests, ask: Asker
) -> None:
    one = (await node.place()).sandbox_id
    two = (await node.place(CreateSandbox(base=BASE, toolkits=("tools@1",)))).sandbox_id
    await ask.shell(two, "mkdir -p /srv; echo here > /srv/x")
    taken = await ask.take(one)
    error = await refused(ask.roll_back(two, taken.snapshot_id))
    assert (error.code, error.details["reason"]) == (ErrorCode.INVALID, "other_layers")
    assert await ask.tree(two) == {"x": "here"}


async def test_a_rollback_for_which_there_can_be_no_new_sandbox_changes_nothing(
    node: NodeForTests, ask: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = (await node.place()).sandbox_id
    taken = await ask.take(sandbox)
    await ask.shell(sandbox, "mkdir -p /srv; echo here > /srv/x")
    kernel = node.service._sandboxes.parts.kernel

    async def fail(_spec: object) -> None:
        raise DsecError(ErrorCode.EXHAUSTED, "told to")

    with monkeypatch.context() as patched:
        patched.setattr(kernel, "create", fail)
        error = await refused(ask.roll_back(sandbox, taken.snapshot_id))
    assert error.code is ErrorCode.EXHAUSTED
    assert await ask.tree(sandbox) == {"x": "here"}
    await ask.roll_back(sandbox, taken.snapshot_id)
    assert await ask.tree(sandbox) == {}


async def test_a_rollback_whose_last_step_fails_ends_the_sandbox_with_its_cause(
    node: NodeForTests, ask: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = (await node.place()).sandbox_id
    taken = await ask.take(sandbox)
    kernel = node.service._sandboxes.parts.kernel

    async def fail(_local: str, _heir: str) -> None:
        raise DsecError(ErrorCode.EXHAUSTED, "told to")

    with monkeypatch.context() as patched:
        patched.setattr(kernel, "replace", fail)
        error = await refused(ask.roll_back(sandbox, taken.snapshot_id))
    assert error.code is ErrorCode.EXHAUSTED
    info = await node.ask(sandbox, "inspect", InspectSandbox(), SandboxInfo)
    assert (info.state, info.end_cause) == (SandboxState.ENDED, EndCause.ROLLBACK_FAILED)
    assert "told to" in info.end_detail
    restored = await ask.restore(taken.snapshot_id)
    assert restored.startswith(f"{NODE}.")


async def test_commands_that_come_while_a_sandbox_is_put_back_run_in_the_old_or_the_new_one(
    node: NodeForTests, ask: Asker
) -> None:
    sandbox = (await node.place()).sandbox_id
    taken = await ask.take(sandbox)
    back = asyncio.ensure_future(ask.roll_back(sandbox, taken.snapshot_id))
    refusals: list[DsecError] = []
    while not back.done():
        try:
            assert await ask.shell(sandbox, "echo runs") == "runs\n"
        except DsecError as error:
            refusals.append(error)
    await back
    assert {error.details.get("reason") for error in refusals} <= {"rolled_back"}, refusals


async def test_a_deletion_during_a_rollback_waits_for_it_and_leaves_nothing(
    node: NodeForTests, ask: Asker
) -> None:
    sandbox = (await node.place()).sandbox_id
    taken = await ask.take(sandbox)
    back = asyncio.ensure_future(ask.roll_back(sandbox, taken.snapshot_id))
    await asyncio.sleep(0.001)
    await ask.delete(sandbox)
    await asyncio.wait({back})
    back.exception()
    info = await node.ask(sandbox, "inspect", InspectSandbox(), SandboxInfo)
    assert info.state is SandboxState.ENDED
    assert node.service._sandboxes.state.living_count == 0


async def test_a_phase_for_setting_up_that_is_over_stays_over(
    node: NodeForTests, ask: Asker
) -> None:
    async def phase_of(sandbox_id: str) -> NetworkInfo:
        return await node.ask(sandbox_id, "inspect_network", InspectNetwork(), NetworkInfo)

    wide = CreateSandbox(base=BASE, setup_network=NetworkPolicy(mode=NetworkMode.OPEN))
    parent = (await node.place(wide)).sandbox_id
    taken = await ask.take(parent)
    first = (await ask.fork(parent, 1)).children[0].created
    assert first is not None
    assert (await phase_of(first.sandbox_id)).phase is NetworkPhase.SETUP
    await node.ask(parent, "enter_agent_phase", EnterAgentPhase(), NetworkInfo)
    await ask.roll_back(parent, taken.snapshot_id)
    second = (await ask.fork(parent, 1)).children[0].created
    assert second is not None
    for sandbox_id in (parent, second.sandbox_id):
        info = await phase_of(sandbox_id)
        assert (info.phase, info.policy.mode) == (NetworkPhase.AGENT, NetworkMode.NONE)
