"""The trainer's end of model calls: sampled once, recorded, answered, and stitched into a trace."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self, runtime_checkable

import msgspec
import structlog

from dsec.model_relay.calls import ModelRequest, Tell
from dsec.model_relay.engine import Sampled
from dsec.model_relay.interfaces import Rendered, parse_call, render_answer
from dsec.model_relay.journal import CallJournal, Recorded
from dsec.model_relay.live import LiveAnswer
from dsec.model_trace import ModelCall, Trace, stitch
from dsec.rollouts import Rollout
from dsec_common.clock import Clock, SystemClock
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.model_calls import (
    STAGE_CALL,
    STAGE_CANCELLED,
    CallAnswer,
    CallCancelled,
    CallReader,
    WholeCall,
    answer_of,
)
from dsec_common.model_errors import STALLED_HEADER, ModelCallError
from dsec_common.wire.rollout import StageReport

_log: Final = structlog.get_logger(__name__)

Engine = Callable[[ModelRequest], Awaitable[Sampled]]
"""Samples the answer to a call: an :class:`~dsec.model_relay.http_engine.HttpEngine`, or any
coroutine function of the training loop, which may take its time."""


@runtime_checkable
class StreamingEngine(Protocol):
    """An engine that tells what it samples while it does, when a harness wants to see it."""

    async def __call__(self, request: ModelRequest) -> Sampled:
        """Sample the answer to a call."""
        ...

    async def stream(self, request: ModelRequest, tell: Tell) -> Sampled:
        """Sample it, and tell the beginning of what is returned, and then each delta, in order."""
        ...


_FIRST_PAUSE_S: Final = 0.1
_LAST_PAUSE_S: Final = 5.0
_TOLD_OF_STALLS_S: Final = 0.05
#: Of an answer that is not whole: a node holds no more than twice that.
_PIECE_BYTES: Final = 32 * 1024
_AGAIN_S: Final = 0.1


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """What the calls of one rollout may use; 0 is no limit.

    Attributes:
        calls: that are sampled.
        tokens: that are sampled in all. No call is allowed more than are left when it begins; calls
            at once may so go beyond it together.
        time_s: from the first call on; by the clock of Chronus, over restarts.
    """

    calls: int = 0
    tokens: int = 0
    time_s: float = 0.0


class _Call:
    """A request under way or answered, and the reports that want its answer."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.reports: set[int] = set()
        self.task: asyncio.Task[None] | None = None
        self.settled = False
        self.answer: CallAnswer | None = None
        self.live: LiveAnswer | None = None
        self.following: dict[int, asyncio.Task[None]] = {}

    def cancel(self) -> bool:
        """End it, unless its answer is known already: then that is recorded and told."""
        if self.task is None or self.settled or self.answer is not None:
            return False
        return self.task.cancel()


class ModelRelay:
    """Answers the calls of one rollout. An async context manager; :meth:`run` does the work.

    Every call is sampled once. What was sampled is in the journal before the harness is told, so a
    relay that is started again, with the same rollout and file, answers what was not answered and
    samples nothing twice that anybody was told.

    Args:
        rollout: that sandboxes name as their ``model_rollout_id``; for nothing else.
        engine: samples. While it raises ``unavailable``, calls wait.
        journal: the file of this rollout's calls.
        budget: what they may use.
        clock: for the budget's time.
    """

    def __init__(
        self,
        rollout: Rollout,
        engine: Engine,
        *,
        journal: Path,
        budget: Budget | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._rollout = rollout
        self._engine = engine
        self._journal = CallJournal(journal)
        self._budget = budget or Budget()
        self._clock: Clock = clock or SystemClock()
        self._reader = CallReader()
        self._calls: dict[str, _Call] = {}  # the newest of each key
        self._by_report: dict[int, _Call] = {}
        self._began_at = 0.0
        self._begun = 0
        self._awake = asyncio.Event()
        self._awake.set()

    async def __aenter__(self) -> Self:
        """Read the journal.

        Raises:
            DsecError: ``conflict`` while another relay has it.
        """
        self._journal.__enter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._journal.__exit__()

    def pause(self) -> None:
        """Hold calls back that have not begun, as while weights are updated."""
        self._awake.clear()

    def resume(self) -> None:
        """Let calls begin again."""
        self._awake.set()

    def trace(self) -> Trace:
        """Return what was sampled so far, stitched."""
        return stitch(self._journal.calls)

    async def run(self) -> None:
        """Answer calls until the rollout is closed.

        Raises:
            DsecError: ``unsupported`` when the engine does not tell its tokens; what the journal or
                Chronus refuse. What was not answered then is, by the next relay.
        """
        failed: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group, aclosing(self._rollout.reports()) as reports:
                async for report in reports:
                    self._take(report, group)
                for call in self._by_report.values():
                    call.cancel()  # nobody is told any more
        except* DsecError as errors:
            failed = errors.exceptions[0]
        if failed is not None:
            raise failed

    # --- Reports ------------------------------------------------------------------------------

    def _take(self, report: StageReport, group: asyncio.TaskGroup) -> None:
        match report.stage:
            case _ if report.stage == STAGE_CALL:
                self._began_at = self._began_at or report.sent_at
                whole = self._reader.take(report.seq, report.payload)
                if whole is not None:
                    self._take_call(whole, group)
            case _ if report.stage == STAGE_CANCELLED:
                self._cancel(msgspec.convert(report.payload, CallCancelled).seq)
            case _:
                _log.warning("no_model_call", rollout=self._rollout.id, stage=report.stage)

    def _take_call(self, whole: WholeCall, group: asyncio.TaskGroup) -> None:
        known = self._calls.get(whole.key)
        if known is not None and whole.repeat:
            known.reports.add(whole.seq)
            self._by_report[whole.seq] = known
            if known.answer is not None:
                group.create_task(self._tell(whole.seq, known.answer))
            elif known.live is not None and not known.settled:
                known.following[whole.seq] = group.create_task(self._follow(whole.seq, known.live))
            return
        call = self._calls[whole.key] = self._by_report[whole.seq] = _Call(whole.seq)
        call.reports.add(whole.seq)
        recorded = self._journal.answered.get(whole.seq)
        if recorded is not None:
            if recorded.call is None:
                self._forget(call)
            else:
                self._begun += 1
            call.answer = recorded.answer
            group.create_task(self._tell(whole.seq, recorded.answer))
            return
        call.task = group.create_task(
            self._answer(call, whole, group), name=f"model call {whole.seq} of {self._rollout.id}"
        )

    def _cancel(self, seq: int) -> None:
        call = self._by_report.get(seq)
        if call is None or not call.cancel():
            return
        self._forget(call)

    def _forget(self, call: _Call) -> None:
        """Have the same request be another call: this one was not sampled."""
        for key in [key for key, newest in self._calls.items() if newest is call]:
            del self._calls[key]

    # --- Calls --------------------------------------------------------------------------------

    async def _answer(self, call: _Call, whole: WholeCall, group: asyncio.TaskGroup) -> None:
        try:
            request = parse_call(whole.api, whole.body)
            sampled, stalled_s = await self._sample(call, request, group)
            call.settled = True
            answer = _rendered(request, sampled, call.live, stalled_s)
        except ModelCallError as error:
            self._forget(call)
            call.settled = True
            answer = answer_of(
                error.status, "application/json", error.headers(), error.body(whole.api)
            )
            for seq in sorted(call.reports):  # nothing else tells the next relay that it was told
                await self._journal.record(Recorded(number=seq, answer=answer))
        else:
            model_call = self._model_call(call, sampled)
            await self._journal.record(Recorded(number=call.number, answer=answer, call=model_call))
        call.answer = answer
        for seq in sorted(call.reports):
            await self._tell(seq, answer)

    async def _sample(
        self, call: _Call, request: ModelRequest, group: asyncio.TaskGroup
    ) -> tuple[Sampled, float]:
        """Return what the engine samples, and how long it could not.

        Raises:
            ModelCallError: 429 when the budget is used up; what the engine refuses.
        """
        began = self._clock.monotonic()
        begun = began
        pause_s = _FIRST_PAUSE_S
        while True:
            await self._awake.wait()
            limited = self._within_budget(request)
            self._begun += 1
            try:
                begun = self._clock.monotonic()
                if isinstance(self._engine, StreamingEngine) and request.stream:
                    live = LiveAnswer(request, _headers(begun - began))
                    return await self._stream(call, limited, live, group), begun - began
                return await self._engine(limited), begun - began
            except DsecError as error:
                if error.code is not ErrorCode.UNAVAILABLE:
                    raise
                self._begun -= 1
            await self._clock.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    async def _stream(
        self, call: _Call, request: ModelRequest, live: LiveAnswer, group: asyncio.TaskGroup
    ) -> Sampled:
        """Return what the engine samples; who waits for it is told of it meanwhile."""
        assert isinstance(self._engine, StreamingEngine)  # noqa: S101  asked for
        call.live = live
        for seq in call.reports:
            call.following[seq] = group.create_task(self._follow(seq, live))
        try:
            return await self._engine.stream(request, live.tell)
        except BaseException:
            call.live = None  # who calls again meanwhile waits for the next sample
            raise
        finally:
            for task in call.following.values():
                task.cancel()
            call.following.clear()

    async def _follow(self, seq: int, live: LiveAnswer) -> None:
        """Send on what is known of an answer, until nobody waits for it or it is whole."""
        size = 0
        while True:
            data = await live.after(size, _PIECE_BYTES)
            try:
                taken = await self._rollout.stream_feedback(
                    seq, live.id, data, offset=size, headers=live.headers
                )
            except DsecError as error:
                if not error.retryable:
                    return
                taken = size
            if taken <= size:  # its harness reads slowly, or is about to call again
                await self._clock.sleep(_AGAIN_S)
            size = taken

    def _within_budget(self, request: ModelRequest) -> ModelRequest:
        """Return the request, with no more tokens than are left.

        Raises:
            ModelCallError: 429 when nothing is left.
        """
        budget = self._budget
        if budget.calls and self._begun >= budget.calls:
            raise _used_up(f"{budget.calls} calls")
        if budget.time_s and self._clock.now() - self._began_at >= budget.time_s:
            raise _used_up(f"{budget.time_s:g} s")
        if not budget.tokens:
            return request
        used = sum(len(call.completion_ids) for call in self._journal.calls)
        left = budget.tokens - used
        if left <= 0:
            raise _used_up(f"{budget.tokens} tokens")
        asked = request.options.get("max_tokens") or left
        options = {**request.options, "max_tokens": min(asked, left)}
        return msgspec.structs.replace(request, options=options)

    def _model_call(self, call: _Call, sampled: Sampled) -> ModelCall:
        return ModelCall(
            call_key=f"{self._rollout.id}.{call.number}",
            number=call.number,
            prompt_ids=sampled.prompt_ids,
            completion_ids=sampled.completion_ids,
            logprobs=sampled.logprobs,
            finish_reason=sampled.answer.finish_reason,
            model_version=sampled.model_version,
            temperature=sampled.temperature,
        )

    async def _tell(self, seq: int, answer: CallAnswer) -> None:
        try:
            await self._rollout.feedback(seq, msgspec.to_builtins(answer))
        except DsecError as error:
            if error.code is not ErrorCode.EXPIRED:  # closed: nobody waits
                raise


def _rendered(
    request: ModelRequest, sampled: Sampled, live: LiveAnswer | None, stalled_s: float
) -> CallAnswer:
    if live is not None:
        headers = live.headers
        rendered = Rendered(content_type="text/event-stream", body=live.end(sampled.answer))
    else:
        headers = _headers(stalled_s)
        rendered = render_answer(request, sampled.answer)
    try:
        answer = answer_of(200, rendered.content_type, headers, rendered.body)
    except DsecError as error:
        raise ModelCallError(500, error.message, code="answer_too_large") from error
    return msgspec.structs.replace(
        answer,
        tokens_in=len(sampled.prompt_ids),
        tokens_out=len(sampled.completion_ids),
    )


def _headers(stalled_s: float) -> dict[str, str]:
    return {STALLED_HEADER: f"{stalled_s:.1f}"} if stalled_s >= _TOLD_OF_STALLS_S else {}


def _used_up(what: str) -> ModelCallError:
    return ModelCallError(
        429, f"this rollout has used up its budget of {what}", code="insufficient_quota"
    )
