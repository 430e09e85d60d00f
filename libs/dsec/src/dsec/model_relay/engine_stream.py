"""An inference server's streamed answer: told on as it comes, and put together token by token.

Each chunk brings the ids of its tokens (``token_ids`` in the choice) and their log-probabilities,
the first one those of the prompt (``prompt_token_ids``): vLLM does so with ``return_token_ids``.
"""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec

from dsec.model_relay.calls import Json, ModelAnswer, ModelBegun, ModelDelta, Tell, ToolCall
from dsec.model_relay.engine import Sampled, identity_of, not_faithful, sampled_of
from dsec_common.errors import unavailable

_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"


class _Function(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct, frozen=True):
    index: int = 0
    id: str | None = None
    function: _Function = _Function()


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[Json] | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta = _Delta()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    id: str = ""
    created: int = 0
    prompt_token_ids: list[int] | None = None
    model_version: str | None = None
    error: Any = None


class _Call:
    """A function's call that is being told."""

    def __init__(self, call_id: str, name: str) -> None:
        self.id = call_id
        self.name = name
        self.arguments: list[str] = []


class StreamReader:
    """Reads one answer.

    Args:
        tell: told of what comes, in order.
        asked: what it answers, of :func:`~dsec.model_relay.engine.engine_body`.
        model_version: what the trainer calls the weights now, if the server does not say.
    """

    def __init__(self, tell: Tell, asked: Json, *, model_version: str = "") -> None:
        self._tell = tell
        self._asked = asked
        self._version = model_version
        self._rest = b""
        self._decoder = msgspec.json.Decoder(_Chunk)
        self._begun: ModelBegun | None = None
        self._prompt_ids: list[int] | None = None
        self._completion_ids: list[int] | None = None
        self._logprobs: list[Json] | None = None
        self._untold: list[Json] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []
        self._call_index = -1  # the server's number of the newest
        self._finish_reason = ""
        self._stop_sequence: str | None = None

    def feed(self, data: bytes) -> None:
        """Take bytes of the stream in.

        Raises:
            DsecError: ``unavailable`` when the server says that it failed; ``unsupported`` when
                this is no stream of a chat completion.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(_DATA):
                continue
            event = line[len(_DATA) :].strip()
            if event == _DONE:
                continue
            try:
                chunk = self._decoder.decode(event)
            except msgspec.DecodeError as error:
                raise not_faithful(f"its stream is no chat completion's: {error}") from error
            self._take(chunk)

    def _take(self, chunk: _Chunk) -> None:
        if chunk.error is not None:
            told = msgspec.json.encode(chunk.error)[:200].decode(errors="replace")
            raise unavailable(f"the inference server failed on the way: {told}")
        if chunk.prompt_token_ids is not None:
            self._prompt_ids = chunk.prompt_token_ids
        self._version = chunk.model_version or self._version
        if self._begun is None:
            self._begun = ModelBegun(
                id=identity_of(chunk.id),
                created=chunk.created or int(time.time()),
                prompt_tokens=len(self._prompt_ids or ()),
            )
            self._tell(self._begun)
        for choice in chunk.choices[:1]:
            self._take_tokens(choice)
            self._take_text(choice.delta)
            if choice.finish_reason:
                self._finish_reason = choice.finish_reason
                if isinstance(choice.stop_reason, str):
                    self._stop_sequence = choice.stop_reason

    def _take_tokens(self, choice: _Choice) -> None:
        if choice.token_ids is not None:
            if self._completion_ids is None:
                self._completion_ids = []
            self._completion_ids += choice.token_ids
        if choice.logprobs is not None and choice.logprobs.content is not None:
            if self._logprobs is None:
                self._logprobs = []
            self._logprobs += choice.logprobs.content
            self._untold += choice.logprobs.content

    def _take_text(self, delta: _Delta) -> None:
        if reasoning := delta.reasoning_content or delta.reasoning:
            self._reasoning.append(reasoning)
            self._tell(ModelDelta(reasoning=reasoning, logprobs=self._with_it()))
        if delta.content:
            self._content.append(delta.content)
            self._tell(ModelDelta(content=delta.content, logprobs=self._with_it()))
        for call in delta.tool_calls or ():
            self._take_call(call)

    def _take_call(self, piece: _ToolCall) -> None:
        name, arguments = piece.function.name or "", piece.function.arguments or ""
        if not self._calls or piece.index > self._call_index:
            self._call_index = piece.index
            index = len(self._calls)
            assert self._begun is not None  # noqa: S101  told with the first chunk
            call = _Call(piece.id or f"call_{self._begun.id}_{index}", name)
            self._calls.append(call)
            begun = ModelDelta(tool=index, tool_id=call.id, tool_name=name)
        elif piece.index == self._call_index:
            call, begun = self._calls[-1], ModelDelta(tool=len(self._calls) - 1)
        else:
            raise not_faithful("it streams calls of functions one into another")
        call.arguments.append(arguments)
        told = msgspec.structs.replace(begun, arguments=arguments, logprobs=self._with_it())
        self._tell(told)

    def _with_it(self) -> tuple[Json, ...]:
        """Return the log-probabilities that no delta has had: some tokens are no text yet."""
        untold, self._untold = self._untold, []
        return tuple(untold)

    def end(self) -> Sampled:
        """Return what was sampled, when the stream has ended.

        Raises:
            DsecError: ``unavailable`` when it broke off; ``unsupported`` when token ids or
                log-probabilities were missing.
        """
        if self._begun is None or not self._finish_reason:
            raise unavailable("the inference server broke off")
        return sampled_of(
            ModelAnswer(
                id=self._begun.id,
                created=self._begun.created,
                content="".join(self._content),
                reasoning="".join(self._reasoning),
                tool_calls=tuple(
                    ToolCall(id=call.id, name=call.name, arguments="".join(call.arguments))
                    for call in self._calls
                ),
                finish_reason=self._finish_reason,
                stop_sequence=self._stop_sequence,
            ),
            prompt_ids=self._prompt_ids,
            completion_ids=self._completion_ids,
            logprobs=self._logprobs,
            model_version=self._version,
            asked=self._asked,
        )
