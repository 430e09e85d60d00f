"""``llm`` for tools: one answer of the model server that this node was told of.

The server's address and key are the node's: a sandbox knows neither, and its contract's model and
bound on tokens hold for whatever it sends.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

import aiohttp
import msgspec

from dsec_common.errors import DsecError, ErrorCode, invalid, unavailable
from dsec_common.wire.tools import ToolTerms
from dsec_sandboxd.tools.http import Part

ANSWER_MAX_BYTES: Final = 1024 * 1024
TIMEOUT_MAX_S: Final = 600.0

_PIECE_BYTES: Final = 48 * 1024
_SAID_MAX: Final = 500
_OK: Final = 200
_SERVER_ERROR: Final = 500
_REFUSED_NODE: Final = frozenset({401, 403})
_CODE_OF_STATUS: Final = {
    408: ErrorCode.TIMEOUT,
    429: ErrorCode.EXHAUSTED,
    504: ErrorCode.TIMEOUT,
    # The node's own key or address is wrong; nothing that the agent asks can mend it.
    401: ErrorCode.UNAVAILABLE,
    403: ErrorCode.UNAVAILABLE,
    404: ErrorCode.UNAVAILABLE,
}
#: What changes how much the model writes, such as ``n``, is not among them.
_OPTIONS: Final = frozenset(
    {
        "frequency_penalty",
        "logit_bias",
        "presence_penalty",
        "response_format",
        "seed",
        "stop",
        "tool_choice",
        "tools",
        "top_p",
    }
)


class ModelArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked for. What is left out is the contract's.

    Attributes:
        messages: as of chat completions.
        options: further fields of the request, of those that do not change how much is written.
    """

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    model: str = ""
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: float | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] = 0
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=TIMEOUT_MAX_S)] = TIMEOUT_MAX_S


class ModelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it, but for the completion, which was passed on in parts."""

    model: str
    tokens_in: int
    tokens_out: int
    bytes: int


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Completion(msgspec.Struct):
    choices: list[msgspec.Raw]
    model: str = ""
    usage: _Usage | None = None


class _Said(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Said


class ModelServer:
    """Asks the node's model server."""

    def __init__(self, url: str, secret: str) -> None:
        """Take its base address, such as ``http://127.0.0.1:8000/v1``, and its key if any."""
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._headers = {"Authorization": f"Bearer {secret}"} if secret else {}

    async def ask(
        self, asked: ModelArguments, terms: ToolTerms, tool: str, part: Part
    ) -> ModelAnswer:
        """Have one answer written, and pass it on.

        Raises:
            DsecError: ``denied`` for another model or more tokens than the terms allow; ``invalid``
                for what the server refuses; ``exhausted``, ``unavailable``, ``timeout``.
        """
        request = request_of(asked, terms, tool)
        try:
            async with asyncio.timeout(asked.timeout_s):
                body = await self._answer(request)
        except TimeoutError as error:
            told = f"the model did not answer within {asked.timeout_s:g} s"
            raise DsecError(ErrorCode.TIMEOUT, told, retryable=False) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _away(f"cannot be reached, or broke off ({type(error).__name__})") from error
        try:
            completion = msgspec.json.decode(body, type=_Completion)
        except msgspec.DecodeError as error:
            raise _away("answered with no chat completion") from error
        for start in range(0, len(body), _PIECE_BYTES):
            await part(body[start : start + _PIECE_BYTES])
        usage = completion.usage or _Usage()
        return ModelAnswer(
            model=completion.model,
            tokens_in=usage.prompt_tokens,
            tokens_out=usage.completion_tokens,
            bytes=len(body),
        )

    async def _answer(self, request: dict[str, Any]) -> bytes:
        async with (
            aiohttp.ClientSession(
                headers={"Content-Type": "application/json", **self._headers},
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
            ) as session,
            session.post(
                self._url, data=msgspec.json.encode(request), allow_redirects=False
            ) as answer,
        ):
            body = bytearray()
            async for piece in answer.content.iter_chunked(_PIECE_BYTES):
                body += piece
                if len(body) > ANSWER_MAX_BYTES:
                    raise DsecError(
                        ErrorCode.EXHAUSTED,
                        f"the model's answer is longer than {ANSWER_MAX_BYTES} bytes",
                        retryable=False,
                    )
            if answer.status != _OK:
                raise _refusal(answer, bytes(body))
            return bytes(body)


def request_of(asked: ModelArguments, terms: ToolTerms, tool: str) -> dict[str, Any]:
    """Return the request that is sent.

    Raises:
        DsecError: ``denied``, ``invalid``.
    """
    if asked.model and terms.model and asked.model != terms.model:
        raise _beyond(f"{tool}: the contract names the model {terms.model}", asked.model)
    if asked.max_tokens and terms.max_tokens and asked.max_tokens > terms.max_tokens:
        raise _beyond(f"{tool}: the contract allows {terms.max_tokens} tokens", asked.max_tokens)
    model = asked.model or terms.model
    if not model:
        raise invalid(f"{tool}: name a model, in the contract or in the call")
    if unknown := sorted(asked.options.keys() - _OPTIONS):
        raise invalid(
            f"{tool}: {unknown[0][:80]!r} is none of the options that are passed on: "
            f"{', '.join(sorted(_OPTIONS))}"
        )
    temperature = terms.temperature if asked.temperature is None else asked.temperature
    named = {
        "max_tokens": asked.max_tokens or terms.max_tokens,
        "temperature": temperature,
        "logprobs": True if asked.logprobs or asked.top_logprobs else None,
        "top_logprobs": asked.top_logprobs or None,
    }
    return {
        **asked.options,
        "model": model,
        "messages": asked.messages,
        **{name: value for name, value in named.items() if value is not None},
    }


def _refusal(answer: aiohttp.ClientResponse, body: bytes) -> DsecError:
    status = answer.status
    code = _CODE_OF_STATUS.get(status)
    if code is None:
        is_request = 400 <= status < _SERVER_ERROR  # noqa: PLR2004  HTTP's client errors
        code = ErrorCode.INVALID if is_request else ErrorCode.UNAVAILABLE
    retry_after = answer.headers.get("Retry-After", "")
    # Some servers repeat the key that they do not take; it is the node's, and no agent's to see.
    said = "what the node calls it with is not taken" if status in _REFUSED_NODE else _said(body)
    return DsecError(
        code,
        f"the model server answered {status}: {said}",
        retryable=code is ErrorCode.EXHAUSTED,
        retry_after_s=float(retry_after) if retry_after.isdecimal() else 0.0,
        details={"status": status},
    )


def _said(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_Refusal).error.message[:_SAID_MAX]
    except msgspec.DecodeError:
        return body.decode("utf-8", "replace")[:_SAID_MAX]


def _away(what: str) -> DsecError:
    error = unavailable(f"the model server {what}")
    error.retryable = False
    return error


def _beyond(message: str, asked: object) -> DsecError:
    return DsecError(ErrorCode.DENIED, f"{message}, and {str(asked)[:80]} was asked for")
