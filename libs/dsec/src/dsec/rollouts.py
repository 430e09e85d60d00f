"""The trainer's side of rollouts: stages come in order, each gets its feedback."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, Final

import msgspec

from dsec.channel import Channel
from dsec.checkpoints import Checkpointed
from dsec.rollout_groups import RolloutGroup
from dsec_common import subjects
from dsec_common.errors import DsecError
from dsec_common.subjects import ScopedId
from dsec_common.wire.base import new_id
from dsec_common.wire.rollout import (
    CloseRollout,
    FeedbackAccepted,
    InspectRollout,
    NextStages,
    OpenRollout,
    RolloutInfo,
    RolloutOpened,
    RolloutState,
    SendFeedback,
    StageBatch,
    StageReport,
)
from dsec_common.wire.rollout_stream import FeedbackTaken, StreamFeedback

_TIMEOUT_S: Final = 30.0
#: The owner of a shard may change while we wait; a request is answered this much later at most.
_MARGIN_S: Final = 10.0
_ATTEMPTS: Final = 20
_STREAM_TIMEOUT_S: Final = 3.0


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One report of the process in the sandbox, waiting for its feedback.

    Attributes:
        rollout: where it belongs.
        seq: its number, from 1.
        name: what stage the process says it has reached.
        payload: any JSON value.
        sandbox_id: the sandbox that reported.
    """

    rollout: Rollout
    seq: int
    name: str
    payload: Any
    sandbox_id: str

    async def reply(
        self, payload: Any = None, *, reward: float | None = None, done: bool = False
    ) -> None:
        """Answer this report; see :meth:`Rollout.feedback`."""
        await self.rollout.feedback(self.seq, payload, reward=reward, done=done)


class Rollout(Checkpointed):
    """A rollout's handle. It holds no state but numbers: another process may go on with the id.

    Attributes:
        id: ``<shard>.<local>``; given to ``create_sandbox(rollout_id=…)``.
        fence: of the trainer whose group it was got from; 0 when it was got by its id.
    """

    def __init__(self, channel: Channel, rollout_id: str, fence: int = 0) -> None:
        self._channel = channel
        self._scoped = ScopedId.parse(rollout_id, "rollout id")
        self.id = rollout_id
        self.fence = fence

    def __repr__(self) -> str:
        return f"Rollout({self.id!r})"

    def _handle(self, rollout_id: str) -> Rollout:
        return Rollout(self._channel, rollout_id)

    def _subject(self, verb: str) -> str:
        return subjects.rollout(self._channel.project, self._scoped, verb)

    async def next(
        self, after_seq: int = 0, *, wait_s: float = 30.0, limit: int = 64
    ) -> StageBatch:
        """Return the reports after ``after_seq``, waiting up to ``wait_s`` for the first.

        The same call twice gives the same reports: nothing is consumed by reading.
        """
        return await self._channel.ask(
            self._subject("next"),
            NextStages(after_seq=after_seq, wait_s=wait_s, limit=limit),
            StageBatch,
            timeout_s=wait_s + _MARGIN_S,
            repeatable=True,
            attempts_max=_ATTEMPTS,
        )

    async def stages(
        self, *, after_seq: int = 0, wait_s: float = 30.0, patience_s: float = 120.0
    ) -> AsyncIterator[Stage]:
        """Yield every report after ``after_seq`` in order, until the rollout is closed.

        It goes on by sequence number after a lost connection or a change of the shard's owner, so
        no report is missed and none comes twice.

        Args:
            after_seq: the last report that the caller has dealt with: after a rollback its
                ``last_seq``, in a trainer that was started again what :meth:`inspect` tells as
                ``answered_seq``. With 0 reports that have feedback come again.
            wait_s: how long one request to Chronus waits.
            patience_s: how long Chronus may be unreachable before the error is raised.
        """
        reports = self.reports(after_seq=after_seq, wait_s=wait_s, patience_s=patience_s)
        async with aclosing(reports):
            async for report in reports:
                yield self._stage(report)

    async def reports(
        self, *, after_seq: int = 0, wait_s: float = 30.0, patience_s: float = 120.0
    ) -> AsyncGenerator[StageReport, None]:
        """Yield what :meth:`stages` yields as it was sent, with the time at which it was taken."""
        failing_since = 0.0
        while True:
            try:
                batch = await self.next(after_seq, wait_s=wait_s)
            except DsecError as error:
                now = time.monotonic()
                failing_since = failing_since or now
                if not error.retryable or now - failing_since > patience_s:
                    raise
                continue
            failing_since = 0.0
            for report in batch.reports:
                after_seq = report.seq
                yield report
            if not batch.reports and batch.state is RolloutState.CLOSED:
                return

    def _stage(self, report: StageReport) -> Stage:
        return Stage(
            rollout=self,
            seq=report.seq,
            name=report.stage,
            payload=report.payload,
            sandbox_id=report.sandbox_id,
        )

    async def feedback(
        self, seq: int, payload: Any = None, *, reward: float | None = None, done: bool = False
    ) -> bool:
        """Answer report ``seq``; return False when the same feedback was already there.

        Args:
            seq: the report's number.
            payload: any JSON value, at most 256 KiB.
            reward: this step's reward.
            done: tells the agent to stop.

        Raises:
            DsecError: ``conflict`` when the report has other feedback already, ``invalid`` when
                there is no such report or the payload is too large, ``expired`` when closed.
        """
        reply = await self._channel.ask(
            self._subject("feedback"),
            SendFeedback(seq=seq, payload=payload, reward=reward, done=done),
            FeedbackAccepted,
            timeout_s=_TIMEOUT_S,
            # Known again by its number and content.
            repeatable=True,
            attempts_max=_ATTEMPTS,
        )
        return not reply.duplicate

    async def stream_feedback(
        self, seq: int, stream: str, data: bytes, *, offset: int, headers: Mapping[str, str]
    ) -> int:
        """Tell the sandbox's node what the feedback to report ``seq`` is going to hold.

        Nothing of it is kept: the feedback has to say it all, and nothing else. It is not asked
        again by itself: who sends the next piece sends what is missing.

        Args:
            seq: the report's number.
            stream: names the sample; pieces of another one do not go on with it.
            data: more of the body.
            offset: how much of it came before.
            headers: of the response.

        Returns:
            How many bytes of the stream the node has taken.

        Raises:
            DsecError: ``not_found`` or ``expired`` when nobody waits there.
        """
        reply = await self._channel.bus.request(
            self._subject("stream"),
            StreamFeedback(seq=seq, stream=stream, data=data, offset=offset, headers=dict(headers)),
            FeedbackTaken,
            timeout_s=_STREAM_TIMEOUT_S,
        )
        return reply.size

    async def inspect(self) -> RolloutInfo:
        """Return the rollout's state, its newest numbers and its total reward."""
        return await self._channel.ask(
            self._subject("inspect"),
            InspectRollout(),
            RolloutInfo,
            timeout_s=_TIMEOUT_S,
            repeatable=True,
            attempts_max=_ATTEMPTS,
        )

    async def close(self) -> RolloutInfo:
        """Close it: it takes no more reports or feedback. Closing twice is closing once."""
        return await self._channel.ask(
            self._subject("close"),
            CloseRollout(fence=self.fence),
            RolloutInfo,
            timeout_s=_TIMEOUT_S,
            repeatable=True,
            attempts_max=_ATTEMPTS,
        )


class Rollouts:
    """The project's rollouts."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def open(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        idempotency_key: str = "",
        checkpoint_every: int = 0,
        durable_checkpoints: bool = False,
    ) -> Rollout:
        """Open a rollout and return its handle.

        Args:
            labels: the caller's own.
            idempotency_key: the same key returns the same rollout.
            checkpoint_every: a checkpoint is made after each so many reports, before the feedback
                to the last of them goes out; 0 makes none by itself.
            durable_checkpoints: they are such that another node goes on by itself from the newest
                when the sandbox's node is lost.
        """
        reply = await self._channel.ask(
            subjects.rollout_open(self._channel.project),
            # A key of its own makes it safe to ask again: the journal is written anyway.
            OpenRollout(
                labels=dict(labels or {}),
                idempotency_key=idempotency_key or new_id(),
                checkpoint_every=checkpoint_every,
                durable_checkpoints=durable_checkpoints,
            ),
            RolloutOpened,
            timeout_s=_TIMEOUT_S,
            repeatable=True,
            attempts_max=_ATTEMPTS,
        )
        return Rollout(self._channel, reply.rollout_id)

    def group(
        self,
        name: str,
        tasks: Iterable[Any],
        *,
        labels: Mapping[str, str] | None = None,
        window: int = 4096,
        patience_s: float = 120.0,
        checkpoint_every: int = 0,
        durable_checkpoints: bool = False,
    ) -> RolloutGroup:
        """Return a group of rollouts, one for each task; nothing is asked before it is entered.

        Args:
            name: the group's, and so this trainer's: the same name and place in the list is the
                same rollout, and the newest trainer of a name is the only one.
            tasks: any JSON value each, at most 256 KiB.
            labels: the caller's own, of each rollout.
            window: how many steps without an answer are held here; beyond it agents wait.
            patience_s: how long Chronus may be away before the stream of steps ends with the error.
            checkpoint_every: as of :meth:`open`, for each rollout.
            durable_checkpoints: as of :meth:`open`.
        """
        return RolloutGroup(
            self._channel,
            name,
            tasks,
            partial(Rollout, self._channel),
            labels=labels or {},
            window=window,
            patience_s=patience_s,
            checkpoint_every=checkpoint_every,
            durable_checkpoints=durable_checkpoints,
        )

    def get(self, rollout_id: str) -> Rollout:
        """Return the handle of a rollout by its id; nothing is asked."""
        return Rollout(self._channel, rollout_id)
