"""Changing a document of a bucket by compare-and-swap."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from dsec_common.bus import Entry, KeyValue
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import Message

DocumentT = TypeVar("DocumentT", bound=Message)

NOTHING: Final = "nothing"
"""The id of a document that is not there and needs no writing."""

_ATTEMPTS_MAX: Final = 40
#: Somebody else was faster, or nobody knows whether a write took place.
_AGAIN: Final = frozenset({ErrorCode.CONFLICT, ErrorCode.TIMEOUT, ErrorCode.UNAVAILABLE})


async def swap(
    bucket: KeyValue[DocumentT],
    key: str,
    change: Callable[[DocumentT | None], DocumentT],
    pause: Callable[[int], Awaitable[None]],
) -> DocumentT:
    """Write what ``change`` makes of a document, however often others are faster.

    A write whose answer got lost is looked for: each has an id of its own. What ``change`` returns
    unchanged, or with the id :data:`NOTHING`, is not written.

    Args:
        bucket: where it is.
        key: its name there.
        change: called with what is there, None for nothing, as often as others are faster.
        pause: waited for before each further attempt, with its number.

    Raises:
        DsecError: what ``change`` raises; ``unavailable`` when it cannot be written.
    """
    written = ""
    last: DsecError | None = None
    for attempt in range(_ATTEMPTS_MAX):
        if attempt:
            await pause(attempt)
        entry = await _read(bucket, key)
        before = entry.value if entry is not None else None
        if before is not None and before.message_id == written:
            return before
        after = change(before)
        if after is before or after.message_id == NOTHING:
            return after
        written = after.message_id
        try:
            if entry is None:
                await bucket.create(key, after)
            else:
                await bucket.update(key, after, entry.revision)
        except DsecError as error:
            if error.code not in _AGAIN:
                raise
            last = error
        else:
            return after
    raise DsecError(
        ErrorCode.UNAVAILABLE,
        f"{bucket.bucket} could not be changed under {key}: {last}",
        retry_after_s=1.0,
        details={"key": key},
    )


async def _read(bucket: KeyValue[DocumentT], key: str) -> Entry[DocumentT] | None:
    try:
        return await bucket.get(key)
    except DsecError as error:
        if error.code is not ErrorCode.NOT_FOUND:
            raise
        return None
