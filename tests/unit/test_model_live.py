"""Answers that are told while they are sampled: what was told is how the whole one begins."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest

from dsec.model_relay.calls import ModelAnswer, ModelBegun, ModelDelta, ModelRequest, ToolCall
from dsec.model_relay.engine_stream import StreamReader
from dsec.model_relay.interfaces import parse_call
from dsec.model_relay.live import LiveAnswer
from dsec_common.errors import DsecError
from dsec_common.model_calls import answer_of
from dsec_common.model_errors import ModelApi
from dsec_common.wire.rollout_stream import StreamFeedback
from dsec_sandboxd.model_stream import PENDING_BYTES, AnswerStream

ANSWER = ModelAnswer(
    id="1",
    created=7,
    content="I look around.",
    reasoning="Hm, well.",
    tool_calls=(
        ToolCall(id="c1", name="sh", arguments='{"line":"ls"}'),
        ToolCall(id="c2", name="sh", arguments="no JSON"),
    ),
    finish_reason="tool_calls",
    prompt_tokens=3,
    completion_tokens=9,
)
BODIES: dict[ModelApi, dict[str, Any]] = {
    ModelApi.CHAT: {"messages": [{"role": "user", "content": "x"}]},
    ModelApi.RESPONSES: {"input": "x"},
    ModelApi.MESSAGES: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
}


def _asked(api: ModelApi) -> ModelRequest:
    return parse_call(api, msgspec.json.encode({"model": "m", "stream": True, **BODIES[api]}))


def _letters(answer: ModelAnswer) -> list[ModelDelta]:
    """Return an answer, letter by letter."""
    deltas = [ModelDelta(reasoning=it) for it in answer.reasoning]
    deltas += [ModelDelta(content=it) for it in answer.content]
    for index, call in enumerate(answer.tool_calls):
        deltas.append(ModelDelta(tool=index, tool_id=call.id, tool_name=call.name))
        deltas += [ModelDelta(tool=index, arguments=it) for it in call.arguments]
    return deltas


@pytest.mark.parametrize("api", list(ModelApi))
@pytest.mark.parametrize("seed", range(5))
async def test_what_a_reader_has_is_how_the_whole_answer_begins(api: ModelApi, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311  no secret
    live = LiveAnswer(_asked(api), {})
    live.tell(ModelBegun(id="1", created=7, prompt_tokens=3))
    read = [b"", b""]
    for delta in _letters(ANSWER):
        live.tell(delta)
        for reader in range(2):
            if chance.random() < 0.3:
                task = asyncio.create_task(live.after(len(read[reader]), chance.randint(1, 99)))
                await asyncio.sleep(0)
                read[reader] += task.result() if task.done() else b""
                task.cancel()
    whole = live.end(ANSWER)
    assert all(read)
    assert whole.startswith(read[0])
    assert whole.startswith(read[1])


async def test_a_reader_is_woken_by_what_comes_and_gets_all_of_it_as_one_event() -> None:
    live = LiveAnswer(_asked(ModelApi.CHAT), {})
    reading = asyncio.create_task(live.after(0, 1 << 20))
    live.tell(ModelBegun(id="1", created=7))
    await asyncio.sleep(0)
    assert not reading.done()
    live.tell(ModelDelta(content="_"))
    begun = await reading
    assert begun.count(b"data:") == 2
    for letter in "abc":
        live.tell(ModelDelta(content=letter))
    more = await live.after(len(begun), 1 << 20)
    assert more.count(b"data:") == 1
    assert b'"abc"' in more


async def test_thirty_thousand_tokens_that_each_came_alone_fit_the_record() -> None:
    chance = random.Random(1)  # noqa: S311  no secret
    words = [f"w{chance.randrange(5_000)} " for _ in range(30_000)]
    live = LiveAnswer(_asked(ModelApi.CHAT), {})
    live.tell(ModelBegun(id="1", created=7))
    size = 0
    reading: asyncio.Task[bytes] | None = None
    for word in words:
        live.tell(ModelDelta(content=word))
        reading = reading or asyncio.create_task(live.after(size, 1 << 30))
        for _ in range(3):  # it is woken, reads, and is done
            await asyncio.sleep(0)
        if reading.done():
            size += len(reading.result())
            reading = None
    if reading is not None:
        reading.cancel()
    whole = live.end(ModelAnswer(id="1", created=7, content="".join(words)))
    assert 1000 < whole.count(b"data:") < 10_000
    told_at_once = answer_of(200, "", {}, "".join(words).encode()).data
    assert len(answer_of(200, "", {}, whole).data) < len(told_at_once) + 100_000


@pytest.mark.parametrize(
    ("deltas", "why"),
    [
        ([ModelDelta(content="no")], "another answer"),
        ([ModelDelta(reasoning="no")], "another answer"),
        ([*_letters(ANSWER), ModelDelta(tool=0, arguments="x")], "one into another"),
    ],
)
def test_an_engine_that_contradicts_itself_is_found_out(deltas: list[ModelDelta], why: str) -> None:
    live = LiveAnswer(_asked(ModelApi.CHAT), {})
    live.tell(ModelBegun(id="1", created=7))
    for delta in deltas:
        live.tell(delta)
    with pytest.raises(DsecError, match=why):
        live.end(ANSWER)


# --- The engine's stream ----------------------------------------------------------------------


def _chunk(delta: dict[str, Any] | None = None, **choice: Any) -> dict[str, Any]:
    return {"id": "chatcmpl-a", "created": 5, "choices": [{"delta": delta or {}, **choice}]}


def _token(delta: dict[str, Any], token: int) -> dict[str, Any]:
    return _chunk(delta, token_ids=[token], logprobs={"content": [{"logprob": -token / 10}]})


def _call(index: int, **function: str) -> dict[str, Any]:
    named = {"id": f"call_{index}"} if "name" in function else {}
    return {"tool_calls": [{"index": index, "function": function, **named}]}


STREAM = [
    {**_chunk({"role": "assistant"}), "prompt_token_ids": [7, 8], "model_version": "step-3"},
    _token({"reasoning_content": "Hm"}, 1),
    _token({}, 2),
    _token({"content": "Zoë "}, 3),
    _token(_call(0, name="sh", arguments=""), 4),
    _token(_call(0, arguments='{"a":'), 5),
    _token(_call(0, arguments="1}"), 6),
    _token(_call(1, name="sh", arguments="{}"), 7),
    _chunk(finish_reason="tool_calls"),
]


def _fed(chunks: list[dict[str, Any]], size: int = 1 << 20) -> tuple[StreamReader, list[Any]]:
    told: list[Any] = []
    reader = StreamReader(told.append, {"temperature": 0.5})
    data = b"".join(b"data: " + msgspec.json.encode(it) + b"\r\n\r\n" for it in chunks)
    data += b": a comment\n\ndata: [DONE]\n\n"
    for at in range(0, len(data), size):
        reader.feed(data[at : at + size])
    return reader, told


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_a_stream_is_put_together_token_by_token(size: int) -> None:
    reader, told = _fed(STREAM, size)
    sampled = reader.end()
    assert sampled.prompt_ids == (7, 8)
    assert sampled.completion_ids == (1, 2, 3, 4, 5, 6, 7)
    assert sampled.logprobs == tuple(-token / 10 for token in range(1, 8))
    assert (sampled.model_version, sampled.temperature) == ("step-3", 0.5)
    answer = sampled.answer
    assert (answer.content, answer.reasoning, answer.finish_reason) == ("Zoë ", "Hm", "tool_calls")
    assert [(it.id, it.arguments) for it in answer.tool_calls] == [
        ("call_0", '{"a":1}'),
        ("call_1", "{}"),
    ]
    assert told[0] == ModelBegun(id="a", created=5, prompt_tokens=2)
    assert [len(it.logprobs) for it in told[1:]] == [1, 2, 1, 1, 1, 1]
    live = LiveAnswer(_asked(ModelApi.CHAT), {})
    for news in told:
        live.tell(news)
    assert live.end(answer).count(b'"name":"sh"') == 2


@pytest.mark.parametrize(
    ("chunks", "why"),
    [
        (STREAM[:-1], "broke off"),
        ([], "broke off"),
        ([STREAM[0], {"error": {"message": "out of memory"}}], "out of memory"),
        ([{**_chunk(), "prompt_token_ids": None}, STREAM[-1]], "no token ids"),
        ([STREAM[0], _chunk({"content": "x"}, token_ids=[1]), STREAM[-1]], "no log-probabilities"),
        ([*STREAM[:-1], _chunk(_call(0, arguments="x"))], "one into another"),
        ([{"choices": 5}], "no chat completion's"),
    ],
)
def test_a_stream_that_cannot_be_trained_from_is_refused(
    chunks: list[dict[str, Any]], why: str
) -> None:
    with pytest.raises(DsecError, match=why):
        _fed(chunks)[0].end()


# --- The node's end ---------------------------------------------------------------------------


def _piece(data: bytes, offset: int = 0, stream: str = "a") -> StreamFeedback:
    return StreamFeedback(seq=1, stream=stream, data=data, offset=offset)


def test_pieces_are_taken_in_order_and_once() -> None:
    stream = AnswerStream()
    assert stream.offer(_piece(b"abc")) == 3
    assert stream.offer(_piece(b"abcd")) == 4
    assert stream.offer(_piece(b"x", 9)) == 4
    assert stream.offer(_piece(b"x", -1)) == 4
    assert stream.take() == b"abcd"
    assert stream.rest_of(b"abcdef") == b"ef"
    assert stream.rest_of(b"abcxef") is None
    assert stream.rest_of(b"abc") is None


def test_another_sample_begins_anew_until_some_of_one_was_told() -> None:
    stream = AnswerStream()
    assert stream.offer(_piece(b"abc")) == 3
    assert stream.offer(_piece(b"de", stream="b")) == 2
    assert stream.take() == b"de"
    assert stream.rest_of(b"def") == b"f"
    assert stream.offer(_piece(b"gh", stream="c")) == 0
    assert stream.broken
    assert stream.rest_of(b"def") is None


def test_what_a_slow_reader_has_not_read_is_bounded() -> None:
    stream = AnswerStream()
    half = bytes(PENDING_BYTES // 2)
    assert stream.offer(_piece(half)) == len(half)
    assert stream.offer(_piece(half, len(half))) == PENDING_BYTES
    assert stream.offer(_piece(b"x", PENDING_BYTES)) == PENDING_BYTES
    assert len(stream.take()) == PENDING_BYTES
    assert stream.offer(_piece(b"x", PENDING_BYTES)) == PENDING_BYTES + 1


def test_calls_of_functions_may_be_numbered_from_any_number() -> None:
    chunks = [
        STREAM[0],
        _token(_call(1, name="sh", arguments='{"a":'), 1),
        _token(_call(1, arguments="1}"), 2),
        _token(_call(3, name="sh", arguments="{}"), 3),
        _chunk(finish_reason="tool_calls"),
    ]
    reader, _ = _fed(chunks)
    assert [it.arguments for it in reader.end().answer.tool_calls] == ['{"a":1}', "{}"]
