"""DAGs of agents on a real node: typed, tried again, taken over, resumed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec.client import DSecClient
from dsec_common.compute.consistency import CLOCK_TOLERANCE_MS
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.dag import DagRetry, DagSpec, DagStep, DagSummary, RunState, StepState
from dsec_scheduler.config import SchedulerConfig
from dsec_scheduler.dags.converters import Converter
from dsec_scheduler.dags.runs import RunRecord
from dsec_scheduler.dags.store import RUNS_BUCKET
from dsec_scheduler.service import SchedulerService
from sandboxd_node import BASE, NodeForTests, node_for_tests

NUMBER = {"type": "integer"}
TEXT = {"type": "string"}


def shell(line: str) -> tuple[str, ...]:
    """Return the command of a step: a line for the shell."""
    return ("/bin/sh", "-c", line)


def contract(line: str, read: Any = NUMBER, written: Any = NUMBER) -> dict[str, Any]:
    """Return the contract of an agent that does one thing."""
    return {"input": read, "output": written, "command": list(shell(line))}


class World:
    """A node, schedulers, and a project's client."""

    def __init__(self, node: NodeForTests, client: DSecClient) -> None:
        self.node = node
        self.client = client
        self.schedulers: list[SchedulerService] = []

    async def scheduler(self, **settings: Any) -> SchedulerService:
        """Return one more scheduler."""
        bus = self.node.nats.service_config("scheduler")
        scheduler = SchedulerService(
            SchedulerConfig(
                nats_servers=bus.servers,
                nats_credentials=bus.credentials_path,
                node_timeout_s=5.0,
                warm_up_s=0.5,
                **settings,
            )
        )
        await scheduler.start()
        self.schedulers.append(scheduler)
        return scheduler

    async def agent(self, name: str, line: str, read: Any = NUMBER, written: Any = NUMBER) -> None:
        """Register an agent."""
        await self.client.agents.register(
            name, "1", base=BASE, contract=contract(line, read, written)
        )


@contextlib.asynccontextmanager
async def _world(node: NodeForTests, **settings: Any) -> AsyncIterator[World]:
    credentials = str(node.nats.auth.project("default"))
    async with DSecClient([node.nats.server.url], credentials) as client:
        world = World(node, client)
        await world.scheduler(**settings)
        try:
            await world.agent("double", "read x; echo $((x * 2))")
            await world.agent(
                "add",
                "sed 's/[^0-9,]//g' | { IFS=, read a b; echo $((a + b)); }",
                {
                    "type": "object",
                    "properties": {"a": NUMBER, "b": NUMBER},
                    "required": ["a", "b"],
                },
            )
            yield world
        finally:
            for scheduler in world.schedulers:
                if scheduler.state not in {"stopped", "failed"}:
                    assert await scheduler.stop() == 0


@pytest.fixture
async def world(tmp_path: Path, layers: Path) -> AsyncIterator[World]:
    async with node_for_tests(tmp_path, layers) as node, _world(node) as world:
        yield world


def diamond(**changes: DagStep) -> DagSpec:
    """Return ``$`` doubled twice over two ways, added."""
    steps = {
        "first": DagStep(agent="double", inputs={"*": "$"}),
        "left": DagStep(agent="double", inputs={"*": "first"}),
        "right": DagStep(agent="double", inputs={"*": "first"}),
        "sum": DagStep(agent="add", inputs={"a": "left", "b": "right"}),
    }
    return DagSpec(name="diamond", input=NUMBER, steps={**steps, **changes})


async def test_a_dag_runs_in_order_and_gives_what_its_steps_give(world: World) -> None:
    info = await world.client.dags.register(diamond())
    assert info.order[0] == "first"
    assert info.order[-1] == "sum"
    run = await world.client.dags.run("diamond", 3, run_id="r1")
    over = await world.client.dags.wait(run.run_id, timeout_s=60)
    assert over.state is RunState.DONE
    assert {name: step.output for name, step in over.steps.items()} == {
        "first": 6,
        "left": 12,
        "right": 12,
        "sum": 24,
    }
    again = await world.client.dags.run("diamond", 3, run_id="r1")
    assert again.state is RunState.DONE
    with pytest.raises(DsecError, match="another input") as taken:
        await world.client.dags.run("diamond", 4, run_id="r1")
    assert taken.value.code is ErrorCode.CONFLICT
    with pytest.raises(DsecError, match="does not fit") as caught:
        await world.client.dags.run("diamond", "three")
    assert caught.value.code is ErrorCode.INVALID


async def test_a_mismatch_is_refused_at_registration_and_a_lossless_one_converted(
    world: World,
) -> None:
    await world.agent("shout", "tr a-z A-Z", TEXT, TEXT)
    spec = diamond(told=DagStep(agent="shout", inputs={"*": "sum"}))
    info = await world.client.dags.register(spec)
    (conversion,) = info.conversions
    assert (conversion.step, conversion.converters) == ("told", ("number_to_text",))
    run = await world.client.dags.run("diamond", 1)
    over = await world.client.dags.wait(run.run_id, timeout_s=60)
    assert over.steps["told"].output == "8"
    with pytest.raises(DsecError, match="no lossless converter"):
        await world.client.dags.register(
            diamond(
                told=DagStep(agent="shout", inputs={"*": "sum"}),
                back=DagStep(agent="double", inputs={"*": "told"}),
            )
        )
    with pytest.raises(DsecError) as caught:
        await world.client.dags.register(diamond(none=DagStep(agent="nobody")))
    assert caught.value.code is ErrorCode.NOT_FOUND


async def test_a_failed_branch_blocks_what_needs_it_and_a_resumed_run_goes_on(
    world: World,
) -> None:
    broken = DagStep(
        agent="double",
        inputs={"*": "first"},
        command=shell("echo wrong >&2; exit 3"),
        retry=DagRetry(max_attempts=2, backoff_s=0.05),
    )
    await world.client.dags.register(diamond(right=broken))
    run = await world.client.dags.run("diamond", 3, run_id="r2")
    over = await world.client.dags.wait(run.run_id, timeout_s=60)
    assert over.state is RunState.PARTIAL
    states = {name: step.state for name, step in over.steps.items()}
    assert states == {
        "first": StepState.DONE,
        "left": StepState.DONE,
        "right": StepState.FAILED,
        "sum": StepState.BLOCKED,
    }
    assert over.steps["right"].attempts == 2
    assert "exit code 3" in over.steps["right"].error
    assert "wrong" in over.steps["right"].error
    again = await world.client.dags.resume("r2")
    assert again.steps["first"].state is StepState.DONE
    over = await world.client.dags.wait("r2", timeout_s=60)
    assert over.state is RunState.PARTIAL
    assert over.steps["right"].attempts == 2


async def test_an_output_that_does_not_fit_its_schema_is_a_failed_attempt(world: World) -> None:
    await world.agent("liar", "echo '\"text\"'")
    await world.client.dags.register(
        DagSpec(name="lie", input=NUMBER, steps={"a": DagStep(agent="liar", inputs={"*": "$"})})
    )
    run = await world.client.dags.run("lie", 1)
    over = await world.client.dags.wait(run.run_id, timeout_s=60)
    assert over.state is RunState.FAILED
    assert "something else than its output" in over.steps["a"].error


async def test_a_converter_that_raises_fails_the_step_at_once(world: World) -> None:
    def broken(_: Any) -> Any:
        raise ZeroDivisionError("no")

    converters = world.schedulers[0]._dags._door._converters
    converters.add(
        Converter("number_to_text", {"type": "integer"}, lambda _: {"type": "string"}, broken)
    )
    await world.agent("shout", "tr a-z A-Z", TEXT, TEXT)
    step = DagStep(agent="shout", inputs={"*": "$"}, retry=DagRetry(max_attempts=5))
    await world.client.dags.register(DagSpec(name="dag", input=NUMBER, steps={"a": step}))
    run = await world.client.dags.run("dag", 1)
    over = await world.client.dags.wait(run.run_id, timeout_s=60)
    assert (over.state, over.steps["a"].attempts) == (RunState.FAILED, 1)
    assert "ZeroDivisionError" in over.steps["a"].error


async def test_another_scheduler_takes_a_run_over_and_no_attempt_runs_twice(
    world: World,
) -> None:
    """The first one is gone in the middle of a step; the step's sandbox is made once."""
    slow = DagStep(agent="double", inputs={"*": "$"}, command=shell("sleep 3; echo 7"))
    await world.client.dags.register(DagSpec(name="slow", input=NUMBER, steps={"a": slow}))
    await world.client.dags.run("slow", 1, run_id="r3")
    async with asyncio.timeout(20):
        while not await world.client.list_sandboxes(labels={"dag_run": "r3"}):
            await asyncio.sleep(0.05)
    first = world.schedulers[0]
    await world.scheduler()
    first._dags.run.__self__._driving[("default", "r3")].cancel()  # type: ignore[attr-defined]
    first._dags.run.__self__._unfinished.clear()  # type: ignore[attr-defined]
    assert await first.stop() == 0
    over = await world.client.dags.wait("r3", timeout_s=60)
    assert over.state is RunState.DONE
    assert (over.steps["a"].output, over.steps["a"].attempts) == (7, 1)
    ended = await world.client.list_sandboxes(labels={"dag_run": "r3"}, include_ended=True)
    assert len(ended) == 1


async def test_what_a_step_gives_is_newer_than_all_that_it_was_made_of(world: World) -> None:
    await world.client.dags.register(diamond())
    run = await world.client.dags.run("diamond", 3)
    await world.client.dags.wait(run.run_id, timeout_s=60)
    (scheduler,) = world.schedulers
    record = await (await scheduler.bus.kv(RUNS_BUCKET, RunRecord, ttl_s=604800.0)).get(
        f"default.{run.run_id}"
    )
    assert record.value is not None
    steps = record.value.steps
    for name, planned in record.value.plan.steps.items():
        newest = max((steps[needed].version_ms for needed in planned.needs), default=0)
        assert steps[name].version_ms >= newest + CLOCK_TOLERANCE_MS


async def test_dags_are_listed_by_name_a_page_at_a_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec_scheduler.dags.door.LISTING_PAGE_BYTES", 1)
    assert await world.client.dags.list() == []
    for name in ("second", "first"):
        spec = msgspec.structs.replace(diamond(), name=name, description=f"the {name}")
        await world.client.dags.register(spec)
    assert await world.client.dags.list() == [
        DagSummary(name="first", steps=4, description="the first"),
        DagSummary(name="second", steps=4, description="the second"),
    ]


async def test_a_dag_that_is_removed_is_gone_and_its_runs_go_on(world: World) -> None:
    slow = DagStep(agent="double", inputs={"*": "$"}, command=shell("sleep 2; echo 5"))
    await world.client.dags.register(diamond(first=slow))
    for run_id in ("known", "other"):
        await world.client.dags.run("diamond", 3, run_id=run_id)
    await world.client.dags.remove("diamond")
    assert (await world.client.dags.inspect("known")).state is RunState.RUNNING
    assert await world.client.dags.list() == []
    for ask in (
        world.client.dags.remove("diamond"),
        world.client.dags.run("diamond", 3),
        world.client.dags.run("diamond", 3, run_id="new"),
    ):
        with pytest.raises(DsecError, match="no DAG 'diamond'") as caught:
            await ask
        assert caught.value.code is ErrorCode.NOT_FOUND
    # Who lost the answer to what began it asks again.
    assert (await world.client.dags.run("diamond", 3, run_id="known")).run_id == "known"
    for name, value, told in (("diamond", 4, "another input"), ("another", 3, "the DAG diamond")):
        with pytest.raises(DsecError, match=told) as taken:
            await world.client.dags.run(name, value, run_id="known")
        assert taken.value.code is ErrorCode.CONFLICT
    for run_id in ("known", "other"):
        over = await world.client.dags.wait(run_id, timeout_s=60)
        assert (over.state, over.name, over.steps["sum"].output) == (RunState.DONE, "diamond", 20)
    assert (await world.client.dags.resume("known")).state is RunState.DONE
    await world.client.dags.register(diamond())
    assert [one.name for one in await world.client.dags.list()] == ["diamond"]


async def test_a_removal_whose_answer_was_lost_is_done_when_it_is_asked_for_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.client.dags.register(diamond())
    dags = world.client.dags
    ask = dags._ask

    async def twice(verb: str, message: Any, reply_type: Any) -> Any:
        if verb == "remove":
            await ask(verb, message, reply_type)
        return await ask(verb, message, reply_type)

    monkeypatch.setattr(dags, "_ask", twice)
    await dags.remove("diamond")
    with pytest.raises(DsecError) as caught:
        await dags.remove("diamond")
    assert caught.value.code is ErrorCode.NOT_FOUND


async def test_a_project_has_so_many_dags_and_those_it_has_change_all_the_same(
    tmp_path: Path, layers: Path
) -> None:
    def named(name: str, text: str = "") -> DagSpec:
        return msgspec.structs.replace(diamond(), name=name, description=text)

    async with (
        node_for_tests(tmp_path, layers) as node,
        _world(node, dags_project_max=2) as world,
    ):
        for name in ("one", "two"):
            await world.client.dags.register(named(name))
        with pytest.raises(DsecError, match=r"dags_project_max\); remove DAGs") as caught:
            await world.client.dags.register(named("three"))
        assert caught.value.code is ErrorCode.EXHAUSTED
        await world.client.dags.register(named("two", "changed"))
        assert [one.description for one in await world.client.dags.list()] == ["", "changed"]
        await world.client.dags.remove("one")
        await world.client.dags.register(named("three"))
        assert [one.name for one in await world.client.dags.list()] == ["three", "two"]


async def test_a_project_sees_only_its_own_runs(world: World) -> None:
    await world.client.dags.register(diamond())
    await world.client.dags.run("diamond", 3, run_id="r4")
    credentials = str(world.node.nats.auth.project("other"))
    async with DSecClient([world.node.nats.server.url], credentials) as other:
        for ask in (
            other.dags.inspect("r4"),
            other.dags.resume("r4"),
            other.dags.run("diamond", 3),
            other.dags.remove("diamond"),
        ):
            with pytest.raises(DsecError) as caught:
                await ask
            assert caught.value.code is ErrorCode.NOT_FOUND
        assert await other.dags.list() == []
    assert [one.name for one in await world.client.dags.list()] == ["diamond"]
    await world.client.dags.wait("r4", timeout_s=60)


async def test_a_run_goes_on_with_the_version_that_follows_if_its_contract_fits(
    world: World,
) -> None:
    slow = DagStep(agent="double", inputs={"*": "$"}, command=shell("sleep 2; echo 1"))
    steps = {"first": slow, "second": DagStep(agent="add_one", inputs={"*": "first"})}
    await world.agent("add_one", "read x; echo $((x + 1))")
    await world.client.dags.register(DagSpec(name="long", input=NUMBER, steps=steps))
    for version, line, written, state in (
        ("2", "read x; echo $((x + 2))", {"type": "integer", "minimum": 0}, RunState.DONE),
        ("3", "echo text", TEXT, RunState.PARTIAL),
    ):
        run = await world.client.dags.run("long", 1)
        await world.client.agents.register(
            "add_one", version, base=BASE, contract=contract(line, NUMBER, written)
        )
        await world.client.agents.update("add_one", version)
        over = await world.client.dags.wait(run.run_id, timeout_s=60)
        assert over.state is state
        if state is RunState.DONE:
            assert over.steps["second"].output == 3
        else:
            assert "begin a new run" in over.steps["second"].error
