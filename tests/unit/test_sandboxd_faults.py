"""Every call of the kernel fails in turn, over a whole life, and nothing is left."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.wire.files import StatFile, WriteFile
from dsec_common.wire.sandbox import EndCause, ExecCommand, SandboxState
from fault_world import FAILURES, attempt, delete_until_gone, fail_each_call, new_world
from node_world import NOTHING, World


async def live(world: World) -> None:
    """Be a user with two sandboxes, from their creation to their end."""
    for local in ("s1", "s2"):
        await attempt(world.place(local))
        world.state.validate_state()
    await attempt(world.commands.exec(world.ask("s1", ExecCommand(argv=("true",)))))
    piece = WriteFile(path="/tmp/x", upload_id="u", data=b"abc", final=True)
    await attempt(world.files.write_file(world.ask("s1", piece)))
    await attempt(world.files.stat_file(world.ask("s1", StatFile(path="/tmp/x"))))
    world.state.validate_state()
    await asyncio.gather(*(delete_until_gone(world, local) for local in ("s1", "s2")))


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
async def test_whichever_call_of_the_kernel_fails_nothing_is_left(
    tmp_path: Path, failure: BaseException
) -> None:
    reached = await fail_each_call(tmp_path, failure, live)
    assert {"hold_layer", "create", "exec", "stat", "destroy"} <= reached


async def test_a_layer_that_the_kernel_lost_is_mounted_again_for_the_next_sandbox(
    tmp_path: Path,
) -> None:
    async with new_world(tmp_path / "w") as world:
        await world.place("s1")
        world.kernel.layers.clear()  # the spawner died, and the image was away
        lost = await attempt(world.place("s2"))
        assert isinstance(lost, DsecError)
        assert lost.code is ErrorCode.LAYER_ERROR
        assert (await world.place("s3")).sandbox_id == "n1.s3"
        for local in ("s1", "s3"):
            await delete_until_gone(world, local)


async def killed(world: World) -> None:
    """Kill the daemon: its memory goes, what it made stays; then start the next one."""
    world.kernel.orphan()
    world.sockets.open_now.clear()
    world.holds = type(world.holds)(world.kernel, idle_max=0)
    world.build()
    world.directories.open()
    await world.sandboxes.recover()
    world.state.validate_state()


async def test_a_killed_daemons_sandboxes_are_taken_over(tmp_path: Path) -> None:
    async with new_world(tmp_path / "w") as world:
        await world.place("s1")
        kept = world.state.find("p", "s1")
        await killed(world)
        assert world.state.find("p", "s1") == kept
        assert world.kernel.alive == ["s1"]
        assert world.sockets.open_now == {"s1"}
        assert world.holds.users(kept.layer_digests[0]) == 1
        await delete_until_gone(world, "s1")
        assert world.left() == NOTHING


@pytest.mark.parametrize("state", [SandboxState.CREATING, SandboxState.DELETING])
async def test_what_was_half_done_at_the_crash_is_finished_off(
    tmp_path: Path, state: SandboxState
) -> None:
    async with new_world(tmp_path / "w") as world:
        gate = world.kernel.hold("create" if state is SandboxState.CREATING else "destroy")
        placing = asyncio.ensure_future(attempt(world.place("s1")))
        if state is SandboxState.DELETING:
            await placing
            deleting = asyncio.ensure_future(attempt(world.delete("s1")))
            while "destroy" not in world.kernel.names():
                await asyncio.sleep(0)
        else:
            while "create" not in world.kernel.names():
                await asyncio.sleep(0)
        records = world.store.load()
        assert [record.state for record in records] == [state]
        # The dead daemon does nothing more; only what it kept counts.
        gate.set()
        await placing
        if state is SandboxState.DELETING:
            await deleting
        for record in records:
            world.store.put(record)
        await killed(world)
        ended = world.state.find("p", "s1")
        assert ended.state is SandboxState.ENDED
        causes = {
            SandboxState.CREATING: EndCause.NODE_RESTARTED,
            SandboxState.DELETING: EndCause.DELETED,
        }
        assert ended.end_cause is causes[state]
        assert world.left() == NOTHING


@pytest.mark.parametrize("nth", range(1, 4))
async def test_whichever_call_fails_while_the_next_daemon_starts_nothing_is_left(
    tmp_path: Path, nth: int
) -> None:
    async with new_world(tmp_path / "w") as world:
        await world.place("s1")
        world.kernel.fail_call(nth, unavailable("the spawner died"))
        with_failure = attempt(killed(world))
        if isinstance(await with_failure, DsecError):
            # The daemon does not start, its successor does.
            await killed(world)
        info = world.state.find("p", "s1")
        assert info.state in {SandboxState.RUNNING, SandboxState.ENDED}
        await delete_until_gone(world, "s1")


async def test_steps_are_numbered_on_by_the_next_daemon(tmp_path: Path) -> None:
    async with new_world(tmp_path / "w") as world:
        await world.place("s1")
        async with asyncio.timeout(20):
            while not world.steps:  # it is told of behind the answer
                await asyncio.sleep(0)
        first = [(step.source, step.seq) for step in world.steps]
        await killed(world)
        await delete_until_gone(world, "s1")
        assert [step.action for step in world.steps] == ["create", "adopt", "delete"]
        numbers = [(step.source, step.seq) for step in world.steps]
        assert numbers[0] == first[0]
        assert [seq for _, seq in numbers] == [1, 2, 3]
        assert len({source for source, _ in numbers}) == 1
