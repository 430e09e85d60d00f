"""What an OpenAI-compatible inference server is sent, and what its answer says token by token.

The server must return its own token ids: vLLM does with ``return_token_ids`` (``prompt_token_ids``
beside the choices, ``token_ids`` in the choice), and log-probabilities of what it sampled with
``logprobs``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from dsec.model_relay.calls import Json, ModelAnswer, ModelRequest, ToolCall
from dsec_common.errors import DsecError, ErrorCode

_NOT_OF_AN_ID: Final = re.compile(r"[^A-Za-z0-9_-]")


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """An answer with the tokens that it was made of.

    Attributes:
        answer: for the harness.
        prompt_ids: what the engine was given.
        completion_ids: what it sampled.
        logprobs: of each of them.
        model_version: of the weights; empty where the engine does not say.
        temperature: at which it sampled.
    """

    answer: ModelAnswer
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    model_version: str = ""
    temperature: float = 1.0


def engine_body(
    request: ModelRequest, *, model: str = "", sampling: Mapping[str, Any] | None = None
) -> Json:
    """Return the chat completion to ask the inference server for.

    Args:
        request: what the harness asked.
        model: the server's name for it; empty for the name that the harness used.
        sampling: options that the trainer has its way with, whatever the harness asked for.
    """
    body: Json = {
        "model": model or request.model,
        "messages": list(request.messages),
        **request.options,
        **(sampling or {}),
        "stream": False,
        "logprobs": True,
        "return_token_ids": True,
    }
    if request.tools:
        body["tools"] = list(request.tools)
    if request.top_logprobs:
        body["top_logprobs"] = request.top_logprobs
    return body


class _Logprob(msgspec.Struct, frozen=True):
    logprob: float


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[Json] | None = None


class _Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str = "{}"


class _ToolCall(msgspec.Struct, frozen=True):
    function: _Function
    id: str = ""


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Message
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Completion(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    id: str = ""
    created: int = 0
    prompt_token_ids: list[int] | None = None
    model_version: str | None = None


def read_engine(answer_body: bytes, asked: Json, *, model_version: str = "") -> Sampled:
    """Read the server's answer.

    Args:
        answer_body: as it came.
        asked: what it answers, of :func:`engine_body`.
        model_version: what the trainer calls the weights now, if the server does not say.

    Raises:
        DsecError: ``unsupported`` when it lacks token ids or log-probabilities, or they do not line
            up: a trace that is not the engine's own is worth nothing.
    """
    try:
        completion = msgspec.json.decode(answer_body, type=_Completion)
        choice = completion.choices[0]
    except (msgspec.DecodeError, IndexError) as error:
        raise _not_faithful(f"its answer is no chat completion: {error}") from error
    if completion.prompt_token_ids is None or choice.token_ids is None:
        raise _not_faithful("it returned no token ids; vLLM does with return_token_ids")
    content = choice.logprobs.content if choice.logprobs else None
    if content is None and choice.token_ids:
        raise _not_faithful("it returned no log-probabilities")
    try:
        logprobs = tuple(it.logprob for it in msgspec.convert(content or [], list[_Logprob]))
    except msgspec.ValidationError as error:
        raise _not_faithful(f"its log-probabilities are none: {error}") from error
    if len(logprobs) != len(choice.token_ids):
        raise _not_faithful(
            f"it returned {len(choice.token_ids)} token ids and {len(logprobs)} log-probabilities"
        )
    message = choice.message
    identity = _NOT_OF_AN_ID.sub("", completion.id.removeprefix("chatcmpl-"))[:64] or "0"
    return Sampled(
        answer=ModelAnswer(
            id=identity,
            created=completion.created or int(time.time()),
            content=message.content or "",
            reasoning=message.reasoning_content or message.reasoning or "",
            tool_calls=tuple(
                ToolCall(
                    id=call.id or f"call_{identity}_{index}",
                    name=call.function.name,
                    arguments=call.function.arguments,
                )
                for index, call in enumerate(message.tool_calls or ())
            ),
            finish_reason=choice.finish_reason or "stop",
            stop_sequence=choice.stop_reason if isinstance(choice.stop_reason, str) else None,
            prompt_tokens=len(completion.prompt_token_ids),
            completion_tokens=len(choice.token_ids),
            logprobs=tuple(content or ()),
        ),
        prompt_ids=tuple(completion.prompt_token_ids),
        completion_ids=tuple(choice.token_ids),
        logprobs=logprobs,
        model_version=completion.model_version or model_version,
        temperature=float(asked.get("temperature", 1.0)),
    )


def _not_faithful(what: str) -> DsecError:
    return DsecError(
        ErrorCode.UNSUPPORTED,
        f"the inference server cannot be trained from: {what}",
        details={"reason": "not_token_faithful"},
    )
