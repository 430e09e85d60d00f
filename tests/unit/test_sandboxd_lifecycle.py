"""The shell around the core on a recording kernel: whatever fails, nothing of a sandbox is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dsec_common import subjects
from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.wire.files import WriteFile
from dsec_common.wire.node import ListNodeSandboxes
from dsec_common.wire.sandbox import (
    CreateSandbox,
    EndCause,
    ExecCommand,
    SandboxEnded,
    SandboxRunning,
    SandboxState,
)
from dsec_sandboxd.kernel.interface import EndCause as KernelEndCause
from dsec_sandboxd.record_store import RecordStore
from node_world import NODE, NOTHING, World
from refusals import refused


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    await made.start()
    yield made
    await made.stop()
    assert made.left() == NOTHING
    made.directories.close()
    made.memory.cleanup()


async def test_the_intent_is_on_disk_before_the_kernel_is_asked(world: World) -> None:
    gate = world.kernel.hold("create")
    placing = asyncio.create_task(world.place())
    while "create" not in world.kernel.names():
        await asyncio.sleep(0)
    assert [record.state for record in world.store.load()] == [SandboxState.CREATING]
    gate.set()
    await placing
    assert [record.state for record in world.store.load()] == [SandboxState.RUNNING]


async def test_the_caller_and_the_scheduler_get_the_same_answer(world: World) -> None:
    created = await world.place()
    assert world.caller.answers == [created]
    assert created.layers == ("base@1", "tool@1")


async def test_a_caller_that_has_gone_does_not_cost_the_scheduler_its_answer(world: World) -> None:
    world.caller.gone = True
    created = await world.place()
    assert created.sandbox_id == "n1.s1"


@pytest.mark.parametrize(("method", "nth"), [("hold_layer", 1), ("hold_layer", 2), ("create", 1)])
@pytest.mark.parametrize(
    "error",
    [
        DsecError(ErrorCode.INTERNAL, "the kernel refused", details={"operation": "mount"}),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("a defect"),
    ],
    ids=["typed", "errno", "defect"],
)
async def test_whatever_step_fails_nothing_is_left_and_the_next_try_works(
    world: World, method: str, nth: int, error: Exception
) -> None:
    world.kernel.fail(method, error, nth=nth)
    failure = await refused(world.place())
    assert failure.code is ErrorCode.INTERNAL
    assert world.left() == NOTHING
    assert world.caller.answers == []
    assert [step.status for step in world.steps] == ["failed"]
    assert (await world.place("s2")).sandbox_id == "n1.s2"


async def test_a_socket_that_does_not_open_leaves_nothing(world: World) -> None:
    world.sockets.refuse = True
    assert (await refused(world.place())).code is ErrorCode.UNAVAILABLE
    assert world.left() == NOTHING


async def test_an_intent_that_cannot_be_kept_is_not_acted_on(world: World, tmp_path: Path) -> None:
    world.store.close()
    error = await refused(world.place())
    world.store = world.sandboxes.parts.store = RecordStore(tmp_path / "again")
    assert error.code is ErrorCode.UNAVAILABLE
    assert "create" not in world.kernel.names()
    assert world.left() == NOTHING


async def test_an_end_that_the_kernel_refuses_is_told_and_tried_again(world: World) -> None:
    await world.place()
    world.kernel.fail("destroy", unavailable("busy"))
    error = await refused(world.delete())
    assert (error.code, error.retryable) == (ErrorCode.UNAVAILABLE, True)
    assert (await world.delete()).end_cause is EndCause.DELETED
    assert world.left() == NOTHING


async def test_a_deletion_waits_for_a_creation_that_is_under_way(world: World) -> None:
    gate = world.kernel.hold("create")
    placing = asyncio.create_task(refused(world.place()))
    while "create" not in world.kernel.names():
        await asyncio.sleep(0)
    deleting = asyncio.create_task(world.delete())
    await asyncio.sleep(0)
    gate.set()
    assert (await placing).code is ErrorCode.EXPIRED
    assert (await deleting).end_cause is EndCause.DELETED
    assert world.left() == NOTHING


async def test_many_who_delete_at_once_are_all_answered(world: World) -> None:
    await world.place()
    answers = await asyncio.gather(*(world.delete() for _ in range(5)))
    assert {answer.end_cause for answer in answers} == {EndCause.DELETED}
    assert world.kernel.names().count("destroy") == 1


async def test_a_sandbox_that_dies_is_let_go_of_and_told(world: World) -> None:
    await world.place()
    world.kernel.end("s1", KernelEndCause.OOM, "out of memory")
    while world.state.is_living("s1"):
        await asyncio.sleep(0)
    assert world.left() == NOTHING
    assert (await world.delete()).end_cause is EndCause.OOM
    error = await refused(world.commands.exec(world.ask("s1", ExecCommand(argv=("true",)))))
    assert error.details["end_cause"] == "oom"


async def test_a_sandbox_that_dies_while_its_answer_is_due_is_refused(world: World) -> None:
    world.sockets.gate.clear()
    placing = asyncio.create_task(refused(world.place()))
    while not world.kernel.alive:
        await asyncio.sleep(0)
    world.kernel.end("s1", KernelEndCause.EXITED)
    for _ in range(5):
        await asyncio.sleep(0)
    world.sockets.gate.set()
    assert (await placing).code is ErrorCode.UNAVAILABLE
    assert world.left() == NOTHING


async def test_an_upload_that_is_open_at_the_end_leaves_no_descriptor(world: World) -> None:
    await world.place()
    piece = WriteFile(path="/tmp/x", upload_id="u", data=b"abc", final=False)
    await world.files.write_file(world.ask("s1", piece))
    await world.delete()
    assert world.left() == NOTHING  # and the fixture around every test counts descriptors


async def test_a_restarted_daemon_tells_the_end_of_what_was_alive(world: World) -> None:
    await world.place("alive")
    await world.place("gone")
    await world.delete("gone")
    await world.events.flushed(5.0)
    world.stream.events.clear()
    # The daemon is killed here: its memory goes, the StateDB and the run directories stay.
    await world.kernel.destroy("alive")
    await world.maker.let_go("alive")
    world.directories.make("alive").joinpath("agent.sock").touch()
    world.build()
    world.directories.open()
    await world.sandboxes.recover()
    await world.events.flushed(5.0)
    assert [(subject.split(".")[-1], event) for subject, event in world.stream.events] == [
        (
            "ended",
            msgspec.structs.replace(
                world.state.find("p", "alive").ended(NODE),
                sent_at=world.stream.events[0][1].sent_at,
            ),
        )
    ]
    assert world.state.find("p", "gone").end_cause is EndCause.DELETED
    assert world.left() == NOTHING


async def test_events_wait_for_the_stream_and_keep_their_order(world: World) -> None:
    world.stream.away = True
    await world.place()
    await world.delete()
    await world.stream.asked.wait()
    assert world.stream.events == []
    world.stream.away = False
    assert await world.events.flushed(5.0)
    assert [type(event) for _, event in world.stream.events] == [SandboxRunning, SandboxEnded]
    assert {subject.split(".")[2] for subject, _ in world.stream.events} == {"p"}


async def test_the_behaviour_log_tells_a_sandboxs_whole_life(world: World) -> None:
    await world.place()
    await world.commands.exec(world.ask("s1", ExecCommand(argv=("echo", "a b"))))
    piece = WriteFile(path="/tmp/x", upload_id="u", data=b"abc")
    await world.files.write_file(world.ask("s1", piece))
    await world.delete()
    assert [(step.seq, step.action, step.status) for step in world.steps] == [
        (1, "create", "ok"),
        (2, "exec", "0"),
        (3, "write_file", "ok"),
        (4, "delete", "ok"),
    ]
    assert world.steps[1].attributes["command"] == "echo 'a b'"


async def test_a_command_that_the_end_cut_short_is_the_sandboxs_last_step(world: World) -> None:
    await world.place()
    gate = world.kernel.hold("exec")
    running = asyncio.create_task(
        refused(world.commands.exec(world.ask("s1", ExecCommand(argv=("true",)))))
    )
    while "exec" not in world.kernel.names():
        await asyncio.sleep(0)
    await world.delete()
    gate.set()
    assert (await running).code is ErrorCode.EXPIRED
    assert [(step.seq, step.action, step.status) for step in world.steps] == [
        (1, "create", "ok"),
        (2, "delete", "ok"),
        (3, "exec", "expired"),
    ]


async def test_a_stop_waits_for_commands_and_then_ends_everything(world: World) -> None:
    await world.place()
    gate = world.kernel.hold("exec")
    running = asyncio.create_task(world.commands.exec(world.ask("s1", ExecCommand(argv=("true",)))))
    while "exec" not in world.kernel.names():
        await asyncio.sleep(0)
    assert not await world.commands.finished(0.0)
    gate.set()
    await running
    assert await world.commands.finished(0.0)
    await world.sandboxes.evacuate("stopping")
    assert world.left() == NOTHING


async def test_listing_shows_a_project_its_own_by_label(world: World) -> None:
    await world.place("a", request=CreateSandbox(base="base@1", labels={"run": "7"}))
    await world.place("b")
    await world.place("c", project="q")
    request = world.ask("x", ListNodeSandboxes(project="p", labels={"run": "7"}))
    found = await world.sandboxes.list(request)
    assert [info.sandbox_id for info in found.sandboxes] == ["n1.a"]
    everything = await world.sandboxes.list(world.ask("x", ListNodeSandboxes(project="p")))
    assert [info.sandbox_id for info in everything.sandboxes] == ["n1.a", "n1.b"]


async def test_references_are_asked_for_again_when_any_of_them_has_changed(world: World) -> None:
    await world.place("a")
    await world.place("b")
    assert world.layers.asked == ["base@1", "tool@1"]
    world.layers.references_version = "2"
    await world.place("c")
    assert world.layers.asked == ["base@1", "tool@1"] * 2


async def test_a_message_that_names_the_same_layer_twice_is_invalid(world: World) -> None:
    request = CreateSandbox(base="base@1", toolkits=("tool@1", "tool@1"))
    assert (await refused(world.place(request=request))).code is ErrorCode.INVALID


def test_events_of_a_sandbox_are_on_its_projects_subjects() -> None:
    subject = subjects.sandbox_event("p", subjects.ScopedId(NODE, "s1"), "ended")
    assert subject == "dsec.v1.p.evt.sandbox.n1.s1.ended"
