"""The answers of a group's trainer to one shard: what waits travels together, batch after batch."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any, Final, NamedTuple

import msgspec

from dsec.channel import Channel
from dsec_common import subjects
from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.wire.rollout_group import AnswerSteps, StepAnswer, StepsAnswered

_ANSWERS_AT_ONCE: Final = 256
_BYTES_AT_ONCE: Final = 256 * 1024
#: A request without an answer is sent again: the owner of the shard may have died. What it asks
#: for happens once, since a step has one answer.
_ATTEMPT_S: Final = 1.5
_PAUSE_S: Final = 0.1


class _Waiting(NamedTuple):
    answer: StepAnswer
    size: int
    outcome: asyncio.Future[DsecError | None]


def is_fenced(error: DsecError) -> bool:
    """Return whether an error says that another trainer has taken the group over."""
    return error.code is ErrorCode.CONFLICT and error.details.get("reason") == "fenced"


class Answers:
    """Sends answers until it fails; :meth:`run` does the work."""

    def __init__(
        self, channel: Channel, group: str, fence: int, shard: str, patience_s: float
    ) -> None:
        self._channel = channel
        self._group = group
        self._fence = fence
        self._subject = subjects.group(channel.project, shard, "answer")
        self._patience_s = patience_s
        self._waiting: deque[_Waiting] = deque()
        self._sending: list[_Waiting] = []
        self._came = asyncio.Event()
        self._failed: DsecError | None = None

    def give(self, answer: StepAnswer) -> asyncio.Future[DsecError | None]:
        """Queue an answer; the future says what became of it, None when it is durable."""
        outcome: asyncio.Future[DsecError | None] = asyncio.get_running_loop().create_future()
        if self._failed is not None:
            outcome.set_result(self._failed)
            return outcome
        try:
            packed = msgspec.msgpack.encode(answer.payload)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            outcome.set_result(invalid(f"the answer is not a JSON value: {error}"))
            return outcome
        answer = msgspec.structs.replace(answer, payload=msgspec.Raw(packed))
        self._waiting.append(_Waiting(answer, len(packed), outcome))
        self._came.set()
        return outcome

    def fail(self, error: DsecError) -> None:
        """Tell all that wait, and all that come."""
        self._failed = self._failed or error
        for waiting in (*self._sending, *self._waiting):
            _tell(waiting, self._failed)
        self._waiting.clear()

    async def run(self) -> None:
        """Send what waits, for ever.

        Raises:
            DsecError: ``conflict`` when another trainer is newer; ``unavailable`` when nobody
                answered for ``patience_s``.
        """
        while True:
            while not self._waiting:
                self._came.clear()
                await self._came.wait()
            self._sending = self._next_batch()
            await self._send(self._sending)
            self._sending = []

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        size = 0
        while self._waiting and len(batch) < _ANSWERS_AT_ONCE:
            size += self._waiting[0].size
            if batch and size > _BYTES_AT_ONCE:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _send(self, batch: list[_Waiting]) -> None:
        try:
            reply = await self._ask([waiting.answer for waiting in batch])
        except DsecError as error:
            if is_fenced(error) or error.retryable or error.code is ErrorCode.NOT_FOUND:
                raise
            for waiting in batch:
                _tell(waiting, error)
            return
        for waiting, outcome in zip(batch, reply.outcomes, strict=True):
            _tell(waiting, None if outcome.error is None else outcome.error.to_error())

    async def _ask(self, answers: list[StepAnswer]) -> StepsAnswered:
        message = AnswerSteps(group=self._group, fence=self._fence, answers=tuple(answers))
        give_up_at = time.monotonic() + self._patience_s
        while True:
            try:
                return await self._channel.bus.request(
                    self._subject, message, StepsAnswered, timeout_s=_ATTEMPT_S
                )
            except DsecError as error:
                if not error.retryable or time.monotonic() > give_up_at:
                    raise
            await asyncio.sleep(_PAUSE_S)


def _tell(waiting: _Waiting, outcome: Any) -> None:
    if not waiting.outcome.done():
        waiting.outcome.set_result(outcome)
