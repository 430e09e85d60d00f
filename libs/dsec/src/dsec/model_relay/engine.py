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
    request: ModelRequest,
    *,
    model: str = "",
    sampling: Mapping[str, Any] | None = None,
    stream: bool = False,
) -> Json:
    """Return the chat completion to ask the inference server for.

    Args:
        request: what the harness asked.
        model: the server's name for it; empty for the name that the harness used.
        sampling: options that the trainer has its way with, whatever the harness asked for.
        stream: whether the server is to tell each token when it has it.
    """
    body: Json = {
        "model": model or request.model,
        "messages": list(request.messages),
        **request.options,
        **(sampling or {}),
        "stream": stream,
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
        raise not_faithful(f"its answer is no chat completion: {error}") from error
    message = choice.message
    identity = identity_of(completion.id)
    return sampled_of(
        ModelAnswer(
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
        ),
        prompt_ids=completion.prompt_token_ids,
        completion_ids=choice.token_ids,
        logprobs=choice.logprobs.content if choice.logprobs else None,
        model_version=completion.model_version or model_version,
        asked=asked,
    )


def identity_of(completion_id: str) -> str:
    """Return the id of an answer, given the server's."""
    return _NOT_OF_AN_ID.sub("", completion_id.removeprefix("chatcmpl-"))[:64] or "0"


def sampled_of(
    answer: ModelAnswer,
    *,
    prompt_ids: list[int] | None,
    completion_ids: list[int] | None,
    logprobs: list[Json] | None,
    model_version: str,
    asked: Json,
) -> Sampled:
    """Return what the server sampled, if it has told all of it.

    Raises:
        DsecError: ``unsupported`` as :func:`read_engine` says.
    """
    if prompt_ids is None or completion_ids is None:
        raise not_faithful("it returned no token ids; vLLM does with return_token_ids")
    if logprobs is None and completion_ids:
        raise not_faithful("it returned no log-probabilities")
    try:
        numbers = tuple(it.logprob for it in msgspec.convert(logprobs or [], list[_Logprob]))
    except msgspec.ValidationError as error:
        raise not_faithful(f"its log-probabilities are none: {error}") from error
    if len(numbers) != len(completion_ids):
        raise not_faithful(
            f"it returned {len(completion_ids)} token ids and {len(numbers)} log-probabilities"
        )
    return Sampled(
        answer=msgspec.structs.replace(
            answer,
            prompt_tokens=len(prompt_ids),
            completion_tokens=len(completion_ids),
            logprobs=tuple(logprobs or ()),
        ),
        prompt_ids=tuple(prompt_ids),
        completion_ids=tuple(completion_ids),
        logprobs=numbers,
        model_version=model_version,
        temperature=float(asked.get("temperature", 1.0)),
    )


def not_faithful(what: str) -> DsecError:
    """Return the error for a server whose answers are no ground to train on."""
    return DsecError(
        ErrorCode.UNSUPPORTED,
        f"the inference server cannot be trained from: {what}",
        details={"reason": "not_token_faithful"},
    )
