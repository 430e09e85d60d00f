"""The SDK's way to ask: one bus, one project, and the one rule for when to ask again."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from typing import Final

from dsec_common.bus import Bus
from dsec_common.bus_types import ReplyT
from dsec_common.errors import MAY_HAVE_HAPPENED, NOBODY_SERVES, DsecError, ErrorCode
from dsec_common.wire.base import Message

ATTEMPTS_MAX: Final = 5
_FIRST_WAIT_S: Final = 0.1
_WAIT_MAX_S: Final = 2.0
_TOO_LATE_S: Final = 0.01
#: A process that was killed answers nothing. What may be asked twice is asked again after this
#: long, and another process, or the same one started again, answers.
ANSWER_PATIENCE_S: Final = 3.0
#: A service that was killed or is upgraded is back within seconds, a node's daemon with its
#: sandboxes: until then nobody takes requests to it. Beyond that it counts as gone.
AWAY_S: Final = 15.0
_AWAY_WAIT_MAX_S: Final = 0.5
#: A refusal with one of these codes says that nothing was done.
_NOTHING_DONE: Final = frozenset({ErrorCode.EXHAUSTED, ErrorCode.UNAVAILABLE})


def may_ask_again(error: DsecError, *, repeatable: bool) -> bool:
    """Return whether the same request may be sent once more after ``error``.

    A request that must not run twice (``repeatable`` false) is sent again only when the answer
    says that nothing was done; a lost connection or a timeout leaves that open.
    """
    if not error.retryable:
        return False
    if repeatable:
        return True
    return error.code in _NOTHING_DONE and not error.details.get(MAY_HAVE_HAPPENED, False)


def wait_before(attempt: int, error: DsecError) -> float:
    """Return the seconds to wait before the next attempt: what the server says, else growing."""
    wait_s = error.retry_after_s or min(_FIRST_WAIT_S * 2**attempt, _WAIT_MAX_S)
    # Many clients are refused at the same moment and must not all come back at the same one.
    return wait_s * random.uniform(0.75, 1.25)  # noqa: S311  spread, not a secret


def is_away(error: DsecError) -> bool:
    """Return whether no process took the request, as while a service is started again."""
    return error.details.get("reason") == NOBODY_SERVES


class Channel:
    """A connected bus and the project that its credentials belong to."""

    def __init__(self, bus: Bus, project: str, kafka_bootstrap: str = "") -> None:
        self.bus = bus
        self.project = project
        self.kafka_bootstrap = kafka_bootstrap

    async def ask(
        self,
        subject: str,
        message: Message,
        reply_type: type[ReplyT],
        *,
        timeout_s: float,
        repeatable: bool = False,
        attempts_max: int = ATTEMPTS_MAX,
        room_within_s: float = 0.0,
        patience_s: float = math.inf,
        away_s: float = 0.0,
        shortened: Callable[[float], Message] | None = None,
    ) -> ReplyT:
        """Return the reply to ``message``, asking again where that cannot do a thing twice.

        Args:
            subject: from ``subjects.py``.
            message: the body.
            reply_type: what the reply decodes as.
            timeout_s: for all attempts together.
            repeatable: the request may be carried out twice without harm.
            attempts_max: how many refusals to take at most; silence is none.
            room_within_s: how long to go on asking, however often, while there is no room
                (``exhausted``).
            patience_s: with ``repeatable``, how long to wait for an answer before asking again.
            away_s: how long to go on asking, however often, while nobody takes the request.
            shortened: the message for another attempt with so many seconds left, where it says
                how long it may take: nothing is made for who has stopped waiting, and who waits
                to the end hears what there is to hear.

        Raises:
            DsecError: the last attempt's error.
        """
        began = time.monotonic()
        deadline = began + timeout_s
        attempt = 0
        again = False
        last: DsecError | None = None
        while True:
            left_s = max(deadline - time.monotonic(), 0.001)
            if last is not None and left_s <= _TOO_LATE_S:  # nobody would hear the answer
                raise last
            if again and shortened is not None:
                message = shortened(left_s)
            again = True
            waits_s = min(left_s, patience_s) if repeatable else left_s
            try:
                return await self.bus.request(subject, message, reply_type, timeout_s=waits_s)
            except DsecError as error:
                if waits_s < left_s and error.code is ErrorCode.TIMEOUT:
                    continue
                last = error
                attempt += 1
                wait_s = wait_before(attempt, error)
                again_at = time.monotonic() + wait_s
                if away_s and is_away(error):
                    wait_s = min(wait_s, _AWAY_WAIT_MAX_S)
                    again_at = time.monotonic() + wait_s
                    waits_on = again_at < began + away_s
                else:
                    is_full = error.code is ErrorCode.EXHAUSTED
                    waits_on = is_full and again_at < began + room_within_s
                if (
                    (attempt >= attempts_max and not waits_on)
                    or again_at >= deadline
                    or not may_ask_again(error, repeatable=repeatable)
                ):
                    raise
            await asyncio.sleep(wait_s)
