"""Owners of shards die, hang and return, acknowledgements get lost: rollouts go on."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from chronus_parties import (
    LEASE_TTL_S,
    Agent,
    DeafProxy,
    Trainer,
    chronus_process,
    chronus_service,
    open_rollout,
)
from dsec.channel import Channel
from dsec.rollouts import Rollouts
from dsec_chronus.effects import WriteFrame
from dsec_chronus.journal import FencedError, Journal, journal_stream
from dsec_chronus.records import RolloutEnded
from dsec_chronus.service import ChronusService
from dsec_chronus.shard import Shard
from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.clock import SystemClock
from dsec_common.subjects import ScopedId
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_common.wire.rollout import InspectRollout, RolloutInfo

STEPS = 60


@pytest.fixture
async def nats() -> AsyncIterator[NatsForTests]:
    async with nats_for_tests() as nats:
        yield nats


async def owns(service: ChronusService, count: int) -> None:
    async with asyncio.timeout(20):
        while len(service._shards) != count:
            await asyncio.sleep(0.02)


async def reached(seen: list[int], seq: int) -> None:
    async with asyncio.timeout(30):
        while not seen or seen[-1] < seq:
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def training(nats: NatsForTests, steps: int = STEPS) -> AsyncIterator[list[list[int]]]:
    """Have three rollouts under way and see them to their ends, each step exactly once."""
    async with nats.project() as bus, nats.service("sandboxd", "node-1") as node_bus:
        rollouts = [await open_rollout(bus) for _ in range(3)]
        seen: list[list[int]] = [[] for _ in rollouts]
        async with asyncio.timeout(90), asyncio.TaskGroup() as tasks:
            for rollout, numbers in zip(rollouts, seen, strict=True):
                tasks.create_task(Trainer(bus, rollout).answer_all(steps, numbers))
                tasks.create_task(Agent(node_bus, rollout).step_all(steps))
            yield seen
        assert all(numbers == list(range(1, steps + 1)) for numbers in seen)


async def test_rollouts_go_on_after_chronus_is_killed(nats: NatsForTests, tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        process = await stack.enter_async_context(chronus_process(nats, tmp_path))
        async with training(nats) as seen:
            for at in (STEPS // 3, 2 * STEPS // 3):
                await reached(seen[0], at)
                process.kill()
                await process.wait()
                process = await stack.enter_async_context(chronus_process(nats, tmp_path))


async def test_another_process_takes_over_from_one_that_was_killed(
    nats: NatsForTests, tmp_path: Path
) -> None:
    async with chronus_process(nats, tmp_path) as process, chronus_service(nats) as survivor:
        await owns(survivor, 4)
        async with training(nats) as seen:
            await reached(seen[0], STEPS // 2)
            process.kill()
            await owns(survivor, 8)


async def test_an_owner_that_hung_and_returns_is_fenced(nats: NatsForTests, tmp_path: Path) -> None:
    async with chronus_process(nats, tmp_path) as process, chronus_service(nats) as other:
        await owns(other, 4)
        async with training(nats, 2 * STEPS) as seen:
            await reached(seen[0], STEPS // 2)
            process.send_signal(signal.SIGSTOP)
            await owns(other, 8)
            process.send_signal(signal.SIGCONT)
            # It gets its share again, from then on as any other.
            await owns(other, 4)
        assert process.returncode is None


async def test_shards_move_to_a_newcomer_and_back_without_a_step_lost(nats: NatsForTests) -> None:
    async with chronus_service(nats) as first, training(nats, 2 * STEPS) as seen:
        await reached(seen[0], STEPS // 2)
        async with chronus_service(nats) as second:
            await owns(second, 4)
            await owns(first, 4)
            await reached(seen[0], STEPS)
        await owns(first, 8)


async def test_a_shard_that_is_lost_while_it_is_read_leaves_nobody_who_answers_for_it(
    nats: NatsForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[Shard] = []
    start = Shard.start

    async def start_and_lose(shard: Shard) -> None:
        await start(shard)
        if not lost:
            lost.append(shard)
            shard._on_end(FencedError("lost meanwhile"))
            await asyncio.sleep(0.2)  # until it is given up

    monkeypatch.setattr(Shard, "start", start_and_lose)
    async with chronus_service(nats, shards=1) as chronus, nats.project() as bus:
        await owns(chronus, 1)
        rollouts = Rollouts(Channel(bus, "default"))
        rollout = await rollouts.open()
        assert chronus._shards["s0"] is not lost[0]
        for _ in range(20):
            await bus.request(
                subjects.rollout("default", ScopedId.parse(rollout.id), "inspect"),
                InspectRollout(),
                RolloutInfo,
            )


async def test_rollouts_go_on_after_nats_is_killed(nats: NatsForTests) -> None:
    async with chronus_service(nats), training(nats) as seen:
        await reached(seen[0], STEPS // 2)
        await nats.server.kill()
        await nats.server.start()


async def test_rollouts_go_on_when_nats_is_away_longer_than_a_lease(nats: NatsForTests) -> None:
    async with chronus_service(nats) as chronus, training(nats) as seen:
        await reached(seen[0], STEPS // 2)
        await nats.server.stop()
        await owns(chronus, 0)
        await nats.server.start()


async def test_chronus_stops_while_nats_is_away(nats: NatsForTests) -> None:
    async with chronus_service(nats, drain_timeout_s=1.0), nats.project() as bus:
        await open_rollout(bus)
        await nats.server.stop()


# --- The journal alone ----------------------------------------------------------------------------


def fact(number: int) -> WriteFrame:
    return WriteFrame(records=(RolloutEnded(local="r", at=float(number)),))


async def taken(bus: Bus, shard: str = "s0") -> tuple[Journal, list[float]]:
    journal = Journal(bus, shard, SystemClock(), lambda: True)
    facts = [record.at async for _, frame in journal.take() for record in frame.records]
    return journal, facts


async def last_sequence(bus: Bus) -> int:
    body = await bus.request_raw("$JS.API.STREAM.INFO.chronus-journal", b"")
    return int(msgspec.json.decode(body)["state"]["last_seq"])


async def test_an_earlier_owner_cannot_write_after_the_journal_is_taken(
    nats: NatsForTests,
) -> None:
    async with nats.service("chronus") as bus:
        await bus.ensure_stream(journal_stream(1))
        old, _ = await taken(bus)
        await old.append(fact(1))
        new, facts = await taken(bus)
        assert facts == [1.0]
        with pytest.raises(FencedError):
            await old.append(fact(2))
        await new.append(fact(3))
        assert (await taken(bus))[1] == [1.0, 3.0]


async def test_journals_of_other_shards_do_not_disturb(nats: NatsForTests) -> None:
    async with nats.service("chronus") as bus:
        await bus.ensure_stream(journal_stream(1))
        (one, _), (two, _) = await taken(bus, "s0"), await taken(bus, "s1")
        for number in range(20):
            await asyncio.gather(one.append(fact(number)), two.append(fact(100 + number)))
        assert (await taken(bus, "s1"))[1] == [100.0 + number for number in range(20)]


async def test_a_lost_acknowledgement_is_found_out_and_nothing_is_written_twice(
    nats: NatsForTests,
) -> None:
    proxy = DeafProxy(nats.server.host, nats.server.port)
    async with proxy as url, nats.service("chronus") as direct:
        await direct.ensure_stream(journal_stream(1))
        config = msgspec.structs.replace(nats.service_config("chronus"), servers=(url,))
        async with await Bus.connect(config) as bus:
            journal, _ = await taken(bus)
            before = await last_sequence(direct)
            proxy.deaf = True
            appending = asyncio.create_task(journal.append(fact(1)))
            async with asyncio.timeout(20):
                while await last_sequence(direct) == before:
                    await asyncio.sleep(0)
            await proxy.cut()
            assert await appending == before + 1
            await journal.append(fact(2))
        assert (await taken(direct))[1] == [1.0, 2.0]


async def test_an_append_in_doubt_is_given_up_when_the_lease_runs_out(
    nats: NatsForTests,
) -> None:
    owner = True
    async with nats.service("chronus") as bus:
        await bus.ensure_stream(journal_stream(1))
        journal = Journal(bus, "s0", SystemClock(), lambda: owner)
        assert [frame async for frame in journal.take()] == []
        await nats.server.kill()
        owner = False
        with pytest.raises(FencedError):
            await journal.append(fact(1))
        await nats.server.start()


async def test_a_purge_keeps_what_comes_after_it(nats: NatsForTests) -> None:
    async with nats.service("chronus") as bus:
        await bus.ensure_stream(journal_stream(1))
        journal, _ = await taken(bus)
        other, _ = await taken(bus, "s1")
        await other.append(fact(9))
        sequences = [await journal.append(fact(number)) for number in range(5)]
        await journal.purge_before(sequences[3])
        assert (await taken(bus))[1] == [3.0, 4.0]
        assert (await taken(bus, "s1"))[1] == [9.0]
        with pytest.raises(FencedError):
            await journal.append(fact(5))


def test_a_lease_is_short_enough_for_these_tests() -> None:
    assert LEASE_TTL_S <= 1.0
