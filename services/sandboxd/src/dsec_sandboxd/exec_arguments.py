"""Command lines longer than one message: their arguments are sent ahead, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from dsec_common.bus_types import Request
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode, not_found
from dsec_common.subjects import validate_local
from dsec_common.wire.exec import ARGUMENTS_PIECE_BYTES, AddArguments, ArgumentsAdded
from dsec_sandboxd.commands import ARGUMENT_BYTES_MAX, ARGUMENTS_MAX
from dsec_sandboxd.errors import invalid_field
from dsec_sandboxd.lifecycle import local_of

#: Command lines on their way into one sandbox, and how long one waits for its next piece.
ARGUMENT_LISTS_MAX: Final = 4
ARGUMENT_LIST_IDLE_S: Final = 60.0
#: For all sandboxes of the node together.
_BYTES_MAX: Final = 64 << 20


@dataclass(slots=True)
class _List:
    arguments: list[str] = field(default_factory=list)
    size_bytes: int = 0
    touched_at: float = 0.0


class ArgumentLists:
    """Arguments that wait for the command that they belong to."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lists: dict[tuple[str, str], _List] = {}

    async def add(self, request: Request[AddArguments]) -> ArgumentsAdded:
        """Take a piece; a repeated one changes nothing.

        Raises:
            DsecError: ``invalid`` for a gap or too much; ``exhausted`` when too many wait.
        """
        message, local = request.message, local_of(request)
        validate_local(message.list_id)
        size = sum(_size(argument) for argument in message.arguments)
        if size > ARGUMENTS_PIECE_BYTES:
            raise invalid_field(
                "arguments", f"{size} bytes in one piece; {ARGUMENTS_PIECE_BYTES} are the most"
            )
        key = (local, message.list_id)
        kept = self._lists.get(key)
        if kept is None:
            self._check_room(local)
            kept = _List()
        if not 0 <= message.first <= len(kept.arguments):
            raise invalid_field(
                "first", f"{message.first} leaves a gap behind {len(kept.arguments)} arguments"
            )
        fresh = message.arguments[len(kept.arguments) - message.first :]
        added = sum(_size(argument) for argument in fresh)
        if (
            kept.size_bytes + added > ARGUMENT_BYTES_MAX
            or len(kept.arguments) + len(fresh) > ARGUMENTS_MAX
        ):
            raise invalid_field(
                "arguments",
                f"more than {ARGUMENTS_MAX} arguments or {ARGUMENT_BYTES_MAX} bytes in all; give "
                "long input as stdin",
            )
        self._lists[key] = kept
        kept.arguments += fresh
        kept.size_bytes += added
        kept.touched_at = self._clock.monotonic()
        return ArgumentsAdded(cause_id=message.message_id, count=len(kept.arguments))

    def _check_room(self, local: str) -> None:
        here = sum(1 for owner, _ in self._lists if owner == local)
        all_bytes = sum(kept.size_bytes for kept in self._lists.values())
        if here >= ARGUMENT_LISTS_MAX or all_bytes >= _BYTES_MAX:
            raise DsecError(
                ErrorCode.EXHAUSTED,
                f"{here} command lines are on their way into this sandbox, with {all_bytes} bytes "
                "into all; start one first",
                retry_after_s=0.5,
            )

    def get(self, local: str, list_id: str) -> tuple[str, ...]:
        """Return the arguments of a list.

        Raises:
            DsecError: ``not_found`` when they were not sent, or waited too long.
        """
        kept = self._lists.get((local, list_id))
        if kept is None:
            raise not_found(
                f"the arguments {list_id[:64]!r} are not here: send them again", what="arguments"
            )
        return tuple(kept.arguments)

    def forget(self, local: str, list_id: str) -> None:
        """Forget a list whose command has started. Idempotent."""
        self._lists.pop((local, list_id), None)

    def remove_old(self) -> None:
        """Forget lists that nobody goes on with."""
        oldest = self._clock.monotonic() - ARGUMENT_LIST_IDLE_S
        for key in [key for key, kept in self._lists.items() if kept.touched_at < oldest]:
            del self._lists[key]

    async def sandbox_ending(self, local: str) -> None:
        """Forget what was sent to a sandbox. Idempotent."""
        for key in [key for key in self._lists if key[0] == local]:
            del self._lists[key]


def _size(argument: str) -> int:
    return len(argument.encode("utf-8", "surrogateescape")) + 1
