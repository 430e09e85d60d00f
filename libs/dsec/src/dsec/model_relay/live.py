"""One answer as its harness is told of it: in pieces while it is sampled, and whole in the end."""

from __future__ import annotations

import asyncio
from typing import Final

from dsec.model_relay.calls import (
    ModelAnswer,
    ModelBegun,
    ModelDelta,
    ModelRequest,
    begun_of,
    deltas_of,
    joined,
)
from dsec.model_relay.interfaces import EventWriter
from dsec_common.errors import DsecError, invalid
from dsec_common.wire.base import new_id

#: Events grow with the answer, so that one of a hundred thousand tokens, each of which came by
#: itself, still fits the record when it is compressed.
_EVENTS_A_DOUBLING: Final = 1024


class LiveAnswer:
    """The events of one sample, which the engine tells and any number of readers follow.

    What several deltas say that came while nobody was ready for them is told as one event. The
    bytes of :meth:`after` are always the beginning of those of :meth:`end`.

    Attributes:
        id: of the sample; another one has another.
        headers: of the response.
    """

    def __init__(self, request: ModelRequest, headers: dict[str, str]) -> None:
        self.id = new_id()
        self.headers = headers
        self._events = EventWriter(request)
        self._body = bytearray()
        self._begun = False
        self._waiting: list[ModelDelta] = []
        self._waiting_characters = 0
        self._told = _Told()
        self._readers: list[asyncio.Future[None]] = []

    def tell(self, news: ModelBegun | ModelDelta) -> None:
        """Take in what the engine knows; see :data:`~dsec.model_relay.calls.Tell`."""
        if isinstance(news, ModelBegun):
            # Told with the first token, which else would wait until this is on its way.
            self._begun = True
            self._body += self._events.begin(news)
            return
        self._waiting.append(news)
        self._waiting_characters += news.characters
        if self._waiting_characters <= self._told.characters // _EVENTS_A_DOUBLING:
            return
        for reader in self._readers:
            if not reader.done():
                reader.set_result(None)

    async def after(self, size: int, at_most: int) -> bytes:
        """Return what follows the first ``size`` bytes, as soon as there is something."""
        while True:
            if self._waiting_characters > self._told.characters // _EVENTS_A_DOUBLING:
                self._write_waiting()
            if self._told.characters and len(self._body) > size:
                return bytes(self._body[size : size + at_most])
            reader = asyncio.get_running_loop().create_future()
            self._readers.append(reader)
            try:
                await reader
            finally:
                self._readers.remove(reader)

    def end(self, answer: ModelAnswer) -> bytes:
        """Return the whole body, now that it is known how the answer ends.

        Raises:
            DsecError: ``invalid`` when the engine told another one before.
        """
        if not self._begun:
            self._body += self._events.begin(begun_of(answer))
            self._waiting = list(deltas_of(answer))
        self._write_waiting()
        self._told.check(answer)
        self._body += self._events.end(answer)
        return bytes(self._body)

    def _write_waiting(self) -> None:
        waiting, self._waiting, self._waiting_characters = self._waiting, [], 0
        at = 0
        while at < len(waiting):
            end = at + 1
            while end < len(waiting) and waiting[at].is_followed_by(waiting[end]):
                end += 1
            delta = joined(waiting[at:end])
            at = end
            self._told.add(delta)
            self._body += self._events.add(delta)


class _Told:
    """What an engine has told, to be held against what it returns."""

    def __init__(self) -> None:
        self.characters = 0
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._arguments: dict[int, list[str]] = {}

    def add(self, delta: ModelDelta) -> None:
        if delta.tool >= 0 and delta.tool < len(self._arguments) - 1:
            raise _told_otherwise("calls of functions one into another")
        self.characters += delta.characters
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        if delta.tool >= 0:
            self._arguments.setdefault(delta.tool, []).append(delta.arguments)

    def check(self, answer: ModelAnswer) -> None:
        calls = [call.arguments for call in answer.tool_calls]
        told = ["".join(self._arguments[index]) for index in sorted(self._arguments)]
        if "".join(self._content) != answer.content or told != calls:
            raise _told_otherwise("another answer than it returned")
        if "".join(self._reasoning) != answer.reasoning:
            raise _told_otherwise("other thoughts than it returned")


def _told_otherwise(what: str) -> DsecError:
    return invalid(f"the engine told {what}")
