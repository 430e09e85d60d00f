"""Whoever was asked was killed and answers nothing: the SDK asks again, or says what is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dsec.channel import Channel
from dsec.sandbox import Sandbox
from dsec_common import subjects
from dsec_common.bus import Bus, Request
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.subjects import ScopedId
from dsec_common.testing.nats import nats_for_tests
from dsec_common.wire.base import Message
from dsec_common.wire.sandbox import (
    DeleteSandbox,
    EndCause,
    ExecCommand,
    ExecResult,
    InspectSandbox,
    SandboxDeleted,
    SandboxInfo,
    SandboxState,
)

NODE = "node-1"
ID = f"{NODE}.one"


class SilentNode:
    """A node that answers its first requests as a killed one does: not at all."""

    def __init__(self, silences: int) -> None:
        self.silences = silences
        self.daemon_s = 1000.0
        self.asked: list[str] = []
        self.state = SandboxState.RUNNING
        self.paused_s = 0.0
        self.stands_still = False

    async def serve(self, bus: Bus) -> None:
        verbs = {"delete": DeleteSandbox, "exec": ExecCommand, "inspect": InspectSandbox}
        for verb, kind in verbs.items():
            await bus.serve(subjects.any_project_sandbox(NODE, verb), kind, self.answer)
        await bus.flush()

    async def answer(self, request: Request[Any]) -> Message | None:
        verb = request.tokens[-1]
        self.asked.append(verb)
        if verb == "inspect":
            ended = self.state is SandboxState.ENDED
            self.paused_s += 3600.0 * self.stands_still
            return SandboxInfo(
                sandbox_id=ID,
                project=request.project,
                state=self.state,
                created_at=1.0,
                end_cause=EndCause.NODE_RESTARTED if ended else None,
                daemon_s=self.daemon_s,
                paused_s=self.paused_s,
            )
        if self.silences:
            self.silences -= 1
            return None
        if verb == "exec":
            return ExecResult(exit_code=0, signal=None, stdout=b"done", stderr=b"", duration_s=0.0)
        return SandboxDeleted(sandbox_id=ID, end_cause=EndCause.DELETED)


@pytest.fixture
async def buses() -> AsyncIterator[tuple[Bus, Bus]]:
    async with (
        nats_for_tests() as nats,
        nats.service("sandboxd", NODE) as node,
        nats.project("default") as user,
    ):
        yield node, user


async def ask(bus: Bus, *, repeatable: bool, timeout_s: float, patience_s: float) -> SandboxDeleted:
    return await Channel(bus, "default").ask(
        subjects.sandbox("default", ScopedId(NODE, "one"), "delete"),
        DeleteSandbox(),
        SandboxDeleted,
        timeout_s=timeout_s,
        repeatable=repeatable,
        patience_s=patience_s,
    )


async def test_what_may_be_asked_twice_is_asked_again_long_before_its_time_is_over(
    buses: tuple[Bus, Bus],
) -> None:
    node, user = buses
    silent = SilentNode(silences=7)
    await silent.serve(node)
    async with asyncio.timeout(20):
        await ask(user, repeatable=True, timeout_s=60.0, patience_s=0.05)
    assert silent.asked == ["delete"] * 8


async def test_silence_to_the_end_is_a_timeout(buses: tuple[Bus, Bus]) -> None:
    node, user = buses
    silent = SilentNode(silences=1000)
    await silent.serve(node)
    with pytest.raises(DsecError) as caught:
        await ask(user, repeatable=True, timeout_s=1.0, patience_s=0.05)
    assert caught.value.code is ErrorCode.TIMEOUT
    assert len(silent.asked) > 1


async def test_what_must_not_be_done_twice_is_asked_once(buses: tuple[Bus, Bus]) -> None:
    node, user = buses
    silent = SilentNode(silences=1000)
    await silent.serve(node)
    with pytest.raises(DsecError) as caught:
        await ask(user, repeatable=False, timeout_s=0.5, patience_s=0.05)
    assert caught.value.code is ErrorCode.TIMEOUT
    assert silent.asked == ["delete"]


async def test_a_command_whose_sandbox_went_with_its_node_is_over(
    buses: tuple[Bus, Bus], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.one_shot.LOOK_EVERY_S", 0.05)
    monkeypatch.setattr("dsec.one_shot.LAST_WORD_S", 0.05)
    node, user = buses
    silent = SilentNode(silences=1000)
    await silent.serve(node)
    running = asyncio.create_task(
        Sandbox(Channel(user, "default"), ID, None).exec("sleep 3000", timeout_s=3000)
    )
    async with asyncio.timeout(20):
        while silent.asked.count("inspect") < 2:
            await user.flush()
        assert not running.done(), "it runs as long as its sandbox does"
        silent.state = SandboxState.ENDED
        with pytest.raises(DsecError, match="node_restarted") as caught:
            await running
    assert caught.value.code is ErrorCode.EXPIRED
    assert silent.asked.count("exec") == 1


@pytest.mark.parametrize("stands_still", [True, False])
async def test_a_command_is_waited_for_as_long_as_its_sandbox_stands_still(
    buses: tuple[Bus, Bus], monkeypatch: pytest.MonkeyPatch, stands_still: bool
) -> None:
    monkeypatch.setattr("dsec.one_shot.LOOK_EVERY_S", 0.05)
    monkeypatch.setattr("dsec.one_shot._ASK_AGAIN_S", 0.1)
    monkeypatch.setattr("dsec.one_shot.BACKSTOP_S", 2.0)
    node, user = buses
    silent = SilentNode(silences=30)  # three seconds of them
    silent.stands_still = stands_still
    await silent.serve(node)
    running = Sandbox(Channel(user, "default"), ID, None).exec("true", timeout_s=0.1)
    if stands_still:
        assert (await running).stdout == b"done"
        return
    with pytest.raises(DsecError) as caught:
        await running
    assert caught.value.code is ErrorCode.TIMEOUT


async def test_a_command_whose_daemon_is_another_one_now_is_asked_for_again_at_once(
    buses: tuple[Bus, Bus], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.one_shot.LOOK_EVERY_S", 0.05)
    node, user = buses
    silent = SilentNode(silences=1)
    await silent.serve(node)
    running = asyncio.create_task(Sandbox(Channel(user, "default"), ID, None).exec("true"))
    async with asyncio.timeout(10):
        while silent.asked.count("inspect") < 2:
            await user.flush()
        assert silent.asked.count("exec") == 1, "its daemon was there before the command"
        silent.daemon_s = 0.001
        assert (await running).stdout == b"done"
    assert silent.asked.count("exec") == 2


async def test_what_is_asked_while_a_daemon_is_started_again_is_answered_by_the_next(
    buses: tuple[Bus, Bus],
) -> None:
    node, user = buses
    sandbox = Sandbox(Channel(user, "default"), ID, None)
    asking = (asyncio.create_task(sandbox.exec("true")), asyncio.create_task(sandbox.inspect()))
    for _ in range(20):  # each has been told that nobody is there
        await user.flush()
    assert not any(task.done() for task in asking)
    silent = SilentNode(silences=0)
    await silent.serve(node)
    async with asyncio.timeout(10):
        result, info = await asyncio.gather(*asking)
    assert result.stdout == b"done"
    assert info.state is SandboxState.RUNNING
    assert sorted(silent.asked) == ["exec", "inspect"]
