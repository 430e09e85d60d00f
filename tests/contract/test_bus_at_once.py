"""Requests that are handled without a task, and answers that are given without waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from bus_talk import ANY_LIST, LIST, Answer, Question
from dsec_common.bus import Bus, ReplyAddress, Request, current_traceparent
from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.testing.nats import NatsForTests, nats_for_tests


@pytest.fixture
async def running() -> AsyncIterator[NatsForTests]:
    async with nats_for_tests() as running:
        yield running


async def _ask(project: Bus, number: int) -> int:
    return (await project.request(LIST, Question(number=number), Answer)).number


async def test_a_handler_that_waits_for_nothing_is_called_in_order_and_needs_no_place(
    running: NatsForTests,
) -> None:
    seen: list[int] = []

    async def handle(request: Request[Question]) -> Answer:
        seen.append(request.message.number)
        return Answer(number=request.message.number)

    async with running.service("scheduler") as service, running.project() as project:
        await service.serve(ANY_LIST, Question, handle, concurrency=1, max_pending=1, at_once=True)
        await service.flush()
        answers = await asyncio.gather(*(_ask(project, number) for number in range(300)))
    assert answers == seen == list(range(300))


async def test_what_such_a_handler_raises_reaches_its_caller_and_the_next_is_served(
    running: NatsForTests,
) -> None:
    traces: set[str] = set()

    async def handle(request: Request[Question]) -> Answer:
        traces.add(current_traceparent.get().split("-")[1])
        if request.message.number == 1:
            raise invalid("no ones")
        if request.message.number == 2:
            raise RuntimeError("cannot")
        return Answer(number=request.message.number)

    async with running.service("scheduler") as service, running.project() as project:
        await service.serve(ANY_LIST, Question, handle, at_once=True)
        await service.flush()
        with pytest.raises(DsecError, match="no ones") as refused:
            await _ask(project, 1)
        with pytest.raises(DsecError) as failed:
            await _ask(project, 2)
        assert await _ask(project, 3) == 3
    assert refused.value.code is ErrorCode.INVALID
    assert failed.value.code is ErrorCode.INTERNAL
    assert len(traces) == 3, "each request has a trace of its own"


async def test_answers_beyond_what_can_be_written_at_once_arrive_all_the_same(
    running: NatsForTests,
) -> None:
    waiting: list[Request[Question]] = []
    count, text = 40, "x" * 800_000

    async with running.service("scheduler") as service, running.project() as project:

        async def handle(request: Request[Question]) -> None:
            waiting.append(request)
            if len(waiting) < count:
                return
            for one in waiting:
                service.reply_soon(one.caller, Answer(number=one.message.number, text=text))

        await service.serve(ANY_LIST, Question, handle, at_once=True)
        await service.flush()
        answers = await asyncio.gather(*(_ask(project, number) for number in range(count)))
    assert answers == list(range(count))


async def test_an_answer_goes_to_no_subject_that_is_none_for_replies(
    running: NatsForTests,
) -> None:
    async with running.service("scheduler") as service:
        service.reply_soon(ReplyAddress(), Answer(number=1))
        with pytest.raises(DsecError) as refused:
            service.reply_soon(ReplyAddress("dsec.v1.default.sandbox.list"), Answer(number=1))
    assert refused.value.code is ErrorCode.DENIED
