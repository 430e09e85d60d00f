"""What the bus promises about its end, and about servers that are absent or lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bus_talk import ANY_LIST, LIST, Answer, Question, ask_until_answered, echo
from dsec_common.bus import Bus, BusConfig, Request
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.testing.nats import NatsForTests, nats_for_tests


@pytest.fixture
async def running() -> AsyncIterator[NatsForTests]:
    async with nats_for_tests() as running:
        yield running


# --- The end --------------------------------------------------------------------------------------


async def test_drain_loses_no_reply(running: NatsForTests) -> None:
    gate = asyncio.Event()
    all_in = asyncio.Event()
    count = 0

    async def wait(request: Request[Question]) -> Answer:
        nonlocal count
        count += 1
        if count == 7:
            all_in.set()
        await gate.wait()
        return await echo(request)

    async with running.project() as project:
        service = await Bus.connect(running.service_config("scheduler"))
        await service.serve(ANY_LIST, Question, wait, concurrency=7, max_pending=1000)
        await service.flush()
        asking = [
            asyncio.create_task(project.request(LIST, Question(number=n), Answer, timeout_s=30))
            for n in range(200)
        ]
        async with asyncio.timeout(20):
            await all_in.wait()
            await project.flush()
            draining = asyncio.create_task(service.drain(10))
            await project.flush()
            gate.set()
            await draining
            answers = await asyncio.gather(*asking)
    assert sorted(answer.number for answer in answers) == list(range(200))


async def test_a_flush_that_was_given_up_does_not_end_the_hearing(running: NatsForTests) -> None:
    async with running.service("scheduler") as service, running.project() as project:
        await service.serve(ANY_LIST, Question, echo)
        await service.flush()
        os.kill(running.server.pid, signal.SIGSTOP)
        # Until all of its threads stand still one of them may answer.
        stopped = os.WSTOPPED | os.WNOWAIT
        await asyncio.to_thread(os.waitid, os.P_PID, running.server.pid, stopped)
        try:
            with pytest.raises(DsecError, match="flush") as caught:
                await service.flush(timeout_s=0.05)
        finally:
            os.kill(running.server.pid, signal.SIGCONT)
        assert caught.value.code is ErrorCode.TIMEOUT
        assert (await project.request(LIST, Question(number=7), Answer)).number == 7


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
        async with asyncio.timeout(20):
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
    async with asyncio.timeout(20):
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
    async with asyncio.timeout(20):
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


async def test_a_server_that_wants_credentials_says_so_to_who_has_none(
    running: NatsForTests,
) -> None:
    config = BusConfig(servers=(running.server.url,), connect_timeout_s=1.0)
    with pytest.raises(DsecError, match="without credentials") as caught:
        await Bus.connect(config)
    assert caught.value.code is ErrorCode.DENIED


@pytest.mark.parametrize(
    "address",
    [
        "host:port",
        "nats://",
        "nats://host:99999",
        "nats://a b",
        "http://host:80",
        "nats://[::1",
        "",
    ],
)
async def test_what_is_no_address_is_refused_at_once(address: str) -> None:
    servers = ("nats://127.0.0.1:4222", address)
    with pytest.raises(DsecError, match="no address of a NATS server") as caught:
        await Bus.connect(BusConfig(servers=servers, connect_timeout_s=0))
    assert caught.value.code is ErrorCode.INVALID


async def test_no_address_at_all_is_refused_at_once() -> None:
    with pytest.raises(DsecError, match="no address of a NATS server") as caught:
        await Bus.connect(BusConfig(servers=(), connect_timeout_s=0))
    assert caught.value.code is ErrorCode.INVALID


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
        async with asyncio.timeout(20):
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


async def test_what_is_done_while_a_connection_breaks_raises_no_error_of_the_socket(
    running: NatsForTests,
) -> None:
    async with running.service("scheduler") as service, running.project() as project:
        # The task that flushes was first to find it broken, and has gone; the reader is yet to.
        client: Any = service._client
        client._flusher_task.cancel()
        await asyncio.wait({client._flusher_task})
        client._transport._io_reader.set_exception(ConnectionResetError("reset by peer"))
        await service.serve(ANY_LIST, Question, echo)
        answer = await ask_until_answered(project, 1)
    assert answer.number == 1
