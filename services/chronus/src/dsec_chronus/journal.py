"""One shard's journal: a subject of a JetStream stream that only its owner can append to.

Every append names the subject's last sequence (the fence). A process that takes the shard appends
an empty frame first; from then on whatever an earlier owner still sends is refused. A refusal may
also mean that our own acknowledgement got lost, which the last frame's epoch and number tell.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable
from typing import Final

import msgspec
import structlog

from dsec_chronus.effects import WriteFrame
from dsec_chronus.records import Frame
from dsec_common import subjects
from dsec_common.bus import Bus, StreamSpec
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.wire.base import decode, new_id

log = structlog.get_logger()

STREAM: Final = "chronus-journal"

_ATTEMPT_S: Final = 1.0
_PAUSE_S: Final = 0.05
_NO_MESSAGE_FOUND: Final = 10037
_doubtful: Final = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.TIMEOUT})


class FencedError(Exception):
    """The shard is another's, or may be: this journal must not be written any more."""


def journal_stream(replicas: int) -> StreamSpec:
    """Return the stream that holds all journals.

    It has no limit of its own, since dropping the oldest would lose rollouts: each shard bounds
    what it holds, and a snapshot drops what came before it.
    """
    return StreamSpec(
        name=STREAM,
        subjects=(subjects.ROLLOUT_JOURNALS,),
        refuse_when_full=True,
        replicas=replicas,
    )


class Journal:
    """The journal of one shard during one ownership.

    Args:
        bus: a connected bus.
        shard: whose journal.
        clock: for pauses between attempts.
        is_owner: whether the lease still runs; an append in doubt is given up when it does not.
    """

    def __init__(self, bus: Bus, shard: str, clock: Clock, is_owner: Callable[[], bool]) -> None:
        self.epoch = new_id()
        self._bus = bus
        self._subject = subjects.rollout_journal(shard)
        self._clock = clock
        self._is_owner = is_owner
        self._sequence = 0
        self._number = 0

    async def take(self) -> AsyncIterator[tuple[int, Frame]]:
        """Yield every frame with its sequence, oldest first, and make the journal ours.

        When it ends, all frames that anyone was told to be durable have been yielded, and no
        earlier owner can add another.

        Raises:
            DsecError: ``unavailable`` or ``timeout`` when JetStream does not answer.
            FencedError: the lease ran out meanwhile.
        """
        while True:
            while found := await self._bus.read(STREAM, self._subject, self._sequence + 1):
                for sequence, body in found:
                    self._sequence = sequence
                    yield sequence, decode(body, Frame)
            if await self._begin_epoch():
                return

    async def _begin_epoch(self) -> bool:
        """Append the frame that fences earlier owners; False when one of them was faster."""
        before = self._sequence
        try:
            await self._append(Frame(epoch=self.epoch, number=0))
        except FencedError:
            if not self._is_owner():
                raise
            self._sequence = before
            return False
        return True

    async def append(self, wanted: WriteFrame) -> int:
        """Append a frame and return its sequence once it is durable.

        Raises:
            FencedError: the shard is another's, or the lease ran out while the outcome was in
                doubt.
            DsecError: JetStream refused it; it is not in the journal.
        """
        self._number += 1
        return await self._append(
            Frame(
                epoch=self.epoch,
                number=self._number,
                records=wanted.records,
                snapshot_part=wanted.snapshot_part,
                snapshot_complete=wanted.snapshot_complete,
            )
        )

    async def _append(self, frame: Frame) -> int:
        while True:
            try:
                self._sequence = await self._bus.js_publish(
                    self._subject,
                    frame,
                    expected_last_subject_sequence=self._sequence,
                    timeout_s=_ATTEMPT_S,
                )
            except DsecError as error:
                if error.code not in _doubtful:
                    return await self._resolve(frame, error)
                log.warning("a frame is in doubt", subject=self._subject, error=error.message)
            else:
                return self._sequence
            if not self._is_owner():
                raise FencedError(f"the lease ran out while {self._subject} did not answer")
            # The same frame with the same expectation: it can be appended once at most.
            await self._clock.sleep(_PAUSE_S)

    async def _resolve(self, frame: Frame, refusal: DsecError) -> int:
        """Find out whether a frame that was refused had been appended by an earlier attempt."""
        last = await self._last()
        if last is not None and (last[1].epoch, last[1].number) == (frame.epoch, frame.number):
            self._sequence = last[0]
            return self._sequence
        if refusal.code is not ErrorCode.CONFLICT and (last[0] if last else 0) == self._sequence:
            raise refusal
        raise FencedError(f"another process has written to {self._subject}")

    async def _last(self) -> tuple[int, Frame] | None:
        while True:
            try:
                return await self._read_last()
            except DsecError as error:
                if error.code not in _doubtful or not self._is_owner():
                    raise FencedError(f"cannot read {self._subject}: {error.message}") from error
            await self._clock.sleep(_PAUSE_S)

    async def _read_last(self) -> tuple[int, Frame] | None:
        """Return the last frame, as the stream's leader knows it; None without one."""
        body = msgspec.json.encode({"last_by_subj": self._subject})
        answer = msgspec.json.decode(
            await self._bus.request_raw(f"$JS.API.STREAM.MSG.GET.{STREAM}", body)
        )
        if (error := answer.get("error")) is not None:
            if error.get("err_code") == _NO_MESSAGE_FOUND:
                return None
            raise unavailable(
                f"cannot read {self._subject}: JetStream says {error.get('description')}"
            )
        message = answer["message"]
        return int(message["seq"]), decode(base64.b64decode(message["data"]), Frame)

    async def purge_before(self, sequence: int) -> None:
        """Drop the frames before ``sequence``; what is not dropped now is with the next snapshot.

        Raises:
            DsecError: ``unavailable`` or ``timeout``.
        """
        body = msgspec.json.encode({"filter": self._subject, "seq": sequence})
        answer = msgspec.json.decode(
            await self._bus.request_raw(f"$JS.API.STREAM.PURGE.{STREAM}", body)
        )
        if (error := answer.get("error")) is not None:
            raise unavailable(
                f"cannot purge {self._subject}: JetStream says {error.get('description')}"
            )
