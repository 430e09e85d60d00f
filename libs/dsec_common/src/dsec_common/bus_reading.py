"""Reading a stream's messages by the hundred, by their place in it (batched direct get, ADR-31)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from dsec_common.errors import unavailable

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from dsec_common.bus_requests import ReplyInbox

_BATCH: Final = 256
_BATCH_BYTES: Final = 8 * 1024 * 1024
_TIMEOUT_S: Final = 5.0
_END_OF_BATCH: Final = "204"
_NOT_FOUND: Final = "404"


async def read_messages(
    inbox: ReplyInbox, stream: str, subject: str, first: int
) -> list[tuple[int, bytes]]:
    """Return the next messages of a subject from sequence ``first`` on, with their sequences.

    Some hundred at most; none when there are no more. A replica of the stream may answer that has
    not yet heard of the newest.

    Raises:
        DsecError: ``unavailable`` or ``timeout`` when JetStream does not answer.
    """
    query = {
        "seq": first,
        "next_by_subj": subject,
        "batch": _BATCH,
        "max_bytes": _BATCH_BYTES,
    }
    found = await inbox.request_many(
        f"$JS.API.DIRECT.GET.{stream}", msgspec.json.encode(query), _is_last, _TIMEOUT_S
    )
    last = found.pop()
    status = _status(last)
    if status not in {_END_OF_BATCH, _NOT_FOUND}:
        raise unavailable(f"cannot read {subject} of {stream}: JetStream answers {status}")
    return [(int((one.headers or {})["Nats-Sequence"]), one.data) for one in found]


def _is_last(message: Msg) -> bool:
    return bool(_status(message))


def _status(message: Msg) -> str:
    return (message.headers or {}).get("Status", "")
