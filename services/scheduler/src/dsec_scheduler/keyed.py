"""The one answer to a key that several schedulers may be at work on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from dsec_common.clock import Clock
from dsec_scheduler.errors import out_of_time
from dsec_scheduler.ledger import ClaimLostError

T = TypeVar("T")

_FIRST_PAUSE_S: Final = 0.005
_LAST_PAUSE_S: Final = 0.25


async def one_answer(
    try_once: Callable[[float, bool], Awaitable[T | None]], timeout_s: float, clock: Clock
) -> T:
    """Return what comes of a key, waiting while another scheduler is at work on it.

    Args:
        try_once: looks at the key's record and goes by it, given the seconds that are left and
            whether this request has waited for another; None while that one is at work.
        timeout_s: how long to wait at most.
        clock: by which.

    Raises:
        DsecError: as ``try_once``; ``timeout``.
    """
    deadline = clock.monotonic() + timeout_s
    waited = False
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            answer = await try_once(max(deadline - clock.monotonic(), 0.0), waited)
        except ClaimLostError:
            # Another scheduler has just written what came of the same: look, however late.
            waited = True
            continue
        if answer is not None:
            return answer
        if clock.monotonic() >= deadline:
            raise out_of_time(timeout_s, None)
        waited = True
        await clock.sleep(pause_s)
        pause_s = min(pause_s * 2, _LAST_PAUSE_S)
