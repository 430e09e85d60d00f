"""Reasons for those who wait: thousands at once take no more than a part of a scheduler's time."""

from __future__ import annotations

import asyncio

import pytest

from dsec_common.compute.model import GpuDemand, ServiceClass
from dsec_common.testing.clock import FakeClock
from dsec_common.wire.waiting import WaitingExplained
from dsec_scheduler.asks import Ask
from dsec_scheduler.reasons import Reasons

LOOK_S = 0.04
"""What a look among thousands takes."""


class Looks:
    """An explanation that takes its time, and how often it was asked for."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.count = 0
        self.reasons = Reasons(self.clock, self.look)

    def look(self, ask: Ask) -> WaitingExplained:
        self.count += 1
        self.clock._pass(LOOK_S)
        return WaitingExplained(
            request_id=ask.request_id,
            service_class=ask.service_class,
            priority=0,
            waited_s=0.0,
            ahead=0,
            constraint="capacity",
            reason=f"look {self.count}",
        )


@pytest.fixture
def looks() -> Looks:
    return Looks()


def ask(number: int, cu: float = 50.0) -> Ask:
    demand = GpuDemand(min_cu=cu, max_cu=cu)
    return Ask(number, f"r{number}", "p", (demand,), 0.0, ServiceClass.STANDARD)


def test_those_who_ask_for_the_same_share_a_reason_for_a_moment(looks: Looks) -> None:
    told = {looks.reasons.at_once(ask(number)) for number in range(8000)}
    assert {why.reason for why in told if why} == {"look 1"}
    assert None not in told
    looks.clock._pass(2.0)
    again = looks.reasons.at_once(ask(1))
    assert again is not None
    assert again.reason == "look 2"


def test_of_those_who_ask_for_unlike_things_few_are_looked_into(looks: Looks) -> None:
    began = looks.clock.monotonic()
    told = [looks.reasons.at_once(ask(number, cu=1.0 + number / 1000)) for number in range(8000)]
    assert looks.clock.monotonic() - began == pytest.approx(LOOK_S)
    assert sum(why is not None for why in told) == 1


async def test_who_asks_for_its_own_reason_waits_for_its_turn(looks: Looks) -> None:
    asked = [asyncio.create_task(looks.reasons.exactly(ask(number))) for number in range(3)]
    await asyncio.sleep(0)
    for done in (1, 2, 3):
        assert sum(it.done() for it in asked) == done
        await looks.clock.advance(5 * LOOK_S)
    assert [it.result().request_id for it in asked] == ["r0", "r1", "r2"]
