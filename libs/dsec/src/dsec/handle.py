"""What the SDK's handles have in common: how they speak to their sandbox, and how they end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final, Self

from dsec.channel import ANSWER_PATIENCE_S, AWAY_S, Channel
from dsec_common import subjects
from dsec_common.bus_types import ReplyT
from dsec_common.subjects import ScopedId
from dsec_common.wire.base import Message

_TIMEOUT_S: Final = 30.0


class OfSandbox:
    """Something of one sandbox, whose node is asked about it."""

    def __init__(self, channel: Channel, scoped: ScopedId) -> None:
        self._channel = channel
        self._scoped = scoped

    def _subject(self, verb: str) -> str:
        return subjects.sandbox(self._channel.project, self._scoped, verb)

    async def _ask(
        self, verb: str, message: Message, reply: type[ReplyT], *, timeout_s: float = _TIMEOUT_S
    ) -> ReplyT:
        """Ask what may be asked any number of times."""
        return await self._channel.ask(
            self._subject(verb),
            message,
            reply,
            timeout_s=timeout_s,
            repeatable=True,
            patience_s=ANSWER_PATIENCE_S,
            away_s=AWAY_S,
        )


class Closing(ABC):
    """An asynchronous context manager that is the same within, and lets go of all at the end."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._leave()

    @abstractmethod
    async def _leave(self) -> None:
        """Let go of what the ``async with`` block was about."""
