"""Time limits of one loop: the earliest first, those taken back never, whatever their number."""

from __future__ import annotations

import asyncio

from dsec_common.timers import Timers, timers_of


async def fired(timers: Timers, delay_s: float, told: list[float]) -> None:
    over = asyncio.get_running_loop().create_future()

    def tell() -> None:
        told.append(delay_s)
        over.set_result(None)

    timers.call_later(delay_s, tell)
    await over


async def test_those_that_are_due_call_in_their_order() -> None:
    timers = Timers(asyncio.get_running_loop())
    told: list[float] = []
    await asyncio.gather(*(fired(timers, delay_s, told) for delay_s in (0.03, 0.01, 0.02)))
    assert told == [0.01, 0.02, 0.03]


async def test_one_that_was_taken_back_never_calls_and_the_next_does() -> None:
    timers = Timers(asyncio.get_running_loop())
    told: list[float] = []
    first = timers.call_later(0.001, lambda: told.append(0.001))
    waiting = asyncio.ensure_future(fired(timers, 0.01, told))
    first.cancel()
    first.cancel()
    await waiting
    assert told == [0.01]
    assert not first.is_set


async def test_those_that_were_taken_back_are_thrown_out() -> None:
    timers = Timers(asyncio.get_running_loop())
    told: list[float] = []
    for _ in range(10_000):
        timers.call_later(3600.0, lambda: None).cancel()
    assert len(timers._heap) < 1000
    await fired(timers, 0.0, told)
    assert told == [0.0]


async def test_one_that_raises_holds_up_no_other() -> None:
    loop = asyncio.get_running_loop()
    timers = timers_of(loop)
    errors: list[BaseException] = []
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    told: list[float] = []
    timers.call_later(0.0, lambda: 1 // 0)
    await fired(timers, 0.001, told)
    assert told == [0.001]
    assert [type(error) for error in errors] == [ZeroDivisionError]
    assert timers_of(loop) is timers
