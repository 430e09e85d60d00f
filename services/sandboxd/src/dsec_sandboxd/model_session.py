"""One sandbox's model calls: reported to its rollout, and answered with what comes back.

A harness that repeats a request whose answer it may not have got is given that answer: while it is
under way it is waited for again, and after that the trainer's side is told that this is a
repetition and answers from its record. What tells a repetition from a wish for another sample is
whether the answer was handed to the harness before.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Final

import msgspec
import structlog

from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode, not_found
from dsec_common.model_calls import (
    STAGE_CALL,
    STAGE_CANCELLED,
    CallAnswer,
    CallCancelled,
    CallPart,
    parts_of,
    pressed,
    unpressed,
)
from dsec_common.model_errors import ModelApi, ModelCallError
from dsec_common.wire.rollout_stream import StreamFeedback
from dsec_sandboxd.agent_gateway import AgentGateway
from dsec_sandboxd.model_stream import AnswerStream
from dsec_sandboxd.ports import Uses
from dsec_sandboxd.records import SandboxRecord

_log: Final = structlog.get_logger(__name__)

MODEL_WAIT_MAX_S: Final = 570.0
"""How long one request waits for its answer; clients wait for ten minutes and call again."""

MODEL_GRACE_S: Final = 10.0
"""How long a call goes on without anybody who waits for it: its harness may call again."""

MODEL_CALLS_MAX: Final = 32
"""Calls of one sandbox under way; Chronus lets no more wait on one rollout than twice that."""

_LARGE_BYTES: Final = 128 * 1024
_REPORT_S: Final = 30.0
_AWAIT_S: Final = 300.0
_CANCEL_S: Final = 10.0
#: Another report may have taken a number, as after a restart of the daemon.
_NUMBERINGS: Final = 5
_DELIVERED_KEPT: Final = 4096
#: What a call is written against: its number and its body.
_NOTHING: Final = (0, pressed(b""))


Tell = Callable[[dict[str, str], bytes], Awaitable[None]]
"""Tells a harness more of its answer; the headers are those of the response."""


class BrokenStreamError(Exception):
    """What a harness was told of an answer was given up: it has to call again."""


@dataclass(eq=False, slots=True)
class Request:
    """What a harness sent.

    Attributes:
        api: the interface that was called.
        body: the request.
        retried: the client says that it calls again.
        idempotency_key: of the client's choice: the same one is always the same call.
        release: called once, when the body is no longer held.
    """

    api: ModelApi
    body: bytes
    retried: bool
    idempotency_key: str
    release: Callable[[], None]


@dataclass(eq=False, slots=True)
class PendingCall:
    """A call under way, or answered and not handed over.

    Calls with the same ``sample`` are one to the trainer's side: a request, and what repeats it.
    """

    key: str
    request: Request | None
    sample: object
    waiting: int = 0
    stream: AnswerStream | None = None
    seq: int = 0
    abandoned: bool = False
    given_up: asyncio.TimerHandle | None = None
    task: asyncio.Task[CallAnswer] = field(init=False)

    def reported(self, seq: int) -> None:
        """Note the number of its last report, 0 for none; its request is no longer needed."""
        self.seq = seq
        if self.request is not None:
            self.request.release()
            self.request = None


class ModelSession:
    """The calls of one sandbox; belongs to the loop it is used on."""

    def __init__(
        self,
        record: SandboxRecord,
        gateway: AgentGateway,
        clock: Clock,
        uses: Uses | None = None,
        *,
        spawn: Callable[[Coroutine[None, None, None]], None],
        wait_max_s: float = MODEL_WAIT_MAX_S,
        grace_s: float = MODEL_GRACE_S,
        admit: Callable[[SandboxRecord], None] = lambda _record: None,
    ) -> None:
        """Take whose calls they are, the way to the rollout, who counts uses, who runs tasks.

        ``admit`` is asked before a call begins, and not again when its harness calls again.
        """
        self._record = msgspec.structs.replace(record, rollout_id=record.model_rollout_id)
        self._gateway = gateway
        self._clock = clock
        self._uses = uses
        self._wait_max_s = wait_max_s
        self._grace_s = grace_s
        self._admit = admit
        self._numbering = asyncio.Lock()
        self._seq: int | None = None
        self._base = _NOTHING
        self._calls: dict[str, list[PendingCall]] = {}
        self._delivered: OrderedDict[str, None] = OrderedDict()
        self._spawn = spawn

    def take(self, request: Request) -> PendingCall:
        """Return the call that a request is, begun now or under way already; then :meth:`wait`.

        Raises:
            ModelCallError: 429 when too many are under way, or the contract allows no more.
        """
        key = _key_of(request)
        call = self._orphan(key)
        if call is not None:
            request.release()
        else:
            try:
                self._make_room()
                self._admit(self._record)
            except BaseException as error:
                request.release()
                if isinstance(error, DsecError):
                    raise _over_rate(error) from error
                raise
            # Somebody waits for the same already: these are two calls.
            lost = key not in self._delivered and key not in self._calls
            repeat = request.retried or bool(request.idempotency_key) or lost
            call = self._begin(request, key, repeat=repeat)
        call.waiting += 1
        if call.given_up is not None:
            call.given_up.cancel()
            call.given_up = None
        return call

    async def wait(self, call: PendingCall, api: ModelApi, tell: Tell) -> CallAnswer:
        """Return the answer to a call that was taken; cancelled, it goes on for a while.

        What is known of it before is told, and what is left of it then is told at last.

        Raises:
            ModelCallError: why there is none; nothing was told.
            BrokenStreamError: there is none, but some was told.
        """
        if self._uses is not None:
            self._uses.began(self._record.local)
        began = self._clock.monotonic()
        stream = call.stream = AnswerStream()
        try:
            answer = await self._follow(call, stream, tell)
        except TimeoutError:
            if stream.begun:
                raise BrokenStreamError from None
            raise _stalled(self._wait_max_s) from None
        except DsecError as error:
            self._forget(call)
            if stream.begun:
                raise BrokenStreamError from error
            raise _refusal(error) from error
        else:
            self._log(api, answer, 1000 * (self._clock.monotonic() - began))
            return answer
        finally:
            if self._uses is not None:
                self._uses.ended(self._record.local)
            call.waiting -= 1
            call.stream = None
            if not call.waiting and call in self._calls.get(call.key, ()):
                call.given_up = asyncio.get_running_loop().call_later(
                    self._grace_s, self._give_up, call
                )

    async def _follow(self, call: PendingCall, stream: AnswerStream, tell: Tell) -> CallAnswer:
        """Tell what comes until the answer is whole; the wait for each piece is bounded."""
        loop = asyncio.get_running_loop()
        call.task.add_done_callback(stream.wake)
        try:
            async with asyncio.timeout(self._wait_max_s) as limit:
                while not call.task.done():
                    if stream.broken:
                        raise BrokenStreamError
                    if data := stream.take():
                        await tell(stream.headers, data)
                        limit.reschedule(loop.time() + self._wait_max_s)
                    else:
                        await stream.changed()
                answer = await asyncio.shield(call.task)
                if stream.begun:
                    rest = stream.rest_of(answer.body)
                    if rest is None:
                        raise BrokenStreamError
                    if rest:
                        await tell(stream.headers, rest)
                return answer
        finally:
            call.task.remove_done_callback(stream.wake)

    def is_of(self, project: str, rollout_id: str) -> bool:
        """Return whether these calls are a rollout's."""
        return (self._record.project, self._record.rollout_id) == (project, rollout_id)

    def told(self, piece: StreamFeedback) -> int:
        """Take a piece of an answer in; return how much of its stream its harness has, or will.

        That is nothing while nobody waits: who calls again is told from the beginning.

        Raises:
            DsecError: ``not_found`` for a call that is not under way.
        """
        calls = (call for calls in self._calls.values() for call in calls)
        call = next((it for it in calls if it.seq == piece.seq and not it.task.done()), None)
        if call is None:
            raise no_call(piece.seq)
        return call.stream.offer(piece) if call.stream is not None else 0

    def delivered(self, call: PendingCall) -> None:
        """Note that the harness has the answer: the same request again is another call."""
        if call.given_up is not None:
            call.given_up.cancel()
        self._forget(call)
        self._delivered[call.key] = None
        self._delivered.move_to_end(call.key)
        if len(self._delivered) > _DELIVERED_KEPT:
            self._delivered.popitem(last=False)

    async def close(self, *, ended: bool) -> None:
        """Let go of all calls.

        Args:
            ended: the sandbox has ended, so what is under way is given up. It is not when only the
                daemon stops: its harness calls again.
        """
        calls = [call for calls in self._calls.values() for call in calls]
        for call in calls:
            if call.given_up is not None:
                call.given_up.cancel()
            if ended:
                self._give_up(call)
            self._forget(call)
            call.task.cancel()
        await asyncio.gather(*(call.task for call in calls), return_exceptions=True)

    def _log(self, api: ModelApi, answer: CallAnswer, latency_ms: float) -> None:
        self._gateway.log(
            self._record,
            "model_call",
            status=str(answer.status),
            latency_ms=latency_ms,
            attributes={"interface": api},
            tokens_in=answer.tokens_in,
            tokens_out=answer.tokens_out,
        )

    # --- Inside -------------------------------------------------------------------------------

    def _orphan(self, key: str) -> PendingCall | None:
        """Return a call of this key that nobody waits for: its harness has called again."""
        return next((call for call in self._calls.get(key, ()) if not call.waiting), None)

    def _make_room(self) -> None:
        """Give the oldest call up that nobody waits for, when there are too many.

        Raises:
            ModelCallError: 429 when somebody waits for each.
        """
        calls = [call for calls in self._calls.values() for call in calls]
        if len(calls) < MODEL_CALLS_MAX:
            return
        oldest = next((call for call in calls if not call.waiting), None)
        if oldest is None:
            told = f"{MODEL_CALLS_MAX} calls are under way; wait for one of them"
            raise ModelCallError(429, told, code="too_many_calls", retry=True, retry_after_s=1.0)
        self._give_up(oldest)

    def _begin(self, request: Request, key: str, *, repeat: bool) -> PendingCall:
        same = self._calls.get(key)
        call = PendingCall(key, request, same[-1].sample if repeat and same else object())
        call.task = asyncio.get_running_loop().create_task(
            self._run(call, repeat=repeat), name=f"model call of {self._record.local}"
        )
        call.task.add_done_callback(lambda task: _ended(task, call))
        self._calls.setdefault(key, []).append(call)
        return call

    async def _run(self, call: PendingCall, *, repeat: bool) -> CallAnswer:
        call.reported(await self._report(call, repeat=repeat))
        if call.abandoned:
            self._cancel_sample(call)
            raise ModelCallError(503, "the call was given up", retry=True)
        while True:
            deadline = self._clock.monotonic() + _AWAIT_S
            try:
                feedback = await self._gateway.await_feedback(self._record, call.seq, deadline)
            except DsecError as error:
                if error.code is not ErrorCode.UNAVAILABLE:
                    raise
                continue  # the request's own wait is bounded
            if feedback.ready:
                return msgspec.convert(feedback.payload, CallAnswer)

    async def _report(self, call: PendingCall, *, repeat: bool) -> int:
        """Make a call durable; return the number of its last report."""
        async with self._numbering:
            return await self._numbered(partial(self._write_call, call, repeat=repeat))

    async def _write_call(self, call: PendingCall, *, repeat: bool) -> int:
        await self._need_number()
        request = call.request
        assert request is not None  # noqa: S101  it is there until this has returned
        base, kept = self._base
        work = partial(_written, request, call.key, repeat=repeat, base=base, kept=kept)
        # What is large takes a while; the loop is everybody's.
        large = len(request.body) > _LARGE_BYTES
        parts, body = await asyncio.to_thread(work) if large else work()
        seq = await self._write(STAGE_CALL, parts)
        self._base = (seq, body)
        return seq

    async def _numbered(self, write: Callable[[], Awaitable[int]]) -> int:
        """Have all of it written anew when another report has taken a number of it.

        Readers drop what was broken off: no whole call is ever written twice so.
        """
        for _ in range(_NUMBERINGS - 1):
            try:
                return await write()
            except DsecError as error:
                if error.code is not ErrorCode.CONFLICT:
                    raise
        return await write()

    async def _need_number(self) -> int:
        """Return the rollout's last number."""
        if self._seq is None:
            # After a rollback that call may be void, and no reader has it.
            self._base = _NOTHING
            deadline = self._clock.monotonic() + _REPORT_S
            self._seq = (await self._gateway.inspect(self._record, deadline)).last_seq
        return self._seq

    async def _write(self, stage: str, payloads: Sequence[msgspec.Struct]) -> int:
        deadline = self._clock.monotonic() + _REPORT_S
        seq = await self._need_number()
        self._seq = None  # until it is known what became of the last report
        for payload in payloads:
            seq += 1
            packed = msgspec.msgpack.encode(payload)
            await self._gateway.report(self._record, seq, stage, packed, deadline)
        self._seq = seq
        return seq

    def _forget(self, call: PendingCall) -> None:
        calls = self._calls.get(call.key, [])
        if call in calls:
            calls.remove(call)
        if not calls:
            self._calls.pop(call.key, None)

    def _give_up(self, call: PendingCall) -> None:
        """End a call that nobody waits for; the trainer's side ends it where it is sampled."""
        self._forget(call)
        if call.given_up is not None:
            call.given_up.cancel()
        if call.task.done():
            return
        if call.seq:
            call.task.cancel()
            self._cancel_sample(call)
        else:
            call.abandoned = True  # its report is on its way, and has to be taken back

    def _cancel_sample(self, call: PendingCall) -> None:
        """Have a call ended where it is sampled, unless another request waits for the same."""
        others = (other for other in self._calls.get(call.key, ()) if not other.task.done())
        if all(other.sample is not call.sample for other in others):
            self._spawn(self._tell_cancelled(call.seq))

    async def _tell_cancelled(self, seq: int) -> None:
        try:
            async with asyncio.timeout(_CANCEL_S), self._numbering:
                told = [CallCancelled(seq=seq)]
                await self._numbered(partial(self._write, STAGE_CANCELLED, told))
        except (DsecError, TimeoutError) as error:
            _log.info("cancelled_call_not_told", local=self._record.local, error=str(error))


def no_call(seq: int) -> DsecError:
    """Return the error for a call that nobody here waits for."""
    return not_found(f"no model call {seq} is under way here")


def _key_of(request: Request) -> str:
    digest = blake2b(digest_size=16)
    for text in (request.api.encode(), request.idempotency_key.encode()):
        digest.update(text + b"\0")
    digest.update(request.body)
    return digest.hexdigest()


def _written(
    request: Request, key: str, *, repeat: bool, base: int, kept: bytes
) -> tuple[list[CallPart], bytes]:
    """Return a call's reports, and its body as it is kept for the next one."""
    body = request.body
    parts = parts_of(request.api, key, body, repeat=repeat, base=base, base_body=unpressed(kept))
    return parts, pressed(body)


def _ended(task: asyncio.Task[CallAnswer], call: PendingCall) -> None:
    """Let go of what a call holds; nobody may wait for it when it fails."""
    call.reported(call.seq)
    if not task.cancelled():
        task.exception()


def _stalled(wait_max_s: float) -> ModelCallError:
    return ModelCallError(
        503,
        f"the trainer has not answered within {wait_max_s:g} s; it may be updating its model. Call "
        "again with the same request: it goes on where it is",
        code="stalled",
        retry=True,
        retry_after_s=1.0,
        stalled_s=wait_max_s,
    )


def _over_rate(error: DsecError) -> ModelCallError:
    if error.code is not ErrorCode.EXHAUSTED:
        return _refusal(error)
    return ModelCallError(
        429, error.message, code="rate_limited", retry=True, retry_after_s=error.retry_after_s
    )


def _refusal(error: DsecError) -> ModelCallError:
    match error.code:
        case ErrorCode.NOT_FOUND | ErrorCode.EXPIRED:
            told = "this rollout is over and takes no more calls"
            return ModelCallError(403, told, code="rollout_closed")
        case ErrorCode.UNAVAILABLE | ErrorCode.EXHAUSTED | ErrorCode.TIMEOUT:
            return ModelCallError(
                503,
                f"the call could not be passed on: {error.message}",
                code="unavailable",
                retry=True,
                retry_after_s=1.0,
            )
        case _:
            return ModelCallError(500, f"the call failed: {error.message}", code=error.code)
