"""Command lines that do not fit into one message: sent ahead of the start, in pieces."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from dsec_common.wire.base import Message, new_id
from dsec_common.wire.exec import AddArguments, ArgumentsAdded, StartExec

#: What goes along with the start itself, and in one piece.
_INLINE_BYTES: Final = 128 * 1024
_PIECE_BYTES: Final = 192 * 1024


async def send_ahead(
    command: StartExec, ask: Callable[[Message], Awaitable[ArgumentsAdded]]
) -> StartExec:
    """Return the command to start; what is too long of it has then been sent by ``ask``."""
    if sum(map(_size, command.argv)) <= _INLINE_BYTES:
        return command
    list_id, sent = new_id(), 0
    rest = command.argv[1:]
    while sent < len(rest):
        count = size = 0
        while sent + count < len(rest) and (
            not count or size + _size(rest[sent + count]) <= _PIECE_BYTES
        ):
            size += _size(rest[sent + count])
            count += 1
        await ask(AddArguments(list_id=list_id, first=sent, arguments=rest[sent : sent + count]))
        sent += count
    return msgspec.structs.replace(command, argv=command.argv[:1], arguments_from=list_id)


def _size(argument: str) -> int:
    return len(argument.encode("utf-8", "surrogateescape")) + 1
