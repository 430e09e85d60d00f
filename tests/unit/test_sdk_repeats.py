from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dsec.channel import Channel, may_ask_again, wait_before
from dsec_common.errors import MAY_HAVE_HAPPENED, DsecError, ErrorCode
from dsec_common.wire.node import NodeList
from dsec_common.wire.sandbox import CreateSandbox


@pytest.mark.parametrize(
    ("error", "once_only", "repeatable"),
    [
        (DsecError(ErrorCode.EXHAUSTED, "full"), True, True),
        (DsecError(ErrorCode.UNAVAILABLE, "no nodes"), True, True),
        (DsecError(ErrorCode.UNAVAILABLE, "lost", details={MAY_HAVE_HAPPENED: True}), False, True),
        (DsecError(ErrorCode.TIMEOUT, "late"), False, True),
        (DsecError(ErrorCode.EXHAUSTED, "never fits", retryable=False), False, False),
        (DsecError(ErrorCode.INVALID, "no"), False, False),
        (DsecError(ErrorCode.INTERNAL, "broken"), False, False),
    ],
)
def test_a_request_is_sent_again_only_when_that_cannot_do_a_thing_twice(
    error: DsecError, *, once_only: bool, repeatable: bool
) -> None:
    assert may_ask_again(error, repeatable=False) is once_only
    assert may_ask_again(error, repeatable=True) is repeatable


def test_the_server_says_how_long_to_wait_else_the_wait_grows_to_a_limit() -> None:
    told = DsecError(ErrorCode.EXHAUSTED, "full", retry_after_s=4.0)
    assert 3.0 <= wait_before(1, told) <= 5.0
    silent = DsecError(ErrorCode.EXHAUSTED, "full")
    assert wait_before(1, silent) < wait_before(4, silent)
    assert wait_before(30, silent) <= 2.5


class FullPlatform:
    """A bus on which every request is refused at once, noting what was asked."""

    def __init__(self, wait_s: float) -> None:
        self.asked: list[tuple[CreateSandbox, float]] = []
        self._wait_s = wait_s

    async def request(
        self, _subject: str, message: CreateSandbox, _reply: Any, *, timeout_s: float
    ) -> Any:
        self.asked.append((message, timeout_s))
        raise DsecError(ErrorCode.EXHAUSTED, "full", retry_after_s=self._wait_s)


async def test_another_attempt_asks_for_no_more_time_than_is_left() -> None:
    bus: Any = FullPlatform(wait_s=0.05)
    channel = Channel(bus, "default")
    with pytest.raises(DsecError, match="full"):
        await channel.ask(
            "create",
            CreateSandbox(base="b@1", timeout_s=0.3),
            NodeList,
            timeout_s=0.3,
            shortened=lambda left_s: CreateSandbox(base="b@1", timeout_s=left_s),
        )
    first, *others = bus.asked
    assert first[0].timeout_s == 0.3
    assert others
    for message, waited_for_s in others:
        assert message.timeout_s == waited_for_s < 0.3


class SilentPlatform:
    """A bus on which those who are asked are killed before they answer."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    async def request(
        self, _subject: str, message: CreateSandbox, _reply: Any, *, timeout_s: float
    ) -> Any:
        self.asked.append(message.timeout_s)
        await asyncio.sleep(timeout_s)
        raise DsecError(ErrorCode.TIMEOUT, "no reply")


async def test_who_is_asked_after_a_silence_refuses_before_its_caller_has_stopped_waiting() -> None:
    bus: Any = SilentPlatform()
    with pytest.raises(DsecError, match="no reply"):
        await Channel(bus, "default").ask(
            "create",
            CreateSandbox(base="b@1", timeout_s=0.3, idempotency_key="one"),
            NodeList,
            timeout_s=0.3,
            repeatable=True,
            patience_s=0.1,
            shortened=lambda left_s: CreateSandbox(base="b@1", timeout_s=left_s),
        )
    first, *others = bus.asked
    assert first == 0.3
    assert others
    assert others == sorted(others, reverse=True)
    assert max(others) < 0.3
