"""Pausing and waking, idle times and deadlines: the shell on a recording kernel, time by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.testing.clock import FakeClock
from dsec_common.wire.life import PatchSandbox, PauseSandbox, ResumeSandbox, TouchSandbox
from dsec_common.wire.sandbox import (
    CreateSandbox,
    EndCause,
    ExecCommand,
    IdleAction,
    InspectSandbox,
    SandboxInfo,
    SandboxState,
)
from dsec_sandboxd.life_doors import LifeDoors
from node_world import NODE, NOTHING, World
from refusals import refused


class Paused(World):
    """A node with the doors to its sandboxes' lives."""

    clock: FakeClock

    async def create(self, local: str = "s1", **changes: Any) -> None:
        await self.place(local, request=CreateSandbox(base="base@1", **changes))

    @property
    def doors(self) -> LifeDoors:
        return LifeDoors(self.sandboxes)

    async def pause(self, local: str = "s1") -> SandboxInfo:
        return await self.doors.pause(self.ask(local, PauseSandbox()))

    async def resume(self, local: str = "s1") -> SandboxInfo:
        return await self.doors.resume(self.ask(local, ResumeSandbox()))

    async def exec(self, local: str = "s1") -> Any:
        handler = self.gate.guard(self.commands.exec)
        return await handler(self.ask(local, ExecCommand(argv=("true",))))

    def state_of(self, local: str = "s1") -> SandboxState:
        return self.state.find("p", local).state

    async def pass_s(self, seconds: float) -> None:
        """Let time pass as the daemon notices it: a tick four times a second."""
        for _ in range(int(seconds * 4)):
            await self.clock.advance(0.25)
            self.sandboxes.tick()
        for _ in range(5):
            await asyncio.sleep(0)

    async def until(self, method: str, times: int = 1) -> None:
        """Return once a method of the kernel has been called so often."""
        async with asyncio.timeout(20):
            while self.kernel.names().count(method) < times:
                await asyncio.sleep(0)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Paused]:
    made = Paused(tmp_path, FakeClock())
    await made.start()
    yield made
    await made.stop()
    assert made.left() == NOTHING
    made.directories.close()
    made.memory.cleanup()


async def test_a_pause_stops_the_sandbox_and_is_kept(world: Paused) -> None:
    await world.create()
    info = await world.pause()
    assert info.state is SandboxState.PAUSED
    assert info.paused_at == world.clock.now()
    assert world.kernel.is_paused("s1")
    assert [record.state for record in world.store.load()] == [SandboxState.PAUSED]


async def test_the_intent_to_pause_is_kept_before_the_kernel_is_asked(world: Paused) -> None:
    await world.create()
    gate = world.kernel.hold("pause")
    pausing = asyncio.create_task(world.pause())
    await world.until("pause")
    assert [record.state for record in world.store.load()] == [SandboxState.PAUSING]
    gate.set()
    await pausing


async def test_pausing_and_resuming_twice_is_once(world: Paused) -> None:
    await world.create()
    await world.pause()
    await world.pause()
    assert world.kernel.names().count("pause") == 1
    await world.resume()
    assert (await world.resume()).state is SandboxState.RUNNING
    assert world.kernel.names().count("resume") == 1
    assert not world.kernel.is_paused("s1")


async def test_many_requests_to_a_paused_sandbox_wake_it_once_and_all_wait_for_it(
    world: Paused,
) -> None:
    await world.create()
    await world.pause()
    gate = world.kernel.hold("resume")
    asking = [asyncio.create_task(world.exec()) for _ in range(20)]
    await world.until("resume")
    assert "exec" not in world.kernel.names()
    gate.set()
    assert [result.exit_code for result in await asyncio.gather(*asking)] == [0] * 20
    assert world.kernel.names().count("resume") == 1
    assert world.state_of() is SandboxState.RUNNING


async def test_a_request_that_comes_while_it_is_being_paused_is_not_lost(world: Paused) -> None:
    await world.create()
    gate = world.kernel.hold("pause")
    pausing = asyncio.create_task(world.pause())
    await world.until("pause")
    asking = asyncio.create_task(world.exec())
    await asyncio.sleep(0)
    gate.set()
    assert (await asking).exit_code == 0
    assert (await pausing).state in {SandboxState.RESUMING, SandboxState.RUNNING}
    assert world.state_of() is SandboxState.RUNNING


async def test_a_running_command_is_paused_with_its_sandbox_and_does_not_wake_it(
    world: Paused,
) -> None:
    await world.create()
    gate = world.kernel.hold("exec")
    running = asyncio.create_task(world.exec())
    await world.until("exec")
    assert (await world.pause()).state is SandboxState.PAUSED
    gate.set()  # the recording kernel's command ends; a frozen one would not
    await running
    assert world.state_of() is SandboxState.PAUSED


async def test_a_pause_that_the_kernel_refuses_is_told_and_the_sandbox_runs_on(
    world: Paused,
) -> None:
    await world.create()
    world.kernel.fail("pause", DsecError(ErrorCode.TIMEOUT, "it hangs"))
    assert (await refused(world.pause())).code is ErrorCode.TIMEOUT
    assert world.state_of() is SandboxState.RUNNING
    assert (await world.exec()).exit_code == 0


async def test_a_wake_that_the_kernel_refuses_is_told_to_all_and_the_next_may_work(
    world: Paused,
) -> None:
    await world.create()
    await world.pause()
    world.kernel.fail("resume", unavailable("no"))
    errors = await asyncio.gather(*(refused(world.exec()) for _ in range(3)))
    assert {error.code for error in errors} == {ErrorCode.UNAVAILABLE}
    assert world.state_of() is SandboxState.PAUSED
    assert (await world.exec()).exit_code == 0


@pytest.mark.parametrize("held", ["pause", "resume", ""])
async def test_a_deletion_works_while_paused_and_on_the_way_there_and_back(
    world: Paused, held: str
) -> None:
    await world.create()
    waiting: list[asyncio.Task[Any]] = []
    if held != "pause":
        await world.pause()
    if held:
        gate = world.kernel.hold(held)
        turn = world.pause() if held == "pause" else world.exec()
        waiting.append(asyncio.create_task(turn))
        await world.until(held)
    assert (await world.delete()).end_cause is EndCause.DELETED
    if held:
        gate.set()
    for error in await asyncio.gather(*waiting, return_exceptions=True):
        assert not isinstance(error, DsecError) or error.code is ErrorCode.EXPIRED
    assert world.state.allocated.sandboxes == 0


async def test_memory_is_given_back_only_by_what_stays_paused(world: Paused) -> None:
    await world.create("stays")
    await world.create("wakes")
    await world.pause("stays")
    await world.pause("wakes")
    assert "reclaim" not in world.kernel.names()
    await world.clock.advance(1)
    await world.until("reclaim")


async def test_a_pause_and_a_wake_are_told(world: Paused) -> None:
    await world.create()
    await world.pause()
    await world.exec()
    assert await world.commands.finished(5.0)
    await world.events.flushed(5.0)
    told = [subject.rsplit(".", 1)[-1] for subject, _ in world.stream.events]
    assert told == ["running", "paused", "resumed"]
    assert [step.action for step in world.steps] == ["create", "pause", "resume", "exec"]


async def test_an_idle_sandbox_ends_with_that_cause(world: Paused) -> None:
    await world.create(idle_ttl_s=3.0)
    await world.pass_s(2)
    assert world.state_of() is SandboxState.RUNNING
    await world.exec()
    await world.pass_s(2.5)
    assert world.state_of() is SandboxState.RUNNING
    await world.pass_s(1)
    assert world.state.find("p", "s1").end_cause is EndCause.IDLE


async def test_an_idle_sandbox_can_be_paused_instead_and_wakes_on_the_next_request(
    world: Paused,
) -> None:
    await world.create(idle_ttl_s=3.0, idle_action=IdleAction.PAUSE)
    await world.pass_s(3.5)
    assert world.state_of() is SandboxState.PAUSED
    await world.pass_s(60)
    assert world.state_of() is SandboxState.PAUSED
    await world.exec()
    assert world.state_of() is SandboxState.RUNNING
    await world.pass_s(2)
    assert world.state_of() is SandboxState.RUNNING
    await world.pass_s(2)
    assert world.state_of() is SandboxState.PAUSED


async def test_a_running_command_and_an_agents_call_keep_a_sandbox_from_being_idle(
    world: Paused,
) -> None:
    await world.create("command", idle_ttl_s=1.0)
    await world.create("agent", idle_ttl_s=1.0)
    gate = world.kernel.hold("exec")
    running = asyncio.create_task(world.exec("command"))
    await world.until("exec")
    world.gate.began("agent")
    await world.pass_s(10)
    assert world.state_of("command") is world.state_of("agent") is SandboxState.RUNNING
    gate.set()
    await running
    world.gate.ended("agent")
    await world.pass_s(0.75)
    assert world.state_of("command") is world.state_of("agent") is SandboxState.RUNNING
    await world.pass_s(0.75)
    assert {world.state.find("p", each).end_cause for each in ("command", "agent")} == {
        EndCause.IDLE
    }


async def test_an_agents_call_does_not_undo_its_owners_pause(world: Paused) -> None:
    await world.create()
    await world.pause()
    world.gate.began("s1")
    world.gate.ended("s1")
    await world.pass_s(1)
    assert world.state_of() is SandboxState.PAUSED
    assert "resume" not in world.kernel.names()


async def test_the_time_to_live_counts_while_paused_and_ends_it(world: Paused) -> None:
    await world.create(ttl_s=5.0)
    await world.pause()
    await world.pass_s(4.5)
    assert world.state_of() is SandboxState.PAUSED
    await world.pass_s(1)
    assert world.state.find("p", "s1").end_cause is EndCause.EXPIRED


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
async def test_a_jump_of_the_wall_clock_changes_no_duration(world: Paused, jump_s: float) -> None:
    await world.create("dies", ttl_s=5.0)
    await world.create("idles", idle_ttl_s=5.0)
    await world.create("lives", ttl_s=100.0, idle_ttl_s=100.0)
    world.clock.jump(jump_s)
    await world.pass_s(4)
    assert world.state.allocated.sandboxes == 3
    await world.pass_s(2)
    assert world.state.find("p", "dies").end_cause is EndCause.EXPIRED
    assert world.state.find("p", "idles").end_cause is EndCause.IDLE
    assert world.state_of("lives") is SandboxState.RUNNING


async def test_a_touch_begins_both_times_anew_and_wakes_nothing(world: Paused) -> None:
    await world.create(ttl_s=5.0, idle_ttl_s=4.0)
    await world.pass_s(3)
    info = await world.doors.touch(world.ask("s1", TouchSandbox()))
    assert info.expires_at == world.clock.now() + 5.0
    await world.pass_s(3)
    assert world.state_of() is SandboxState.RUNNING
    await world.pause()
    await world.doors.touch(world.ask("s1", TouchSandbox(ttl_s=0.0, idle_ttl_s=0.0)))
    await world.pass_s(100)
    assert world.state_of() is SandboxState.PAUSED
    info = await world.doors.touch(world.ask("s1", TouchSandbox(ttl_s=2.0)))
    assert (info.ttl_s, info.idle_ttl_s, info.state) == (2.0, 0.0, SandboxState.PAUSED)
    await world.pass_s(2.5)
    assert world.state.find("p", "s1").end_cause is EndCause.EXPIRED


@pytest.mark.parametrize("ttl_s", [None, 0.0, 1000.0])
@pytest.mark.parametrize("jump_s", [0.0, -86_400.0])
async def test_no_touch_has_a_sandbox_live_past_its_deadline(
    world: Paused, ttl_s: float | None, jump_s: float
) -> None:
    await world.create(ttl_s=4.0, deadline_s=6.0)
    ends_at = world.clock.now() + 6.0
    await world.pass_s(3)
    world.clock.jump(jump_s)
    info = await world.doors.touch(world.ask("s1", TouchSandbox(ttl_s=ttl_s)))
    assert info.expires_at <= ends_at
    await world.pass_s(2)
    assert world.state_of() is SandboxState.RUNNING
    await world.doors.touch(world.ask("s1", TouchSandbox(ttl_s=ttl_s)))
    await world.pass_s(1.5)
    assert world.state.find("p", "s1").end_cause is EndCause.EXPIRED


async def test_a_touch_may_still_shorten_a_life_that_has_a_deadline(world: Paused) -> None:
    await world.create(deadline_s=60.0)
    await world.doors.touch(world.ask("s1", TouchSandbox(ttl_s=2.0)))
    await world.pass_s(2.5)
    assert world.state.find("p", "s1").end_cause is EndCause.EXPIRED


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
async def test_what_is_no_time_changes_nothing(world: Paused, value: float) -> None:
    await world.create(ttl_s=5.0)
    before = world.state.find("p", "s1")
    for message in (TouchSandbox(ttl_s=value), TouchSandbox(ttl_s=1.0, idle_ttl_s=value)):
        error = await refused(world.doors.touch(world.ask("s1", message)))
        assert error.code is ErrorCode.INVALID
    assert world.state.find("p", "s1") == before


async def test_labels_are_changed_one_by_one_and_none_removes(world: Paused) -> None:
    await world.create(labels={"keep": "1", "change": "1", "drop": "1"})
    patch = PatchSandbox(labels={"change": "2", "drop": None, "new": "3", "never": None})
    info = await world.doors.patch(world.ask("s1", patch))
    assert info.labels == {"keep": "1", "change": "2", "new": "3"}
    assert world.store.load()[0].labels == info.labels


async def test_labels_that_it_cannot_carry_change_nothing(world: Paused) -> None:
    await world.create(labels={"keep": "1"})
    patch = PatchSandbox(labels={"keep": None} | {f"label{n}": "" for n in range(65)})
    assert (await refused(world.doors.patch(world.ask("s1", patch)))).code is ErrorCode.INVALID
    assert world.state.find("p", "s1").labels == {"keep": "1"}


async def test_an_ended_sandbox_is_refused_with_its_cause_by_every_door(world: Paused) -> None:
    await world.create()
    await world.delete()
    doors = world.doors
    for asking in (
        world.pause(),
        world.resume(),
        doors.touch(world.ask("s1", TouchSandbox())),
        doors.patch(world.ask("s1", PatchSandbox())),
    ):
        error = await refused(asking)
        assert (error.code, error.details["end_cause"]) == (ErrorCode.EXPIRED, "deleted")


async def test_an_inspection_tells_the_deadline_and_how_long_nobody_came(world: Paused) -> None:
    await world.create(ttl_s=60.0, idle_ttl_s=30.0)
    made_at = world.clock.now()
    await world.pass_s(10)
    info = await world.sandboxes.inspect(world.ask("s1", InspectSandbox()))
    assert info.sandbox_id == f"{NODE}.s1"
    assert (info.expires_at, info.idle_s, info.idle_ttl_s) == (made_at + 60.0, 10.0, 30.0)
