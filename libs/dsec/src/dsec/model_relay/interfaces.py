"""From the bytes of a request to a call, and from an answer to the bytes of a response."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

import msgspec

from dsec.model_relay import chat, messages, responses
from dsec.model_relay.calls import Json, ModelAnswer, ModelRequest
from dsec_common.model_errors import ModelApi


class _Interface(Protocol):
    def parse(self, body: bytes) -> ModelRequest: ...

    def render(self, request: ModelRequest, answer: ModelAnswer) -> Json: ...

    def events(self, request: ModelRequest, answer: ModelAnswer) -> Iterator[Json | str]: ...


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
    """Write an answer for who asked: one object, or events if that was asked for.

    The events come at once, when the answer is whole: what is recorded of a call, and told once
    more when it is repeated, is the same in either form.
    """
    module = _MODULES[request.api]
    if not request.stream:
        return Rendered(
            content_type="application/json",
            body=msgspec.json.encode(module.render(request, answer)),
        )
    named = request.api is not ModelApi.CHAT
    pieces: list[bytes] = []
    for event in module.events(request, answer):
        if isinstance(event, str):
            pieces.append(b"data: " + event.encode() + b"\n\n")
            continue
        if named:
            pieces.append(b"event: " + str(event["type"]).encode() + b"\n")
        pieces.append(b"data: " + msgspec.json.encode(event) + b"\n\n")
    return Rendered(content_type="text/event-stream", body=b"".join(pieces))
