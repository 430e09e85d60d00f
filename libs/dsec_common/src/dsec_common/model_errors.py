"""Refusals of a model endpoint, in the shape of the interface that was called.

Clients of model APIs look at the status, at a type and at a few headers; they would retry, or
crash on, anything else.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

import msgspec


class ModelApi(StrEnum):
    """An interface that harnesses call a model by."""

    CHAT = "chat"
    """OpenAI's chat completions."""
    RESPONSES = "responses"
    """OpenAI's responses."""
    MESSAGES = "messages"
    """Anthropic's messages."""


#: Where each is called; the base URL of OpenAI's clients ends with ``/v1``.
API_OF_PATH: Final = {
    "/v1/chat/completions": ModelApi.CHAT,
    "/v1/responses": ModelApi.RESPONSES,
    "/v1/messages": ModelApi.MESSAGES,
}

STALLED_HEADER: Final = "x-dsec-stalled-s"
"""Says for how many seconds a call was held back because its trainer could not take it."""

#: The type that goes with a status, as OpenAI's and as Anthropic's servers say it.
_TYPES: Final = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("server_error", "overloaded_error"),
}


class ModelCallError(Exception):
    """A call that is refused.

    Args:
        status: of HTTP; one of 400, 401, 403, 404, 413, 429, 500 and 503.
        message: what is wrong and what to do.
        param: the field that is wrong, if it is one.
        code: for programs; empty for none.
        retry: whether the client should call again by itself.
        retry_after_s: after how long it should.
        stalled_s: how long the call was held back for its trainer, 0 if it was not.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str = "",
        retry: bool = False,
        retry_after_s: float = 0.0,
        stalled_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry = retry
        self.retry_after_s = retry_after_s
        self.stalled_s = stalled_s

    def body(self, api: ModelApi) -> bytes:
        """Return the JSON body that a client of ``api`` reads."""
        openai, anthropic = _TYPES[self.status]
        body: dict[str, Any]
        if api is ModelApi.MESSAGES:
            body = {"type": "error", "error": {"type": anthropic, "message": self.message}}
        else:
            body = {
                "error": {
                    "message": self.message,
                    "type": openai,
                    "param": self.param,
                    "code": self.code or None,
                }
            }
        return msgspec.json.encode(body)

    def headers(self) -> dict[str, str]:
        """Return the headers that tell a client whether to call again, and when."""
        headers = {"x-should-retry": "true" if self.retry else "false"}
        if self.retry and self.retry_after_s:
            headers["retry-after"] = f"{self.retry_after_s:g}"
        if self.stalled_s:
            headers[STALLED_HEADER] = f"{self.stalled_s:.1f}"
        return headers
