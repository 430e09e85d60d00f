"""One call of a model and its answer, whichever interface they were spoken in.

Messages, tools and choices are in the form of OpenAI's chat completions: that is what engines take,
and what chat templates are written for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

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


class ModelBegun(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an answer before anything of it was sampled; as in :class:`ModelAnswer`."""

    id: str
    created: int
    prompt_tokens: int = 0


class ModelDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What comes next of an answer: some of its text, of its thoughts, or of one function's call.

    Attributes:
        content: text.
        reasoning: thoughts.
        tool: which call of a function it is, from 0, each whole before the next; -1 for none.
        tool_id: of that call, in its first delta.
        tool_name: of the function, in its first delta.
        arguments: more of its JSON.
        logprobs: OpenAI's ``logprobs.content`` of the tokens, when it was asked for.
    """

    content: str = ""
    reasoning: str = ""
    tool: int = -1
    tool_id: str = ""
    tool_name: str = ""
    arguments: str = ""
    logprobs: tuple[Json, ...] = ()

    @property
    def characters(self) -> int:
        """How much text it is."""
        return len(self.content) + len(self.reasoning) + len(self.arguments)

    def is_followed_by(self, more: ModelDelta) -> bool:
        """Return whether the next delta is of the same part of the answer."""
        if self.tool != more.tool or more.tool_id:
            return False
        return self.tool >= 0 or bool(self.content) == bool(more.content)


def joined(deltas: Sequence[ModelDelta]) -> ModelDelta:
    """Return deltas of the same part of an answer, at least one, as one."""
    if len(deltas) == 1:
        return deltas[0]
    return msgspec.structs.replace(
        deltas[0],
        content="".join(delta.content for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        arguments="".join(delta.arguments for delta in deltas),
        logprobs=tuple(it for delta in deltas for it in delta.logprobs),
    )


Tell = Callable[[ModelBegun | ModelDelta], None]
"""Takes what an engine knows of an answer: its beginning first, then what comes, in order."""


def begun_of(answer: ModelAnswer) -> ModelBegun:
    """Return the beginning of an answer that is whole."""
    return ModelBegun(id=answer.id, created=answer.created, prompt_tokens=answer.prompt_tokens)


def deltas_of(answer: ModelAnswer) -> Iterator[ModelDelta]:
    """Yield the parts of an answer that is whole."""
    if answer.reasoning:
        yield ModelDelta(reasoning=answer.reasoning)
    if answer.content:
        yield ModelDelta(content=answer.content, logprobs=answer.logprobs or ())
    for index, call in enumerate(answer.tool_calls):
        yield ModelDelta(tool=index, tool_id=call.id, tool_name=call.name, arguments=call.arguments)


class Telling(Protocol):
    """Writes an answer as events, in the words of the interface that was called.

    Used once: :meth:`begin`, :meth:`add` for each delta, and :meth:`end` when the answer is whole.
    """

    def begin(self, begun: ModelBegun) -> Iterator[Json | str]:
        """Yield the events before any text."""
        ...

    def add(self, delta: ModelDelta) -> Iterator[Json | str]:
        """Yield the events that say more."""
        ...

    def end(self, answer: ModelAnswer) -> Iterator[Json | str]:
        """Yield the last events; what the answer says was told."""
        ...
