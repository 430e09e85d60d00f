"""The way from an agent socket to the platform: Chronus for rollouts, the step log for the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final, Protocol, TypeVar

import msgspec

from dsec_common import subjects
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.subjects import ScopedId
from dsec_common.wire.base import Message
from dsec_common.wire.rollout import (
    AwaitFeedback,
    FeedbackState,
    InspectRollout,
    RolloutInfo,
    StageAccepted,
    StageReport,
    StepRollout,
)
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.shard_news import ShardNews

_FIRST_PAUSE_S: Final = 0.05
_LAST_PAUSE_S: Final = 1.0
#: A request that got no answer in this time is sent again: the shard's owner may have died.
_ATTEMPT_S: Final = 5.0
#: Chronus is asked to wait so long at a time, so that a dead owner is noticed.
_WAIT_SLICE_S: Final = 20.0

ReplyT = TypeVar("ReplyT", bound=Message)


class AgentGateway(Protocol):
    """What the agent sockets need of the platform. Every call may be repeated."""

    async def inspect(self, record: SandboxRecord, deadline: float) -> RolloutInfo:
        """Return how far the rollout has come."""
        ...

    async def report(
        self, record: SandboxRecord, seq: int, stage: str, payload: bytes, deadline: float
    ) -> bool:
        """Make a report durable; return whether it was there before. ``payload`` is packed."""
        ...

    async def step(
        self,
        record: SandboxRecord,
        seq: int,
        stage: str,
        payload: bytes,
        *,
        deadline: float,
        away_until: float,
    ) -> FeedbackState:
        """Make a report durable and return its feedback, or that it is not ready at ``deadline``.

        ``payload`` is packed, and held until then. It is tried until ``away_until`` to make the
        report durable, however short the wait for its feedback.
        """
        ...

    async def await_feedback(
        self, record: SandboxRecord, seq: int, deadline: float
    ) -> FeedbackState:
        """Return the feedback to a report, or that it is not ready at ``deadline``."""
        ...

    def reserve(self, record: SandboxRecord, count: int) -> None:
        """Number the sandbox's next steps, which follow before anything is awaited."""
        ...

    def log(
        self,
        record: SandboxRecord,
        action: str,
        *,
        status: str,
        latency_ms: float,
        attributes: Mapping[str, str],
        tokens_in: int = 0,
        tokens_out: int = 0,
        stage: str = "",
    ) -> None:
        """Write one step of the sandbox; never waits, never fails."""
        ...


class Asker(Protocol):
    """The part of the bus that asks."""

    async def request(
        self, subject: str, message: Message, reply_type: type[ReplyT], *, timeout_s: float
    ) -> ReplyT:
        """Send a message and return the reply."""
        ...


class StepWriter(Protocol):
    """The part of the step log that is written to."""

    def reserve(self, local: str, count: int) -> None:
        """Keep the numbers of the next steps."""
        ...

    def step(
        self,
        record: SandboxRecord,
        action: str,
        *,
        status: str = "ok",
        latency_ms: float = 0.0,
        attributes: Mapping[str, str] | None = None,
        tokens_in: int = 0,
        tokens_out: int = 0,
        stage: str = "",
    ) -> None:
        """Write one step of a sandbox."""
        ...


class ChronusGateway:
    """Speaks to the owner of the rollout's shard over the bus, again while it is away.

    A report is known by its number, so asking again is safe. ``deadline`` is monotonic time.
    """

    def __init__(
        self,
        bus: Asker,
        steps: StepWriter,
        node: str,
        clock: Clock,
        news: ShardNews | None = None,
    ) -> None:
        """Take the parts; without ``news`` a dead owner is noticed by its silence."""
        self._bus = bus
        self._news = news
        self._steps = steps
        self._node = node
        self._clock = clock

    async def inspect(self, record: SandboxRecord, deadline: float) -> RolloutInfo:
        """Return how far the rollout has come.

        Raises:
            DsecError: ``not_found`` without such a rollout; ``unavailable`` at the deadline.
        """
        return await self._ask(record, "inspect", InspectRollout(), RolloutInfo, deadline)

    async def report(
        self, record: SandboxRecord, seq: int, stage: str, payload: bytes, deadline: float
    ) -> bool:
        """Make a report durable; return whether it was there before.

        Raises:
            DsecError: what Chronus refuses; ``unavailable`` at the deadline.
        """
        report = StageReport(
            seq=seq,
            stage=stage,
            payload=msgspec.Raw(payload),
            sandbox_id=str(record.scoped_id(self._node)),
        )
        accepted = await self._ask(record, "report", report, StageAccepted, deadline)
        return accepted.duplicate

    async def step(
        self,
        record: SandboxRecord,
        seq: int,
        stage: str,
        payload: bytes,
        *,
        deadline: float,
        away_until: float,
    ) -> FeedbackState:
        """Make a report durable and return its feedback, or that it is not ready at ``deadline``.

        Raises:
            DsecError: what Chronus refuses; ``unavailable`` when it was away at ``away_until``.
        """
        sandbox_id = str(record.scoped_id(self._node))

        def message(wait_s: float) -> Message:
            return StepRollout(
                seq=seq,
                stage=stage,
                payload=msgspec.Raw(payload),
                sandbox_id=sandbox_id,
                wait_s=wait_s,
            )

        return await self._ask_until_ready(record, "step", message, deadline, away_until)

    async def await_feedback(
        self, record: SandboxRecord, seq: int, deadline: float
    ) -> FeedbackState:
        """Return the feedback to a report, or that it is not ready at ``deadline``.

        Raises:
            DsecError: what Chronus refuses; ``unavailable`` when it was away at the deadline.
        """
        return await self._ask_until_ready(
            record,
            "await",
            lambda wait_s: AwaitFeedback(seq=seq, wait_s=wait_s),
            deadline,
            deadline,
        )

    async def _ask_until_ready(
        self,
        record: SandboxRecord,
        verb: str,
        message: Callable[[float], Message],
        deadline: float,
        away_until: float,
    ) -> FeedbackState:
        while True:
            began = self._clock.monotonic()
            wait_s = min(max(deadline - began, 0.0), _WAIT_SLICE_S)
            feedback = await self._ask(
                record, verb, message(wait_s), FeedbackState, away_until, wait_s=wait_s
            )
            now = self._clock.monotonic()
            if feedback.ready or now >= deadline:
                return feedback
            if now - began < _FIRST_PAUSE_S:  # an owner that does not wait must not be hammered
                await self._clock.sleep(_FIRST_PAUSE_S)

    def reserve(self, record: SandboxRecord, count: int) -> None:
        """Number the sandbox's next steps, which follow before anything is awaited."""
        self._steps.reserve(record.local, count)

    def log(
        self,
        record: SandboxRecord,
        action: str,
        *,
        status: str,
        latency_ms: float,
        attributes: Mapping[str, str],
        tokens_in: int = 0,
        tokens_out: int = 0,
        stage: str = "",
    ) -> None:
        """Write one step of the sandbox; never waits, never fails."""
        self._steps.step(
            record,
            action,
            status=status,
            latency_ms=latency_ms,
            attributes=attributes,
            tokens_in=tokens_in,
            tokens_out=tokens_out,
            stage=stage,
        )

    async def _ask(
        self,
        record: SandboxRecord,
        verb: str,
        message: Message,
        reply_type: type[ReplyT],
        deadline: float,
        *,
        wait_s: float = 0.0,
    ) -> ReplyT:
        shard, subject = _address(record.project, record.rollout_id, verb)
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await self._bus.request(
                    subject, message, reply_type, timeout_s=wait_s + _ATTEMPT_S
                )
            except DsecError as error:
                if not error.retryable:
                    raise
                if self._clock.monotonic() + pause_s > deadline:
                    raise _away(record.rollout_id, error) from error
                await self._pause(shard, max(pause_s, min(error.retry_after_s, _LAST_PAUSE_S)))
            pause_s = min(pause_s * 2, _LAST_PAUSE_S)

    async def _pause(self, shard: str, pause_s: float) -> None:
        if self._news is None:
            await self._clock.sleep(pause_s)
        else:
            await self._news.wait(shard, pause_s)


@lru_cache(maxsize=16_384)
def _address(project: str, rollout_id: str, verb: str) -> tuple[str, str]:
    """Return a rollout's shard, and the subject of a request to it."""
    scoped = ScopedId.parse(rollout_id, "rollout id")
    return scoped.owner, subjects.rollout_system(project, scoped, verb)


def _away(rollout_id: str, error: DsecError) -> DsecError:
    if error.code is ErrorCode.EXHAUSTED:
        return error
    return unavailable(
        f"rollout {rollout_id} cannot be reached now ({error.message}); ask again with the same "
        "seq",
        rollout_id=rollout_id,
    )
