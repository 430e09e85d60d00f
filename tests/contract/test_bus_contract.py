"""What the bus promises to callers and services, against a real NATS server with accounts."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import nats
import pytest

from bus_talk import ANY_LIST, LIST, Answer, Question, echo
from dsec_common import subjects
from dsec_common.bus import Request, current_traceparent
from dsec_common.errors import STATUS_OF, DsecError, ErrorCode, invalid
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_common.wire.base import encode


@pytest.fixture
async def running() -> AsyncIterator[NatsForTests]:
    async with nats_for_tests() as running:
        yield running


# --- Requests -------------------------------------------------------------------------------------


async def test_a_request_is_answered_and_the_project_comes_from_the_account(
    running: NatsForTests,
) -> None:
    async with running.service("scheduler") as service, running.project() as project:
        await service.serve(ANY_LIST, Question, echo, queue="scheduler")
        await service.flush()
        answer = await project.request(LIST, Question(number=7), Answer)
    assert (answer.number, answer.text) == (7, "default")


@pytest.mark.parametrize("code", list(ErrorCode))
async def test_an_error_reaches_the_caller_unchanged(
    running: NatsForTests, code: ErrorCode
) -> None:
    async def refuse(_: Request[Question]) -> Answer:
        raise DsecError(
            code, "no: ünicode\r\nand lines", retry_after_s=1.5, details={"limit": 3, "path": "/x"}
        )

    async with running.service("scheduler") as service, running.project() as project:
        await service.serve(ANY_LIST, Question, refuse)
        await service.flush()
        with pytest.raises(DsecError) as caught:
            await project.request(LIST, Question(), Answer)
    error = caught.value
    assert error.code is code
    assert error.message == "no: ünicode\r\nand lines"
    assert error.retry_after_s == 1.5
    assert error.details == {"limit": 3, "path": "/x"}
    assert error.retryable == DsecError(code, "").retryable


async def test_an_unexpected_exception_is_internal_and_says_nothing_of_its_text(
    running: NatsForTests,
) -> None:
    async def fail(_: Request[Question]) -> Answer:
        raise KeyError("a secret")

    async with running.service("scheduler") as service, running.project() as project:
        await service.serve(ANY_LIST, Question, fail)
        await service.flush()
        with pytest.raises(DsecError) as caught:
            await project.request(LIST, Question(), Answer)
    assert caught.value.code is ErrorCode.INTERNAL
    assert "secret" not in str(caught.value)


async def test_a_subject_that_nobody_serves_is_unavailable_at_once(running: NatsForTests) -> None:
    async with running.project() as project:
        async with asyncio.timeout(20):
            with pytest.raises(DsecError) as caught:
                await project.request(LIST, Question(), Answer, timeout_s=30)
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert LIST in caught.value.message


async def test_a_silent_service_is_a_timeout(running: NatsForTests) -> None:
    async def hand_on(_: Request[Question]) -> None:
        return None

    async with running.service("scheduler") as service, running.project() as project:
        await service.serve(ANY_LIST, Question, hand_on)
        await service.flush()
        with pytest.raises(DsecError) as caught:
            await project.request(LIST, Question(), Answer, timeout_s=0.05)
    assert caught.value.code is ErrorCode.TIMEOUT


async def test_requests_that_are_given_up_fail_at_once_and_no_others(
    running: NatsForTests,
) -> None:
    """Two wait for one subject, one for another."""
    arrived: asyncio.Queue[str] = asyncio.Queue()
    may_answer = asyncio.Event()

    async def wait(request: Request[Question]) -> Answer:
        arrived.put_nowait(request.subject)
        await may_answer.wait()
        return Answer(text=request.subject)

    lost, well = subjects.node_request("lost", "place"), subjects.node_request("well", "place")
    async with running.service("sandboxd", "lost") as node, running.service("scheduler") as bus:
        await node.serve(lost, Question, wait)
        async with running.service("sandboxd", "well") as other, asyncio.TaskGroup() as tasks:
            await other.serve(well, Question, wait)
            await node.flush()
            await other.flush()
            given_up = [
                tasks.create_task(_error_of(bus.request(lost, Question(), Answer, timeout_s=60.0)))
                for _ in range(2)
            ]
            answered = tasks.create_task(bus.request(well, Question(), Answer, timeout_s=60.0))
            for _ in range(3):
                await arrived.get()
            bus.give_up(lost, lambda: invalid("given up"))
            errors = await asyncio.gather(*given_up)
            assert [error.message for error in errors] == ["given up"] * 2
            assert not answered.done()
            may_answer.set()
            assert (await answered).text == well
        # The replies of those that were given up have nobody to go to.
        assert (await bus.request(lost, Question(), Answer)).text == lost


async def _error_of(request: Awaitable[object]) -> DsecError:
    with pytest.raises(DsecError) as caught:
        await request
    return caught.value


async def test_a_subject_beyond_the_credentials_is_denied_at_once(running: NatsForTests) -> None:
    async with running.project() as project:
        async with asyncio.timeout(20):
            with pytest.raises(DsecError) as caught:
                await project.request(
                    subjects.sandbox_list("other"), Question(), Answer, timeout_s=30
                )
    assert caught.value.code is ErrorCode.DENIED


async def test_a_message_larger_than_the_server_takes_is_invalid(running: NatsForTests) -> None:
    async with running.project() as project:
        with pytest.raises(DsecError) as caught:
            await project.request(LIST, Question(text="x" * 2_000_000), Answer)
    assert caught.value.code is ErrorCode.INVALID


async def test_an_answer_larger_than_the_server_takes_is_an_error_not_a_silence(
    running: NatsForTests,
) -> None:
    async def shout(_: Request[Question]) -> Answer:
        return Answer(text="x" * 2_000_000)

    async with running.service("scheduler") as service, running.project() as project:
        await service.serve(ANY_LIST, Question, shout)
        await service.flush()
        with pytest.raises(DsecError) as caught:
            await project.request(LIST, Question(), Answer)
    assert caught.value.code is ErrorCode.INVALID


# --- Encodings ------------------------------------------------------------------------------------


async def test_a_plain_nats_client_speaks_json_without_our_sdk(running: NatsForTests) -> None:
    credentials = str(running.auth.project("default"))
    async with running.service("scheduler") as service:
        await service.serve(ANY_LIST, Question, echo)
        await service.flush()
        async with await nats.connect(running.server.url, user_credentials=credentials) as client:
            reply = await client.request(
                LIST, b'{"number": 5, "new": 1}', headers={"content-type": "application/json"}
            )
    assert reply.headers is not None
    assert reply.headers["content-type"] == "application/json"
    body = json.loads(reply.data)
    assert (body["type"], body["number"]) == ("Answer", 5)


async def test_a_plain_nats_client_reads_errors_from_headers_and_json(
    running: NatsForTests,
) -> None:
    async def refuse(_: Request[Question]) -> Answer:
        raise invalid("not so", field="number")

    credentials = str(running.auth.project("default"))
    async with running.service("scheduler") as service:
        await service.serve(ANY_LIST, Question, refuse)
        await service.flush()
        async with await nats.connect(running.server.url, user_credentials=credentials) as client:
            reply = await client.request(LIST, b"{}", headers={"content-type": "application/json"})
    assert reply.headers is not None
    assert reply.headers["Nats-Service-Error-Code"] == str(STATUS_OF[ErrorCode.INVALID])
    assert reply.headers["Nats-Service-Error"] == "invalid: not so"
    assert json.loads(reply.data)["details"] == {"field": "number"}


async def test_a_body_that_does_not_decode_is_invalid_and_names_the_field(
    running: NatsForTests,
) -> None:
    credentials = str(running.auth.project("default"))
    async with running.service("scheduler") as service:
        await service.serve(ANY_LIST, Question, echo)
        await service.flush()
        async with await nats.connect(running.server.url, user_credentials=credentials) as client:
            wrong = await client.request(
                LIST, b'{"number": "x"}', headers={"content-type": "application/json"}
            )
            garbage = await client.request(LIST, b"\xc1\xff\x00")
    assert "$.number" in json.loads(wrong.data)["message"]
    for reply in (wrong, garbage):
        assert reply.headers is not None
        assert reply.headers["Nats-Service-Error-Code"] == "400"


# --- Serving --------------------------------------------------------------------------------------


async def test_a_queue_group_shares_requests_and_each_is_answered_once(
    running: NatsForTests,
) -> None:
    served: Counter[str] = Counter()

    async with (
        running.service("scheduler") as first,
        running.service("scheduler") as second,
        running.project() as project,
    ):
        for name, bus in (("first", first), ("second", second)):

            async def count(request: Request[Question], name: str = name) -> Answer:
                served[name] += 1
                return await echo(request)

            await bus.serve(ANY_LIST, Question, count, queue="scheduler")
            await bus.flush()
        answers = await asyncio.gather(
            *(project.request(LIST, Question(number=n), Answer) for n in range(100))
        )
    assert [answer.number for answer in answers] == list(range(100))
    assert served.total() == 100
    assert set(served) == {"first", "second"}


async def test_beyond_its_bounds_a_service_answers_exhausted_and_drops_nothing(
    running: NatsForTests,
) -> None:
    gate = asyncio.Event()
    at_once = most = 0

    async def wait(request: Request[Question]) -> Answer:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await gate.wait()
        at_once -= 1
        return await echo(request)

    async with running.service("scheduler") as service, running.project() as project:
        await service.serve(ANY_LIST, Question, wait, concurrency=4, max_pending=7)
        await service.flush()

        asking = [
            asyncio.create_task(project.request(LIST, Question(number=number), Answer))
            for number in range(50)
        ]
        refusals = []
        for first in asyncio.as_completed(asking):
            with pytest.raises(DsecError) as caught:
                await first
            refusals.append(caught.value)
            if len(refusals) == 39:
                break
        gate.set()
        results = await asyncio.gather(*asking, return_exceptions=True)
    assert {error.code for error in refusals} == {ErrorCode.EXHAUSTED}
    assert all(error.retryable and error.retry_after_s > 0 for error in refusals)
    assert Counter(type(result) for result in results) == {Answer: 11, DsecError: 39}
    assert most == 4


async def test_a_burst_far_beyond_any_buffer_gets_an_answer_for_each(running: NatsForTests) -> None:
    async with running.service("scheduler") as service, running.project() as project:
        await service.serve(ANY_LIST, Question, echo, concurrency=2, max_pending=4)
        await service.flush()

        async def ask(number: int) -> str:
            try:
                await project.request(LIST, Question(number=number), Answer, timeout_s=30)
            except DsecError as error:
                return str(error.code)
            return "answered"

        results = Counter(await asyncio.gather(*(ask(number) for number in range(3000))))
    assert results.total() == 3000
    assert set(results) <= {"answered", "exhausted"}


async def test_a_handed_on_request_is_answered_by_whom_it_was_handed_to(
    running: NatsForTests,
) -> None:
    async with (
        running.service("scheduler") as scheduler,
        running.service("sandboxd", "node-1") as node,
        running.project() as project,
    ):

        async def place(request: Request[Question]) -> Answer:
            await node.reply(request.caller, Answer(text="from the node"))
            return Answer(text="placed")

        async def hand_on(request: Request[Question]) -> None:
            placed = await scheduler.request(
                subjects.node_request("node-1", "place"),
                request.message,
                Answer,
                caller=request.caller,
            )
            assert placed.text == "placed"

        await node.serve(subjects.node_request("node-1", "place"), Question, place)
        await scheduler.serve(ANY_LIST, Question, hand_on)
        await node.flush()
        await scheduler.flush()
        assert (await project.request(LIST, Question(), Answer)).text == "from the node"
        credentials = str(running.auth.project("default"))
        async with await nats.connect(running.server.url, user_credentials=credentials) as client:
            reply = await client.request(LIST, b"{}", headers={"content-type": "application/json"})
    assert json.loads(reply.data)["text"] == "from the node"


@pytest.mark.parametrize(
    "reply",
    [
        subjects.sandbox("default", subjects.ScopedId("node-1", "x"), "delete"),
        "$JS.API.STREAM.PURGE.X",
        "_INBOX.stranger.1",
        "_INBOX.dsec.>",
    ],
)
async def test_a_request_that_wants_its_reply_elsewhere_is_not_even_carried_out(
    running: NatsForTests, reply: str
) -> None:
    carried_out: list[int] = []

    async def place(request: Request[Question]) -> Answer:
        carried_out.append(request.message.number)
        return Answer()

    subject = subjects.node_request("node-1", "place")
    config = running.service_config("scheduler")
    async with running.service("sandboxd", "node-1") as node, running.service("scheduler") as good:
        served = await node.serve(subject, Question, place)
        await node.flush()
        async with await nats.connect(
            config.servers[0], user_credentials=config.credentials_path
        ) as client:
            await client.publish(subject, b"\x80", reply=reply)
            await client.flush()
        await good.request(subject, Question(number=2), Answer)
    assert carried_out == [2]
    assert served.stats.refused == 1


async def test_one_trace_runs_through_every_hop(running: NatsForTests) -> None:
    seen: list[str] = []

    async with (
        running.service("scheduler") as scheduler,
        running.service("sandboxd", "node-1") as node,
        running.project() as project,
    ):

        async def place(request: Request[Question]) -> Answer:
            seen.append(request.traceparent)
            return Answer()

        async def forward(request: Request[Question]) -> Answer:
            seen.append(request.traceparent)
            assert current_traceparent.get() == request.traceparent
            subject = subjects.node_request("node-1", "place")
            return await scheduler.request(subject, request.message, Answer)

        await node.serve(subjects.node_request("node-1", "place"), Question, place)
        await scheduler.serve(ANY_LIST, Question, forward)
        await node.flush()
        await scheduler.flush()
        given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        await project.request(LIST, Question(), Answer, headers={"traceparent": given})
        await project.request(LIST, Question(), Answer)
        await project.request(LIST, Question(), Answer, headers={"traceparent": "nonsense"})
    traces = [one.split("-")[1] for one in seen]
    assert traces[0] == traces[1] == "0af7651916cd43dd8448eb211c80319c"
    assert traces[2] == traces[3] != traces[0]
    assert len(set(traces)) == 3
    assert len(set(seen)) == 6, "each hop has a span of its own"


async def test_events_arrive_in_order_and_a_bad_one_does_not_stop_the_rest(
    running: NatsForTests,
) -> None:
    seen: list[int] = []
    done = asyncio.Event()

    async def see(request: Request[Question]) -> None:
        if request.message.number == 5:
            raise RuntimeError("cannot")
        seen.append(request.message.number)
        if request.message.number == 99:
            done.set()

    subject = subjects.sandbox_event("default", subjects.ScopedId("node-1", "x"), "running")
    async with running.service("sandboxd", "node-1") as node, running.project() as project:
        await project.subscribe(subjects.project_events("default"), Question, see)
        await project.flush()
        for number in range(100):
            await node.publish(subject, Question(number=number))
        async with asyncio.timeout(20):
            await done.wait()
    assert seen == [number for number in range(100) if number != 5]


async def test_messages_with_and_without_headers_keep_their_order(running: NatsForTests) -> None:
    seen: list[int] = []
    done = asyncio.Event()

    async def see(request: Request[Question]) -> None:
        seen.append(request.message.number)
        if request.message.number == 99:
            done.set()

    subject = subjects.sandbox_event("default", subjects.ScopedId("node-1", "x"), "running")
    credentials = str(running.auth.service_credentials("sandboxd", "node-1"))
    async with (
        running.project() as project,
        await nats.connect(running.server.url, user_credentials=credentials) as client,
    ):
        await project.subscribe(subjects.project_events("default"), Question, see)
        await project.flush()
        for number in range(100):
            headers = {"content-type": "application/msgpack"} if number % 2 else None
            await client.publish(subject, encode(Question(number=number)), headers=headers)
        async with asyncio.timeout(20):
            await done.wait()
    assert seen == list(range(100))


async def test_an_operator_finds_the_service_and_reads_its_statistics(
    running: NatsForTests,
) -> None:
    async with (
        running.service("scheduler") as service,
        running.service("operator") as operator,
        running.project() as project,
    ):
        await service.register("dsec-scheduler", "0.1.0", "Places sandboxes")
        await service.serve(ANY_LIST, Question, echo)
        await service.flush()
        await project.request(LIST, Question(), Answer)

        async def discover(verb: str) -> dict[str, Any]:
            found: dict[str, Any] = json.loads(
                await operator.request_raw(f"$SRV.{verb}.dsec-scheduler", b"")
            )
            assert found["type"] == f"io.nats.micro.v1.{verb.lower()}_response"
            assert (found["name"], found["version"]) == ("dsec-scheduler", "0.1.0")
            return found

        await discover("PING")
        assert (await discover("INFO"))["endpoints"][0]["subject"] == ANY_LIST
        assert (await discover("STATS"))["endpoints"][0]["num_requests"] == 1
        with pytest.raises(DsecError):
            await service.register("again", "0.1.0", "")
