from __future__ import annotations

import asyncio

import pytest

from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.retry import until_available
from dsec_common.testing.clock import FakeClock


async def test_sleepers_wake_in_order_at_their_own_moment() -> None:
    clock = FakeClock(now=100.0)
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, delay_s: float) -> None:
        await clock.sleep(delay_s)
        woken.append((name, clock.now()))

    tasks = [asyncio.create_task(sleeper(name, at)) for name, at in (("late", 5.0), ("early", 1.0))]
    await asyncio.sleep(0)
    await clock.advance(3.0)
    assert woken == [("early", 101.0)]
    await clock.advance(2.0)
    assert woken == [("early", 101.0), ("late", 105.0)]
    await asyncio.gather(*tasks)


async def test_a_jump_of_the_wall_clock_wakes_nobody() -> None:
    clock = FakeClock(now=100.0)
    task = asyncio.create_task(clock.sleep(10.0))
    await asyncio.sleep(0)
    clock.jump(3600.0)
    await clock.advance(9.0)
    assert not task.done()
    assert (clock.now(), clock.monotonic()) == (3709.0, 9.0)
    await clock.advance(1.0)
    await task
    assert clock.sleeping == 0


async def test_what_is_not_there_yet_is_asked_for_again_and_another_error_is_raised() -> None:
    clock = FakeClock()
    answers: list[DsecError | str] = [unavailable("away"), unavailable("away"), "here"]

    async def operation() -> str:
        answer = answers.pop(0)
        if isinstance(answer, DsecError):
            raise answer
        return answer

    waiting = asyncio.create_task(until_available("a part", operation, clock))
    while not waiting.done():
        await asyncio.sleep(0)
        await clock.advance(0.2)
    assert await waiting == "here"
    assert clock.monotonic() >= 0.4

    answers = [DsecError(ErrorCode.DENIED, "not yours")]
    with pytest.raises(DsecError, match="not yours"):
        await until_available("a part", operation, clock)
