"""What the bus promises of JetStream: nothing acknowledged is lost, nothing accepted is skipped."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec_common import subjects
from dsec_common.accounts_permissions import OWNED_STREAMS
from dsec_common.bus import Bus, Request, StreamSpec
from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_common.wire.base import Message, decode

NAME = OWNED_STREAMS["scheduler"][0]
QUEUE = StreamSpec(
    name=NAME,
    subjects=("dsec.v1.*.queue.sandbox.create",),
    work_queue=True,
    duplicate_window_s=120.0,
)
SUBJECT = subjects.queue_sandbox_create("default")


class Job(Message, frozen=True, kw_only=True):
    number: int = 0


class Other(Message, frozen=True, kw_only=True):
    name: str


@pytest.fixture
async def running() -> AsyncIterator[NatsForTests]:
    async with nats_for_tests() as running:
        yield running


class Seen:
    """Collects what a consumer handled and says when all of it is there."""

    def __init__(self, expected: int) -> None:
        self.numbers: Counter[int] = Counter()
        self._expected = expected
        self._all = asyncio.Event()

    async def handle(self, request: Request[Job]) -> None:
        self.numbers[request.message.number] += 1
        if len(self.numbers) == self._expected:
            self._all.set()

    async def complete(self, timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            await self._all.wait()


async def test_a_project_enters_the_durable_queue_and_gets_an_acknowledgement(
    running: NatsForTests,
) -> None:
    seen = Seen(1)
    async with running.service("scheduler") as scheduler, running.project() as project:
        await scheduler.ensure_stream(QUEUE)
        assert await project.js_publish(SUBJECT, Job(number=1)) == 1
        await scheduler.consume(NAME, "worker", Job, seen.handle)
        await seen.complete()
    assert seen.numbers == {1: 1}


async def test_without_the_stream_the_queue_is_unavailable_at_once(running: NatsForTests) -> None:
    async with running.project() as project:
        with pytest.raises(DsecError) as caught:
            await project.js_publish(SUBJECT, Job())
    assert caught.value.code is ErrorCode.UNAVAILABLE


async def test_ensuring_a_stream_twice_and_with_a_change_is_fine(running: NatsForTests) -> None:
    async with running.service("scheduler") as scheduler:
        await scheduler.ensure_stream(QUEUE)
        await scheduler.ensure_stream(QUEUE)
        changed = StreamSpec(name=NAME, subjects=QUEUE.subjects, work_queue=True, max_age_s=60.0)
        await scheduler.ensure_stream(changed)


async def test_messages_are_shared_among_consumers_of_one_name_each_once(
    running: NatsForTests,
) -> None:
    seen = Seen(500)
    async with (
        running.service("scheduler") as first,
        running.service("scheduler") as second,
        running.project() as project,
    ):
        await first.ensure_stream(QUEUE)
        for bus in (first, second):
            await bus.consume(NAME, "worker", Job, seen.handle, max_in_flight=16)
        await asyncio.gather(*(project.js_publish(SUBJECT, Job(number=n)) for n in range(500)))
        await seen.complete()
    assert set(seen.numbers.values()) == {1}


async def test_no_more_than_max_in_flight_are_handled_at_once(running: NatsForTests) -> None:
    gate = asyncio.Event()
    full = asyncio.Event()
    seen = Seen(40)
    at_once = most = 0

    async def wait(request: Request[Job]) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        if at_once == 5:
            full.set()
        await gate.wait()
        at_once -= 1
        await seen.handle(request)

    async with running.service("scheduler") as scheduler, running.project() as project:
        await scheduler.ensure_stream(QUEUE)
        for number in range(40):
            await project.js_publish(SUBJECT, Job(number=number))
        await scheduler.consume(NAME, "worker", Job, wait, max_in_flight=5)
        async with asyncio.timeout(20):
            await full.wait()
        await project.flush()
        gate.set()
        await seen.complete()
    assert most == 5


async def test_a_retryable_error_brings_the_message_again_and_another_ends_it(
    running: NatsForTests,
) -> None:
    deliveries: list[tuple[int, int]] = []
    done = asyncio.Event()

    async def handle(request: Request[Job]) -> None:
        deliveries.append((request.message.number, request.delivery))
        if request.message.number == 1:
            raise DsecError(ErrorCode.INVALID, "never")
        if request.delivery < 3:
            raise unavailable("not yet", retry_after_s=0.01)
        done.set()

    async with running.service("scheduler") as scheduler, running.project() as project:
        await scheduler.ensure_stream(QUEUE)
        await project.js_publish(SUBJECT, Job(number=1))
        await project.js_publish(SUBJECT, Job(number=2))
        await scheduler.consume(NAME, "worker", Job, handle)
        async with asyncio.timeout(10):
            await done.wait()
    assert sorted(deliveries) == [(1, 1), (2, 1), (2, 2), (2, 3)]


async def test_a_message_that_does_not_decode_is_ended_and_the_next_is_handled(
    running: NatsForTests,
) -> None:
    seen = Seen(1)
    async with running.service("scheduler") as scheduler, running.project() as project:
        await scheduler.ensure_stream(QUEUE)
        await project.js_publish(SUBJECT, Other(name="x"))
        await project.js_publish(SUBJECT, Job(number=2))
        consumer = await scheduler.consume(NAME, "worker", Job, seen.handle)
        await seen.complete()
        assert consumer.stats.errors == 1
    assert seen.numbers == {2: 1}


async def test_a_slow_handler_keeps_its_message_beyond_the_wait_for_its_acknowledgement(
    running: NatsForTests,
) -> None:
    deliveries = 0
    gate = asyncio.Event()
    asyncio.get_running_loop().call_later(1.5, gate.set)
    done = asyncio.Event()

    async def slow(_: Request[Job]) -> None:
        nonlocal deliveries
        deliveries += 1
        await gate.wait()
        done.set()

    async with running.service("scheduler") as scheduler, running.project() as project:
        await scheduler.ensure_stream(QUEUE)
        await scheduler.consume(NAME, "worker", Job, slow, ack_wait_s=0.5)
        await project.js_publish(SUBJECT, Job(number=1))
        async with asyncio.timeout(20):
            await done.wait()
    assert deliveries == 1


async def test_a_known_message_id_is_stored_once_and_a_wrong_sequence_is_a_conflict(
    running: NatsForTests,
) -> None:
    journal = subjects.rollout_journal("shard-1")
    name = OWNED_STREAMS["chronus"][0]
    async with running.service("chronus") as chronus:
        await chronus.ensure_stream(StreamSpec(name=name, subjects=(journal,)))
        first = await chronus.js_publish(journal, Job(number=1), message_id="a")
        again = await chronus.js_publish(journal, Job(number=1), message_id="a")
        second = await chronus.js_publish(journal, Job(number=2), expected_last_sequence=1)
        with pytest.raises(DsecError) as caught:
            await chronus.js_publish(journal, Job(number=3), expected_last_sequence=1)
    assert (first, again, second) == (1, 1, 2)
    assert caught.value.code is ErrorCode.CONFLICT


async def test_a_full_stream_refuses_one_project_and_still_takes_anothers(
    running: NatsForTests,
) -> None:
    bounded = StreamSpec(
        name=NAME,
        subjects=QUEUE.subjects,
        work_queue=True,
        max_messages_per_subject=3,
        refuse_when_full=True,
    )
    running.auth.create_project("other")
    await running.server.stop()
    await running.server.start()
    async with (
        running.service("scheduler") as scheduler,
        running.project() as greedy,
        running.project("other") as other,
    ):
        await scheduler.ensure_stream(bounded)
        for number in range(3):
            await greedy.js_publish(SUBJECT, Job(number=number))
        with pytest.raises(DsecError) as caught:
            await greedy.js_publish(SUBJECT, Job(number=4))
        assert await other.js_publish(subjects.queue_sandbox_create("other"), Job()) == 4
    assert caught.value.code is ErrorCode.EXHAUSTED


async def test_what_was_in_hand_at_a_drain_is_acknowledged_and_never_comes_again(
    running: NatsForTests,
) -> None:
    gate = asyncio.Event()
    full = asyncio.Event()
    first = Seen(100)

    async def wait(request: Request[Job]) -> None:
        if len(first.numbers) == 0:
            full.set()
            await gate.wait()
        await first.handle(request)

    async with running.project() as project, running.service("scheduler") as second:
        leaving = await Bus.connect(running.service_config("scheduler"))
        await leaving.ensure_stream(QUEUE)
        for number in range(100):
            await project.js_publish(SUBJECT, Job(number=number))
        await leaving.consume(NAME, "worker", Job, wait, max_in_flight=10)
        async with asyncio.timeout(20):
            await full.wait()
            draining = asyncio.create_task(leaving.drain())
            await project.flush()
            gate.set()
            await draining
        rest = Seen(100 - len(first.numbers))
        await second.consume(NAME, "worker", Job, rest.handle)
        await rest.complete()
    assert first.numbers.total() >= 10
    assert first.numbers + rest.numbers == Counter(range(100))


async def test_a_process_killed_before_its_acknowledgement_hands_its_message_to_the_next(
    running: NatsForTests, tmp_path: Path
) -> None:
    program = Path(__file__).parents[1] / "framework" / "nats_stuck_consumer.py"
    marker = tmp_path / "holding"
    os.mkfifo(marker)
    async with running.service("scheduler") as scheduler, running.project() as project:
        await scheduler.ensure_stream(QUEUE)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(program),
            running.server.url,
            running.service_config("scheduler").credentials_path,
            NAME,
            str(marker),
        )
        try:
            await project.js_publish(SUBJECT, Job(number=1))
            # Opening a pipe for reading waits until the consumer, message in hand, opens it too.
            async with asyncio.timeout(15):
                await asyncio.to_thread(marker.read_text)
        finally:
            process.send_signal(signal.SIGKILL)
            await process.wait()
        again: list[int] = []
        done = asyncio.Event()

        async def handle(request: Request[Job]) -> None:
            again.append(request.delivery)
            done.set()

        await scheduler.consume(NAME, "worker", Job, handle, ack_wait_s=1.0)
        async with asyncio.timeout(10):
            await done.wait()
    assert again == [2]


async def test_a_server_killed_in_the_middle_loses_nothing_that_it_acknowledged(
    running: NatsForTests,
) -> None:
    seen = Seen(300)
    async with running.service("scheduler") as scheduler, running.project() as project:
        await scheduler.ensure_stream(QUEUE)
        await scheduler.consume(NAME, "worker", Job, seen.handle, ack_wait_s=1.0)

        async def publish(number: int) -> None:
            await project.js_publish(
                SUBJECT, Job(number=number), message_id=f"job-{number}", timeout_s=30
            )

        publishing = [asyncio.create_task(publish(number)) for number in range(150)]
        await asyncio.wait(publishing, return_when=asyncio.FIRST_COMPLETED)
        await running.server.kill()
        publishing += [asyncio.create_task(publish(number)) for number in range(150, 300)]
        await running.server.start()
        await asyncio.gather(*publishing)
        await seen.complete()
    assert set(seen.numbers) == set(range(300))


async def test_a_stream_in_memory_comes_back_empty_and_its_consumer_with_it(
    running: NatsForTests,
) -> None:
    spec = StreamSpec(name=NAME, subjects=QUEUE.subjects, work_queue=True, in_memory=True)
    before, after = Seen(1), Seen(2)

    async def handle(request: Request[Job]) -> None:
        await before.handle(request)
        await after.handle(request)

    async with running.service("scheduler") as scheduler, running.project() as project:
        await scheduler.ensure_stream(spec)
        await scheduler.consume(NAME, "worker", Job, handle)
        await project.js_publish(SUBJECT, Job(number=1))
        await before.complete()
        await running.server.kill()
        await running.server.start()
        await project.js_publish(SUBJECT, Job(number=2), message_id="two", timeout_s=20)
        await after.complete()
    assert after.numbers == {1: 1, 2: 1}


async def test_a_subject_is_read_by_the_hundred_to_its_end_and_from_any_place(
    running: NatsForTests,
) -> None:
    (name, *_), role = OWNED_STREAMS["chronus"], "chronus"
    mine, other = subjects.rollout_journal("s0"), subjects.rollout_journal("s1")
    async with running.service(role) as bus:
        await bus.ensure_stream(StreamSpec(name=name, subjects=(subjects.ROLLOUT_JOURNALS,)))
        assert await bus.read(name, mine, 1) == []
        wanted = []
        for number in range(300):
            wanted.append(await bus.js_publish(mine, Job(number=number)))
            if number % 3 == 0:
                await bus.js_publish(other, Job(number=-1))
        found: list[tuple[int, bytes]] = []
        while part := await bus.read(name, mine, found[-1][0] + 1 if found else 1):
            found += part
        assert [sequence for sequence, _ in found] == wanted
        assert [decode(body, Job).number for _, body in found] == list(range(300))
        assert (await bus.read(name, mine, wanted[298] + 1))[0][0] == wanted[299]
        with pytest.raises(DsecError) as caught:
            await bus.read("no-such-stream", mine, 1)
        assert caught.value.code in {ErrorCode.DENIED, ErrorCode.UNAVAILABLE}
