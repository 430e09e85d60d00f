"""verl's inference servers as the engine of a model relay: tokens in, tokens out.

A call whose messages are those of an earlier one, its answer and some more, is given the very
tokens of that one, with the new messages' behind them, as verl's own agent loops do. Any other is
tokenised whole.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from pydantic import ValidationError
from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.tools.schemas import OpenAIFunctionToolSchema

from dsec.model_relay import ModelAnswer, ModelRequest, Sampled, ToolCall
from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.model_errors import ModelCallError

Json = dict[str, Any]

#: How to sample is the trainer's to say.
_OF_SAMPLING: Final = frozenset(
    {
        "frequency_penalty",
        "max_tokens",
        "min_p",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "temperature",
        "top_k",
        "top_p",
    }
)
#: What changes nothing.
_AS_IT_IS: Final = (("tool_choice", "auto"), ("parallel_tool_calls", True))
_ABORTED: Final = frozenset({"abort", "aborted"})


@dataclass(frozen=True)
class _Conversation:
    """Messages with the answer to them, and their tokens, of which the first are the prompt."""

    messages: list[Json]
    tools: list[Json]
    token_ids: list[int]
    prompt_length: int

    def goes_on(self, messages: Sequence[Json], tools: Sequence[Json]) -> bool:
        count = len(self.messages)
        return count < len(messages) and self.messages == messages[:count] and self.tools == tools


class VerlEngine:
    """Samples the calls of one rollout.

    Args:
        loop: the agent loop whose servers, tokenizer and configuration are used.
        sampling: verl's parameters; they go before what the harness wishes.
        priority: as verl gives it.

    Attributes:
        sampling_s: how long the servers took, all calls together.
        preempted: how often they put a call off; -1 when they do not tell.
        min_global_steps: of the weights that sampled; None when they do not tell.
        max_global_steps: likewise.
    """

    def __init__(self, loop: AgentLoopBase, sampling: Mapping[str, Any], priority: int) -> None:
        config = loop.rollout_config
        self._server = loop.server_manager
        self._tokenizer = loop.tokenizer
        self._builder = loop.continuous_token_builder
        self._parser = ToolParser.get_tool_parser(config.multi_turn.format, loop.tokenizer)
        self._prompt_max = config.prompt_length
        self._response_max = config.response_length
        self._sampling = {**sampling, "logprobs": True}
        if stops := self._parser.stop_token_ids:
            known = self._sampling.get("stop_token_ids") or []
            self._sampling["stop_token_ids"] = sorted({*known, *stops})
        self._priority = priority
        self._request_id = (
            f"det-{priority}" if config.get("full_determinism", False) else uuid4().hex
        )
        self._conversations: list[_Conversation] = []
        self.sampling_s = 0.0
        self.preempted = -1
        self.min_global_steps: int | None = None
        self.max_global_steps: int | None = None

    async def __call__(self, request: ModelRequest) -> Sampled:
        """Sample the answer to a call.

        Raises:
            DsecError: ``unavailable`` when the servers gave the call up, as for new weights;
                ``unsupported`` when they do not tell log-probabilities.
            ModelCallError: 400 when the context is full, or for what cannot be held to.
        """
        _refuse_what_is_not_held_to(request)
        messages = [_of_a_template(message) for message in request.messages]
        tools = list(request.tools)
        prompt_ids, prompt_length = await self._prompt(messages, tools)
        room = prompt_length + self._response_max - len(prompt_ids)
        if prompt_length > self._prompt_max or room < 1:
            raise ModelCallError(
                400,
                f"{len(prompt_ids)} tokens are more than fit into {self._prompt_max} of a prompt "
                f"and {self._response_max} of what comes after it",
                code="context_length_exceeded",
            )
        most = min(room, request.options.get("max_tokens") or room)
        token_ids, logprobs, steps = await self._generate(prompt_ids, most)
        content, calls = await self._read(token_ids, tools)
        said: Json = {"role": "assistant", "content": content}
        if calls:
            said["tool_calls"] = [_call_of(it.id, it.name, it.arguments) for it in calls]
        self._conversations.append(
            _Conversation([*messages, said], tools, prompt_ids + token_ids, prompt_length)
        )
        finish_reason = "length" if len(token_ids) >= most else "stop"
        return Sampled(
            answer=ModelAnswer(
                id=uuid4().hex,
                created=int(time.time()),
                content=content,
                tool_calls=calls,
                finish_reason="tool_calls" if calls else finish_reason,
                prompt_tokens=len(prompt_ids),
                completion_tokens=len(token_ids),
            ),
            prompt_ids=tuple(prompt_ids),
            completion_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            model_version="" if steps is None else str(steps),
            temperature=float(self._sampling.get("temperature", 1.0)),
        )

    async def _prompt(self, messages: list[Json], tools: list[Json]) -> tuple[list[int], int]:
        """Return a call's tokens, and how many of them are its sequence's prompt."""
        known = max(
            (it for it in self._conversations if it.goes_on(messages, tools)),
            key=lambda it: len(it.messages),
            default=None,
        )
        if known is not None:
            with suppress(ValueError):  # the template has no form for what was added
                merged = await asyncio.to_thread(
                    self._builder.merge_context_tokens,
                    known.messages,
                    messages,
                    known.token_ids,
                    tools=tools or None,
                )
                return list(merged.token_ids), known.prompt_length
        whole = await asyncio.to_thread(
            self._builder.build_initial_tokens, messages, tools=tools or None
        )
        return list(whole), len(whole)

    async def _generate(
        self, prompt_ids: list[int], most: int
    ) -> tuple[list[int], list[float], int | None]:
        began = time.monotonic()
        told = await self._server.generate(
            request_id=self._request_id,
            prompt_ids=prompt_ids,
            sampling_params={**self._sampling, "max_tokens": most},
            priority=self._priority,
        )
        self.sampling_s += time.monotonic() - began
        if told.stop_reason in _ABORTED:
            raise unavailable("the inference server gave the call up")
        if told.log_probs is None or len(told.log_probs) != len(told.token_ids):
            raise DsecError(
                ErrorCode.UNSUPPORTED, "the inference server tells no log-probability of each token"
            )
        if told.num_preempted is not None:
            self.preempted = max(self.preempted, 0) + told.num_preempted
        first, last = (told.extra_fields.get(f"{it}_global_steps") for it in ("min", "max"))
        if self.min_global_steps is None:
            self.min_global_steps = first
        if last is not None:
            self.max_global_steps = max(last, self.max_global_steps or last)
        return list(told.token_ids), list(told.log_probs), last

    async def _read(
        self, token_ids: list[int], tools: list[Json]
    ) -> tuple[str, tuple[ToolCall, ...]]:
        """Return what the tokens say, and the functions that they call."""
        if tools:
            text, calls = await self._parser.extract_tool_calls(token_ids, _schemas(tools))
            if calls:
                return self._without_marks(text), tuple(
                    ToolCall(
                        id=it.tool_call_id or f"call_{uuid4().hex}",
                        name=it.name,
                        arguments=it.arguments,
                    )
                    for it in calls
                )
        text = await asyncio.to_thread(self._tokenizer.decode, token_ids, skip_special_tokens=True)
        return str(text), ()

    def _without_marks(self, text: str | None) -> str:
        text = text or ""
        for mark in self._tokenizer.all_special_tokens:
            text = text.replace(mark, "")
        return text


def _refuse_what_is_not_held_to(request: ModelRequest) -> None:
    for name, value in request.options.items():
        if name not in _OF_SAMPLING and (name, value) not in _AS_IT_IS:
            raise ModelCallError(
                400, f"{name} is not supported: the trainer samples in its own way", param=name
            )


def _of_a_template(message: Json) -> Json:
    """Return a message as chat templates take it; what means the same is the same."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    told: Json = {**message, "content": content}
    if calls := message.get("tool_calls"):
        told["tool_calls"] = [
            _call_of(it["id"], it["function"]["name"], it["function"]["arguments"]) for it in calls
        ]
    return told


def _call_of(identity: str, name: str, arguments: str) -> Json:
    read: Any = arguments
    with suppress(ValueError):
        read = json.loads(arguments)
    function = {"name": name, "arguments": read if isinstance(read, dict) else arguments}
    return {"id": identity, "type": "function", "function": function}


def _schemas(tools: list[Json]) -> list[OpenAIFunctionToolSchema] | None:
    """Return the functions as verl's parsers take them; without, all arguments are text."""
    try:
        return [OpenAIFunctionToolSchema.model_validate(it) for it in tools]
    except ValidationError:
        return None
