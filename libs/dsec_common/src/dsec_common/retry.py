"""Waiting at start for a part that is on its way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import structlog

from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode

_log: Final = structlog.get_logger(__name__)

T = TypeVar("T")

_PAUSE_S: Final = 0.2
_REPEAT_LOG_AFTER: Final = 50


async def until_available(what: str, operation: Callable[[], Awaitable[T]], clock: Clock) -> T:
    """Return what ``operation`` returns, trying again for as long as its part is not there.

    ``what`` names the part in the log: once at first, then every ten seconds or so. Cancel it to
    stop waiting.

    Raises:
        DsecError: any but ``unavailable`` and ``timeout``.
    """
    attempts = 0
    while True:
        try:
            return await operation()
        except DsecError as error:
            if error.code not in {ErrorCode.UNAVAILABLE, ErrorCode.TIMEOUT}:
                raise
            if attempts % _REPEAT_LOG_AFTER == 0:
                _log.warning("waiting", waiting_for=what, error=error.message)
        attempts += 1
        await clock.sleep(_PAUSE_S)
