"""From the bytes of a request to a call, and from an answer to the bytes of a response."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

import msgspec

from dsec.model_relay import chat, messages, responses
from dsec.model_relay.calls import (
    Json,
    ModelAnswer,
    ModelBegun,
    ModelDelta,
    ModelRequest,
    Telling,
    begun_of,
    deltas_of,
)
from dsec_common.model_errors import ModelApi


class _Interface(Protocol):
    def parse(self, body: bytes) -> ModelRequest: ...

    def render(self, request: ModelRequest, answer: ModelAnswer) -> Json: ...

    def Telling(self, request: ModelRequest) -> Telling: ...  # noqa: N802  a class


_MODULES: Final[dict[ModelApi, _Interface]] = {
    ModelApi.CHAT: chat,
    ModelApi.RESPONSES: responses,
    ModelApi.MESSAGES: messages,
}


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """A response that succeeded, but for its status, which is 200."""

    content_type: str
    body: bytes


def parse_call(api: ModelApi, body: bytes) -> ModelRequest:
    """Read a request of any interface.

    Raises:
        ModelCallError: 400, naming the field that is wrong or not supported.
    """
    return _MODULES[api].parse(body)


def render_answer(request: ModelRequest, answer: ModelAnswer) -> Rendered:
    """Write an answer that is whole for who asked: one object, or events if that was asked for."""
    if request.stream:
        events = EventWriter(request)
        body = events.begin(begun_of(answer))
        body += b"".join(map(events.add, deltas_of(answer)))
        return Rendered(content_type="text/event-stream", body=body + events.end(answer))
    rendered = _MODULES[request.api].render(request, answer)
    return Rendered(content_type="application/json", body=msgspec.json.encode(rendered))


class EventWriter:
    """Writes an answer event by event, as the bytes of a stream."""

    def __init__(self, request: ModelRequest) -> None:
        self._telling = _MODULES[request.api].Telling(request)
        self._named = request.api is not ModelApi.CHAT

    def begin(self, begun: ModelBegun) -> bytes:
        """Return the events before any text."""
        return self._written(self._telling.begin(begun))

    def add(self, delta: ModelDelta) -> bytes:
        """Return the events that say more."""
        return self._written(self._telling.add(delta))

    def end(self, answer: ModelAnswer) -> bytes:
        """Return the last events; what the answer says was told."""
        return self._written(self._telling.end(answer))

    def _written(self, events: Iterator[Json | str]) -> bytes:
        pieces: list[bytes] = []
        for event in events:
            if isinstance(event, str):
                pieces.append(b"data: " + event.encode() + b"\n\n")
                continue
            if self._named:
                pieces.append(b"event: " + str(event["type"]).encode() + b"\n")
            pieces.append(b"data: " + msgspec.json.encode(event) + b"\n\n")
        return b"".join(pieces)
