"""What the bus promises, against a real NATS server with accounts."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest

from dsec_common import subjects
from dsec_common.bus import Bus, BusConfig, Request, current_traceparent
from dsec_common.errors import STATUS_OF, DsecError, ErrorCode, invalid
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_common.wire.base import Message

LIST = subjects.sandbox_list("default")
ANY_LIST = subjects.any_project("sandbox.list")


class Question(Message, frozen=True, kw_only=True):
    number: int = 0
    text: str = ""


class Answer(Message, frozen=True, kw_only=True):
    number: int = 0
    text: str = ""


@pytest.fixture
async def running() -> AsyncIterator[NatsForTests]:
    async with nats_for_tests() as running:
        yield running


async def echo(request: Request[Question]) -> Answer:
    return Answer(number=request.message.number, text=request.project)


async def ask_until_answered(bus: Bus, number: int) -> Answer:
    """Ask as a patient caller does: again after each retryable error."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await bus.request(LIST, Question(number=number), Answer, timeout_s=5)
            except DsecError as error:
                if not error.retryable:
                    raise
                await asyncio.sleep(0.01)


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
        async with asyncio.timeout(2):
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


async def test_a_subject_beyond_the_credentials_is_denied_at_once(running: NatsForTests) -> None:
    async with running.project() as project:
        async with asyncio.timeout(2):
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
        await service.serve(ANY_LIST, Question, wait, concurrency=4, max_pending=8)
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
            if len(refusals) == 38:
                break
        gate.set()
        results = await asyncio.gather(*asking, return_exceptions=True)
    assert {error.code for error in refusals} == {ErrorCode.EXHAUSTED}
    assert all(error.retryable and error.retry_after_s > 0 for error in refusals)
    assert Counter(type(result) for result in results) == {Answer: 12, DsecError: 38}
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
        async with asyncio.timeout(5):
            await done.wait()
    assert seen == [number for number in range(100) if number != 5]


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


# --- The end --------------------------------------------------------------------------------------


async def test_drain_loses_no_reply(running: NatsForTests) -> None:
    gate = asyncio.Event()
    all_in = asyncio.Event()
    count = 0

    async def wait(request: Request[Question]) -> Answer:
        nonlocal count
        count += 1
        if count == 32:
            all_in.set()
        await gate.wait()
        return await echo(request)

    async with running.project() as project:
        service = await Bus.connect(running.service_config("scheduler"))
        await service.serve(ANY_LIST, Question, wait, concurrency=32, max_pending=1000)
        await service.flush()
        asking = [
            asyncio.create_task(project.request(LIST, Question(number=n), Answer, timeout_s=30))
            for n in range(200)
        ]
        async with asyncio.timeout(5):
            await all_in.wait()
            await project.flush()
            draining = asyncio.create_task(service.drain(10))
            await project.flush()
            gate.set()
            await draining
            answers = await asyncio.gather(*asking)
    assert sorted(answer.number for answer in answers) == list(range(200))


async def test_while_one_of_a_queue_group_drains_no_caller_notices(running: NatsForTests) -> None:
    async with running.service("scheduler") as staying, running.project() as project:
        leaving = await Bus.connect(running.service_config("scheduler"))
        for bus in (staying, leaving):
            await bus.serve(ANY_LIST, Question, echo, queue="scheduler")
            await bus.flush()
        asking = [
            asyncio.create_task(project.request(LIST, Question(number=n), Answer, timeout_s=30))
            for n in range(500)
        ]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        await leaving.drain()
        answers = await asyncio.gather(*asking)
    assert [answer.number for answer in answers] == list(range(500))


async def test_a_handler_that_outlasts_the_drain_is_cancelled_and_its_caller_told(
    running: NatsForTests,
) -> None:
    started = asyncio.Event()

    async def hang(_: Request[Question]) -> Answer:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with running.project() as project:
        service = await Bus.connect(running.service_config("scheduler"))
        await service.serve(ANY_LIST, Question, hang)
        await service.flush()
        asking = asyncio.create_task(project.request(LIST, Question(), Answer, timeout_s=30))
        async with asyncio.timeout(5):
            await started.wait()
            await service.drain(0.05)
            with pytest.raises(DsecError) as caught:
                await asking
    assert caught.value.code is ErrorCode.UNAVAILABLE


async def test_drain_without_a_server_ends_all_the_same(running: NatsForTests) -> None:
    lost = asyncio.Event()
    service = await Bus.connect(running.service_config("scheduler"))
    service.on_disconnect(lost.set)
    await service.serve(ANY_LIST, Question, echo)
    await running.server.kill()
    async with asyncio.timeout(5):
        await lost.wait()
        await service.drain(1)
    assert not service.connected


# --- Absent and lost servers ----------------------------------------------------------------------


async def test_an_absent_server_is_waited_for(running: NatsForTests) -> None:
    await running.server.stop()
    connecting = asyncio.create_task(Bus.connect(running.service_config("scheduler")))
    done, _ = await asyncio.wait({connecting}, timeout=0.1)
    assert not done
    await running.server.start()
    async with asyncio.timeout(5):
        bus = await connecting
    assert bus.connected
    await bus.drain()


async def test_a_server_that_stays_absent_is_a_clear_error(running: NatsForTests) -> None:
    await running.server.stop()
    config = running.service_config("scheduler")
    with pytest.raises(DsecError) as caught:
        await Bus.connect(
            BusConfig(
                servers=config.servers,
                credentials_path=config.credentials_path,
                connect_timeout_s=0.2,
            )
        )
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert config.servers[0] in caught.value.message


async def test_credentials_of_another_operator_are_denied(running: NatsForTests) -> None:
    async with nats_for_tests() as strangers:
        config = BusConfig(
            servers=(running.server.url,),
            credentials_path=str(strangers.auth.project("default")),
            connect_timeout_s=2.0,
        )
        with pytest.raises(DsecError) as caught:
            await Bus.connect(config)
    assert caught.value.code is ErrorCode.DENIED


async def test_a_cancelled_wait_for_an_absent_server_leaves_nothing(running: NatsForTests) -> None:
    await running.server.stop()
    connecting = asyncio.create_task(Bus.connect(running.service_config("scheduler")))
    await asyncio.wait({connecting}, timeout=0.05)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_request_that_waits_when_the_server_dies_fails_at_once(
    running: NatsForTests,
) -> None:
    started = asyncio.Event()

    async def hang(_: Request[Question]) -> None:
        started.set()

    async with running.service("scheduler") as service, running.project() as project:
        await service.serve(ANY_LIST, Question, hang)
        await service.flush()
        asking = asyncio.create_task(project.request(LIST, Question(), Answer, timeout_s=60))
        async with asyncio.timeout(5):
            await started.wait()
            await running.server.kill()
            with pytest.raises(DsecError) as caught:
                await asking
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert "may have been carried out" in caught.value.message


async def test_requests_resume_after_the_server_was_killed(running: NatsForTests) -> None:
    history: list[str] = []
    back = asyncio.Event()

    async with running.service("scheduler") as service, running.project() as project:
        project.on_disconnect(lambda: history.append("lost"))
        project.on_reconnect(lambda: history.append("back"))
        project.on_reconnect(back.set)
        await service.serve(ANY_LIST, Question, echo)
        await service.flush()
        asking = [asyncio.create_task(ask_until_answered(project, n)) for n in range(200)]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        await running.server.kill()
        await running.server.start()
        answers = await asyncio.gather(*asking)
        async with asyncio.timeout(10):
            await back.wait()
        assert project.connected
        late = await ask_until_answered(project, 1000)
    assert [answer.number for answer in answers] == list(range(200))
    assert late.number == 1000
    assert history == ["lost", "back"]
