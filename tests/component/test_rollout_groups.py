"""A trainer of many rollouts on a real NATS: its steps, its answers, and whoever dies meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from chronus_parties import Agent, chronus_process, chronus_service
from dsec.group_answers import is_fenced
from dsec.rollout_groups import Reply, RolloutGroup, Step
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_common.wire.rollout import RolloutState
from group_trainer import GROUP, rollouts_of, train, trainer_process

TASKS = 12
STEPS = 12


@pytest.fixture
async def nats() -> AsyncIterator[NatsForTests]:
    async with nats_for_tests(projects=("other",)) as running:
        yield running


async def ids_of(nats: NatsForTests, tasks: int = TASKS) -> list[str]:
    """Return the ids of the group's rollouts; whoever trains then takes it over."""
    async with nats.project() as bus:
        goals = [{"goal": index} for index in range(tasks)]
        async with rollouts_of(bus).group(GROUP, goals) as group:
            return [rollout.id for rollout in group.rollouts]


@contextlib.asynccontextmanager
async def agents_of(
    nats: NatsForTests, ids: Sequence[str]
) -> AsyncIterator[asyncio.Future[list[list[Any]]]]:
    """Have an agent step in each rollout until it is told that it is done."""
    async with nats.service("sandboxd", "node-1") as bus:
        running = asyncio.gather(*(Agent(bus, one).step_until_done() for one in ids))
        try:
            yield running
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


def each_was_answered(answers: Sequence[Sequence[Any]], steps: int = STEPS) -> bool:
    """Return whether every agent got the answer to each of its steps, in order."""
    wanted = [{"step": seq} for seq in range(1, steps + 1)]
    return all([answer["to"] for answer in one] == wanted for one in answers)


async def test_a_group_is_trained_to_its_end_and_its_rollouts_are_closed(
    nats: NatsForTests,
) -> None:
    async with chronus_service(nats), nats.project() as bus:
        ids = await ids_of(nats)
        assert len(set(ids)) == TASKS
        async with agents_of(nats, ids) as answers:
            seen = await train(rollouts_of(bus), TASKS, STEPS, "one")
            assert each_was_answered(await answers)
        assert sorted(seen) == [(i, s) for i in range(TASKS) for s in range(1, STEPS + 1)]
        for index in range(TASKS):
            assert [s for i, s in seen if i == index] == list(range(1, STEPS + 1))
        info = await rollouts_of(bus).get(ids[0]).inspect()
        assert (info.state, info.total_reward) == (RolloutState.CLOSED, float(STEPS))
        assert await train(rollouts_of(bus), TASKS, STEPS, "late") == []


async def test_a_trainer_that_is_killed_goes_on_at_the_very_step(nats: NatsForTests) -> None:
    steps = 40
    async with chronus_service(nats), nats.project() as bus:
        ids = await ids_of(nats)
        async with agents_of(nats, ids) as answers:
            async with trainer_process(nats, TASKS, steps, "first") as doomed:
                await answered(nats, ids[0], 5)
                doomed.kill()
            seen = await train(rollouts_of(bus), TASKS, steps, "second")
            heard = await answers
        assert each_was_answered(heard, steps)
        by_first = {
            (index, seq)
            for index, one in enumerate(heard)
            for seq, answer in enumerate(one, start=1)
            if answer["by"] == "first"
        }
        by_second = {(i, s) for i in range(TASKS) for s in range(1, steps + 1)} - by_first
        assert by_first
        assert by_second
        assert set(seen) == by_second
        assert len(seen) == len(set(seen))


async def answered(nats: NatsForTests, rollout_id: str, seq: int) -> None:
    """Return when a rollout has come so far."""
    async with nats.project() as bus, asyncio.timeout(60):
        while (await rollouts_of(bus).get(rollout_id).inspect()).answered_seq < seq:
            await asyncio.sleep(0.01)


async def test_a_group_goes_on_after_the_owner_of_its_shards_is_killed(
    nats: NatsForTests, tmp_path: Path
) -> None:
    steps = 40
    async with nats.project() as bus, contextlib.AsyncExitStack() as later:
        async with chronus_process(nats, tmp_path) as doomed:
            ids = await ids_of(nats)
            heard = await later.enter_async_context(agents_of(nats, ids))
            training = asyncio.create_task(train(rollouts_of(bus), TASKS, steps, "one"))
            await answered(nats, ids[0], 5)
            doomed.kill()
        async with chronus_process(nats, tmp_path):
            seen = await training
            assert each_was_answered(await heard, steps)
        assert sorted(seen) == [(i, s) for i in range(TASKS) for s in range(1, steps + 1)]


async def test_of_two_trainers_the_newer_goes_on_and_the_older_is_told_why(
    nats: NatsForTests,
) -> None:
    async with chronus_service(nats), nats.project() as bus, nats.project() as other:
        ids = await ids_of(nats, 2)
        async with agents_of(nats, ids) as answers:
            goals = [{"goal": 0}, {"goal": 1}]
            async with rollouts_of(bus).group(GROUP, goals) as older:
                steps = aiter(older.steps())
                step = await anext(steps)
                async with rollouts_of(other).group(GROUP, goals) as newer:
                    assert newer.fence > older.fence
                    with pytest.raises(DsecError, match="taken the group") as refusal:
                        await step.reply({"by": "older", "to": step.observation})
                    assert is_fenced(refusal.value)
                    with pytest.raises(DsecError, match="taken the group") as refusal:
                        await read_all(steps)
                    assert is_fenced(refusal.value)
                    async for same in newer.steps():
                        reply = {"by": "newer", "to": same.observation}
                        await same.reply(reply, done=same.seq == 2)
            heard = await answers
        assert each_was_answered(heard, 2)
        assert {answer["by"] for one in heard for answer in one} == {"newer"}


async def test_a_trainer_that_was_replaced_changes_nothing_of_its_groups_rollouts(
    nats: NatsForTests,
) -> None:
    async with (
        chronus_service(nats),
        nats.project() as bus,
        nats.service("sandboxd", "node-1") as node_bus,
        rollouts_of(bus).group(GROUP, ["task"]) as older,
    ):
        agent = Agent(node_bus, older.rollouts[0].id)
        await agent.report(1, "saw")
        await older.rollouts[0].put_state({"by": "older"})
        async with rollouts_of(bus).group(GROUP, ["task"]) as newer:
            await newer.rollouts[0].put_state({"by": "newer"})
            by_id = rollouts_of(bus).get(older.rollouts[0].id)
            for rollout, is_replaced in ((older.rollouts[0], True), (by_id, False)):
                for ask in (
                    rollout.put_state({"by": "nobody"}),
                    rollout.checkpoint(),
                    rollout.roll_back(),
                    rollout.branch(1),
                ):
                    with pytest.raises(DsecError) as refusal:
                        await ask
                    assert refusal.value.code is ErrorCode.CONFLICT
                    assert is_fenced(refusal.value) is is_replaced
            with pytest.raises(DsecError, match="taken the group"):
                await older.rollouts[0].close()
            # Whoever has its id may read it, and close it.
            assert await by_id.get_state() == {"by": "newer"}
            assert (await by_id.inspect()).state is RolloutState.OPEN
            assert (await by_id.close()).state is RolloutState.CLOSED


async def read_all(steps: AsyncIterator[Step]) -> None:
    async for _ in steps:
        pass


async def batch_of(group: RolloutGroup, count: int) -> list[Step]:
    """Return so many steps, in as many batches as they come in."""
    steps: list[Step] = []
    async for batch in group.batches():
        steps += batch
        if len(steps) >= count:
            return steps
    raise AssertionError("the stream ended")


async def test_a_batch_of_answers_has_an_outcome_for_each(nats: NatsForTests) -> None:
    async with (
        chronus_service(nats),
        nats.project() as bus,
        rollouts_of(bus).group(GROUP, range(4), labels={"run": "1"}) as group,
        nats.service("sandboxd", "node-1") as node_bus,
    ):
        for rollout in group.rollouts:
            await Agent(node_bus, rollout.id).report(1, "saw")
        steps = sorted(await batch_of(group, 4), key=lambda step: step.index)
        await group.rollouts[2].close()
        outcomes = await group.reply(
            [
                Reply(steps[0], "go on", reward=0.5),
                Reply(steps[1], "x" * 300_000),
                Reply(steps[2], "too late"),
                Reply(steps[3], object()),
            ]
        )
        codes = [None if error is None else error.code for error in outcomes]
        assert codes == [None, ErrorCode.INVALID, ErrorCode.EXPIRED, ErrorCode.INVALID]
        assert "262144" in str(outcomes[1])
        await steps[1].reply("shorter")
        assert (await Agent(node_bus, group.rollouts[1].id).await_feedback(1)).payload == "shorter"
        with pytest.raises(DsecError, match="other feedback") as refusal:
            await steps[0].reply("something else")
        assert refusal.value.code is ErrorCode.CONFLICT
        assert not is_fenced(refusal.value)
        with pytest.raises(DsecError, match="only the group's trainer"):
            await group.rollouts[3].feedback(1, "past the group")


async def test_a_slow_trainer_holds_no_more_steps_than_its_window(nats: NatsForTests) -> None:
    async with (
        chronus_service(nats, shards=1),
        nats.project() as bus,
        rollouts_of(bus).group(GROUP, range(6), window=2) as group,
        nats.service("sandboxd", "node-1") as node_bus,
    ):
        for rollout in group.rollouts:
            await Agent(node_bus, rollout.id).report(1)
        held: list[Step] = []
        batches = group.batches()
        while len(held) < 2:
            held += await anext(batches)
        assert len(held) == 2
        more = asyncio.ensure_future(anext(batches))
        await held[0].reply()
        assert len(await more) == 1


async def test_the_same_name_with_other_tasks_is_refused(nats: NatsForTests) -> None:
    async with chronus_service(nats), nats.project() as bus, nats.project("other") as stranger:
        async with rollouts_of(bus).group(GROUP, ["a", "b"]) as group:
            ids = [rollout.id for rollout in group.rollouts]
            with pytest.raises(DsecError, match="task 1") as refusal:
                await rollouts_of(bus).group(GROUP, ["a", "c"]).__aenter__()
            assert refusal.value.code is ErrorCode.CONFLICT
            # That took the group from nobody.
            async with nats.service("sandboxd", "node-1") as node_bus:
                await Agent(node_bus, ids[1]).report(1)
            (step,) = await batch_of(group, 1)
            await step.reply()
        async with rollouts_of(stranger, "other").group(GROUP, ["a", "b"]) as theirs:
            assert not {rollout.id for rollout in theirs.rollouts} & set(ids)
        for name in ("", "x" * 129, "a\nb"):
            with pytest.raises(DsecError, match="name") as refusal:
                await rollouts_of(bus).group(name, ["a"]).__aenter__()
            assert refusal.value.code is ErrorCode.INVALID
        with pytest.raises(DsecError, match="task 0 is not a JSON value"):
            await rollouts_of(bus).group("odd", [object()]).__aenter__()


async def test_a_thousand_tasks_are_opened_and_found_again(nats: NatsForTests) -> None:
    async with chronus_service(nats), nats.project() as bus:
        tasks = [{"goal": index, "text": "x" * 500} for index in range(1000)]
        async with rollouts_of(bus).group(GROUP, tasks) as group:
            first = [rollout.id for rollout in group.rollouts]
        async with rollouts_of(bus).group(GROUP, tasks) as group:
            assert [rollout.id for rollout in group.rollouts] == first
        assert len(set(first)) == 1000


async def test_an_answer_that_is_none_makes_no_room_and_one_that_comes_twice_makes_it_once(
    nats: NatsForTests,
) -> None:
    async with (
        chronus_service(nats, shards=1),
        nats.project() as bus,
        rollouts_of(bus).group(GROUP, range(6), window=2) as group,
        nats.service("sandboxd", "node-1") as node_bus,
    ):
        for rollout in group.rollouts:
            await Agent(node_bus, rollout.id).report(1)
        batches = group.batches()
        held: list[Step] = []
        while len(held) < 2:
            held += await anext(batches)
        for _ in range(4):
            (refused,) = await group.reply([Reply(held[0], object())])
            assert refused is not None
        for _ in range(4):
            await held[1].reply("the same")
        assert len(await anext(batches)) == 1
        more = asyncio.ensure_future(anext(batches))
        await held[0].reply("valid at last")
        assert len(await more) == 1
