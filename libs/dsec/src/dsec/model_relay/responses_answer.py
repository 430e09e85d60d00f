"""How OpenAI's responses are answered, whole and as events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dsec.model_relay.calls import (
    Json,
    ModelAnswer,
    ModelBegun,
    ModelDelta,
    ModelRequest,
    deltas_of,
)

_CUT: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}


def render(request: ModelRequest, answer: ModelAnswer) -> Json:
    """Return the body of an answer that is not streamed."""
    items = _Items(answer.id)
    for delta in deltas_of(answer):
        items.into(delta)
        items.add(delta)
    items.need_one()
    status = _status(answer)
    return _response(request, answer, [{**it, "status": status} for it in items.all], status)


class _Items:
    """What an answer consists of so far: thoughts, words, and calls of functions."""

    def __init__(self, answer_id: str) -> None:
        self.all: list[Json] = []
        self._id = answer_id
        self._tool = -1

    def into(self, delta: ModelDelta) -> bool:
        """Have the last item be the one that a delta belongs to; return whether it is new."""
        if delta.tool >= 0:
            if delta.tool == self._tool:
                return False
            self._tool = delta.tool
            self._begin(
                "fc", "function_call", call_id=delta.tool_id, name=delta.tool_name, arguments=""
            )
            return True
        kind = "reasoning" if delta.reasoning else "message"
        if self.all and self.all[-1]["type"] == kind:
            return False
        if kind == "reasoning":
            part: Json = {"type": "reasoning_text", "text": ""}
            self._begin("rs", kind, summary=[], content=[part])
        else:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._begin("msg", kind, role="assistant", content=[part])
        return True

    def _begin(self, prefix: str, kind: str, **fields: object) -> None:
        identity = f"{prefix}_{self._id}_{len(self.all)}"
        self.all.append({"id": identity, "type": kind, "status": "in_progress", **fields})

    def add(self, delta: ModelDelta) -> None:
        """Add a delta to the last item."""
        item = self.all[-1]
        if delta.tool >= 0:
            item["arguments"] += delta.arguments
        else:
            item["content"][0]["text"] += delta.reasoning + delta.content

    def need_one(self) -> bool:
        """Have a message if nothing was said, even an empty one; return whether it is new."""
        if any(it["type"] != "reasoning" for it in self.all):
            return False
        return self.into(ModelDelta())


class Telling:
    """Writes a streamed answer, in numbered events."""

    def __init__(self, request: ModelRequest) -> None:
        self._request = request
        self._items = _Items("")
        self._number = 0

    def begin(self, begun: ModelBegun) -> Iterator[Json | str]:
        """Yield what says that a response is made."""
        self._items = _Items(begun.id)
        response = _response(self._request, begun, [], "in_progress")
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def add(self, delta: ModelDelta) -> Iterator[Json | str]:
        """Yield what says more."""
        before = len(self._items.all)
        if self._items.into(delta):
            if before:
                yield from self._close(before - 1, "completed")
            yield from self._open()
        self._items.add(delta)
        if not delta.characters:
            return
        place = self._place(len(self._items.all) - 1)
        if delta.tool >= 0:
            kind = "response.function_call_arguments.delta"
            yield self._event(kind, **place, delta=delta.arguments)
        elif delta.reasoning:
            kind = "response.reasoning_text.delta"
            yield self._event(kind, **place, content_index=0, delta=delta.reasoning)
        else:
            kind = "response.output_text.delta"
            yield self._event(kind, **place, content_index=0, logprobs=[], delta=delta.content)

    def end(self, answer: ModelAnswer) -> Iterator[Json | str]:
        """Yield the response as it is now that it is whole."""
        before = len(self._items.all)
        if self._items.need_one():
            if before:
                yield from self._close(before - 1, "completed")
            yield from self._open()
        status = _status(answer)
        yield from self._close(len(self._items.all) - 1, status)
        response = _response(self._request, answer, self._items.all, status)
        yield self._event(f"response.{status}", response=response)

    def _open(self) -> Iterator[Json]:
        index = len(self._items.all) - 1
        item = self._items.all[index]
        parts = item.get("content")
        shown = {**item, "content": []} if parts else item
        yield self._event("response.output_item.added", output_index=index, item=dict(shown))
        if parts:
            part = dict(parts[0])
            yield self._event(
                "response.content_part.added", **self._place(index), content_index=0, part=part
            )

    def _close(self, index: int, status: str) -> Iterator[Json]:
        item, place = self._items.all[index], self._place(index)
        item["status"] = status
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **place, **done)
        else:
            part = item["content"][0]
            place["content_index"] = 0
            if item["type"] == "message":
                yield self._event(
                    "response.output_text.done", **place, logprobs=[], text=part["text"]
                )
            else:
                yield self._event("response.reasoning_text.done", **place, text=part["text"])
            yield self._event("response.content_part.done", **place, part=part)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _place(self, index: int) -> Json:
        return {"output_index": index, "item_id": self._items.all[index]["id"]}

    def _event(self, kind: str, **fields: object) -> Json:
        event = {"type": kind, **fields, "sequence_number": self._number}
        self._number += 1
        return event


def _status(answer: ModelAnswer) -> str:
    return "incomplete" if answer.finish_reason in _CUT else "completed"


def _response(
    request: ModelRequest, answer: ModelAnswer | ModelBegun, output: list[Json], status: str
) -> Json:
    whole = answer if isinstance(answer, ModelAnswer) else None
    cut = _CUT.get(whole.finish_reason) if whole else None
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": cut} if cut else None,
        "instructions": None,
        "metadata": {},
        "model": request.model,
        "output": output,
        "parallel_tool_calls": request.options.get("parallel_tool_calls", True),
        "temperature": request.options.get("temperature"),
        "tool_choice": _told_choice(request),
        "tools": [{"type": "function", "strict": None, **it["function"]} for it in request.tools],
        "top_p": request.options.get("top_p"),
        "max_output_tokens": request.options.get("max_tokens"),
        "previous_response_id": None,
        "truncation": "disabled",
        "usage": _usage(whole) if whole else None,
    }


def _told_choice(request: ModelRequest) -> str | Json:
    choice = request.options.get("tool_choice", "auto")
    if isinstance(choice, dict):
        return {"type": "function", "name": choice["function"]["name"]}
    return str(choice)


def _usage(answer: ModelAnswer) -> Json:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
