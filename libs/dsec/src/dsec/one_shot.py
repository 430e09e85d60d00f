"""Asking for one command until its result is known: the same message, which never runs twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from dsec.channel import AWAY_S, is_away, wait_before
from dsec_common.errors import MAY_HAVE_HAPPENED, DsecError, ErrorCode
from dsec_common.timers import timers_of
from dsec_common.wire import sandbox as wire
from dsec_common.wire.sandbox import EndCause, ExecCommand, SandboxInfo, SandboxState

#: The node ends a command at its timeout (TERM, then KILL) and answers; this much later we give up.
BACKSTOP_S: Final = 15.0
#: How often a command without an answer is looked after, the first times sooner, and how long its
#: answer may take when its sandbox has just ended.
LOOK_EVERY_S: Final = 5.0
_FIRST_LOOK_S: Final = 1.0
LAST_WORD_S: Final = 1.0
#: An answer may be lost on its way, and its node's daemon may be another one by now.
_ASK_AGAIN_S: Final = 15.0
#: How long a node may be away before it counts as gone.
_AWAY_S: Final = 30.0
_WAIT_MAX_S: Final = 0.5

Ask = Callable[[ExecCommand, float], Awaitable[wire.ExecResult]]


@dataclass(frozen=True, slots=True)
class Look:
    """What is seen of a sandbox in which a command is to run.

    Attributes:
        over: why nobody can answer any more, or None.
        daemon_s: since when its node's daemon has been there; 0 when that is not known.
        paused_s: how long it has stood still in all, or None when that is not known.
    """

    over: DsecError | None = None
    daemon_s: float = 0.0
    paused_s: float | None = None


@dataclass(slots=True)
class _Limit:
    """When a command has to be over: later by as long as its sandbox was seen to stand still."""

    until: float
    paused_s: float | None = None

    def note(self, look: Look) -> None:
        if look.paused_s is None:
            return
        if self.paused_s is not None:
            self.until += max(look.paused_s - self.paused_s, 0.0)
        self.paused_s = look.paused_s


LookAt = Callable[[], Awaitable[Look]]


async def run_once(command: ExecCommand, ask: Ask, look: LookAt) -> wire.ExecResult:
    """Return what came of a command, however often its node has to be asked.

    The node joins a repeated message to the command that runs, or answers with the result that it
    has kept. It ends at the latest a while after the command's own time limit, which stands still
    while the sandbox does.

    Args:
        command: what to run; always this very message.
        ask: sends it and waits for so many seconds.
        look: looks at the sandbox.

    Raises:
        DsecError: the node's refusal; ``expired`` when the sandbox has ended; ``timeout``.
    """
    loop = asyncio.get_running_loop()
    limit = _Limit(loop.time() + max(command.timeout_s, 0.0) + BACKSTOP_S)
    away_until = 0.0
    attempt = 0
    while True:
        left_s = max(limit.until - loop.time(), 0.001)
        answer = asyncio.ensure_future(ask(command, left_s))
        try:
            result = await _watched(answer, look, limit)
        except DsecError as error:
            # Whom nobody has heard has run nothing; else the same message runs nothing twice.
            again = attempt > 0 or bool(error.details.get(MAY_HAVE_HAPPENED)) or is_away(error)
            away_s = _AWAY_S if attempt else AWAY_S
            away_until = away_until or loop.time() + away_s
            wait_s = min(wait_before(attempt, error), _WAIT_MAX_S)
            over = loop.time() + wait_s >= min(limit.until, away_until)
            if not again or over or not _may_be_away(error):
                raise
            attempt += 1
            await asyncio.sleep(wait_s)
            continue
        if result is not None:
            return result
        attempt += 1
        away_until = 0.0


async def look_at(inspect: Callable[[], Awaitable[SandboxInfo]]) -> Look:
    """Return what is seen of a command's sandbox; nothing while nobody can say."""
    try:
        info = await inspect()
    except DsecError as error:
        over = error if error.code in {ErrorCode.NOT_FOUND, ErrorCode.EXPIRED} else None
        return Look(over)
    if info.state is not SandboxState.ENDED:
        return Look(daemon_s=info.daemon_s, paused_s=info.paused_s)
    is_oom = info.end_cause is EndCause.OOM
    return Look(
        DsecError(
            ErrorCode.OOM if is_oom else ErrorCode.EXPIRED,
            f"sandbox {info.sandbox_id} ended ({info.end_cause}) while the command ran; what it "
            "printed is lost",
            details={MAY_HAVE_HAPPENED: True, "end_cause": info.end_cause},
        )
    )


def _may_be_away(error: DsecError) -> bool:
    return error.retryable and error.code in {ErrorCode.UNAVAILABLE, ErrorCode.TIMEOUT}


async def _watched(
    answer: asyncio.Future[wire.ExecResult], look: LookAt, limit: _Limit
) -> wire.ExecResult | None:
    """Return the answer; None when it is time to ask again."""
    loop = asyncio.get_running_loop()
    asked_at = loop.time()
    wait_s = min(_FIRST_LOOK_S, LOOK_EVERY_S)
    over: DsecError | None = None
    looking: asyncio.Future[Look] | None = None
    try:
        while True:
            await _done(answer, wait_s)
            if answer.done():
                return answer.result()
            if over is not None:
                raise over
            looking = asyncio.ensure_future(look())
            either: set[asyncio.Future[Any]] = {answer, looking}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():  # its node was only slow to say how it is
                return answer.result()
            seen = looking.result()
            limit.note(seen)
            asked_s = loop.time() - asked_at
            over = seen.over
            if over is None and (asked_s >= _ASK_AGAIN_S or 0 < seen.daemon_s < asked_s):
                return None
            # Its node may be about to answer, and says more than we can.
            wait_s = min(2 * wait_s, LOOK_EVERY_S) if over is None else LAST_WORD_S
    finally:
        for task in (answer, looking):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait({task})


async def _done(answer: asyncio.Future[wire.ExecResult], wait_s: float) -> None:
    """Return when there is an answer or the time is over; most of the time there is one at once."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def wake(_: object = None) -> None:
        if not over.done():
            over.set_result(None)

    timer = timers_of(loop).call_later(wait_s, wake)
    answer.add_done_callback(wake)
    try:
        await over
    finally:
        answer.remove_done_callback(wake)
        timer.cancel()
