"""An agent behind its dependencies is paused, synchronised and resumed."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from dsec_common.consistency import keep_consistent
from dsec_common.errors import DsecError, unavailable


@dataclass
class RecordingAgent:
    failure: DsecError | None = None
    steps: list[str | int] = field(default_factory=list)

    async def pause(self, reason: str) -> None:
        self.steps.append(reason)

    async def synchronise(self, version_ms: int) -> None:
        if self.failure is not None:
            raise self.failure
        self.steps.append(version_ms)

    async def resume(self) -> None:
        self.steps.append("resume")


async def test_a_consistent_agent_is_not_touched() -> None:
    agent = RecordingAgent()
    assert await keep_consistent(agent, 1_250, {"prices": 1_200}) == 1_250
    assert agent.steps == []


async def test_one_that_is_behind_stands_still_while_it_is_synchronised() -> None:
    agent = RecordingAgent()
    assert await keep_consistent(agent, 1_000, {"prices": 1_200, "orders": 900}) == 1_250
    reason = "its state of 1000 is behind prices: synchronise to 1250"
    assert agent.steps == [reason, 1_250, "resume"]


async def test_one_that_cannot_be_synchronised_does_not_go_on() -> None:
    agent = RecordingAgent(failure=unavailable("the store is away"))
    with pytest.raises(DsecError, match="the store is away"):
        await keep_consistent(agent, 0, {"prices": 1}, clock_tolerance_ms=0)
    assert agent.steps == ["its state of 0 is behind prices: synchronise to 1"]
