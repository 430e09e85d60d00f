"""One call of a model and its answer, whichever interface they were spoken in.

Messages, tools and choices are in the form of OpenAI's chat completions: that is what engines take,
and what chat templates are written for.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dsec_common.model_errors import ModelApi

Json = dict[str, Any]


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a harness asks.

    Attributes:
        api: the interface it spoke.
        model: the name that it called the model by.
        messages: the conversation.
        tools: functions that it may call.
        options: fields of a chat completion that go to the engine as they are.
        stream: whether it wants events.
        include_usage: whether the stream of a chat completion ends with the usage.
        logprobs: whether it wants log-probabilities of its own.
        top_logprobs: how many alternatives with each.
    """

    api: ModelApi
    model: str
    messages: tuple[Json, ...]
    tools: tuple[Json, ...] = ()
    options: Json = msgspec.field(default_factory=dict)
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    top_logprobs: int = 0


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model calls; ``arguments`` is JSON as it was sampled."""

    id: str
    name: str
    arguments: str


class ModelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What the model said.

    Attributes:
        id: of the call; letters, digits, ``-`` and ``_``.
        created: Unix seconds.
        content: the text; empty for none.
        reasoning: what it thought first, if the engine tells it apart.
        tool_calls: the functions that it calls.
        finish_reason: in the engine's words: ``stop``, ``length``, ``tool_calls``, …
        stop_sequence: the one that ended it, if one did.
        prompt_tokens: how many tokens the engine was given.
        completion_tokens: how many it sampled.
        logprobs: OpenAI's ``logprobs.content``, when it was asked for.
    """

    id: str
    created: int
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "stop"
    stop_sequence: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    logprobs: tuple[Json, ...] | None = None
