"""What a step is given: never older than what the run knows of its dependencies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from structlog.testing import capture_logs

from control_plane import until
from dsec_common.clock import SystemClock
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.testing.nats import nats_for_tests
from dsec_common.wire.dag import DagRetry, StepState
from dsec_scheduler.dags import runs
from dsec_scheduler.dags.converters import Converters
from dsec_scheduler.dags.inputs import StepInput
from dsec_scheduler.dags.plans import Plan, PlannedStep, Source
from dsec_scheduler.dags.runs import RunRecord
from dsec_scheduler.dags.store import DagStore


def step(**sources: str) -> PlannedStep:
    """Return a step whose properties are the outputs of other steps."""
    return PlannedStep(
        agent="a",
        version="1",
        command=("true",),
        sources={of: Source(step=needed) for of, needed in sources.items()},
        needs=tuple(sorted(set(sources.values()) - {""})),
        input={},
        output={},
        retry=DagRetry(),
        timeout_s=1.0,
    )


PLAN = Plan(
    name="p",
    input={},
    steps={"prices": step(), "orders": step(), "sum": step(x="prices", y="orders", z="")},
)


def after(**versions_ms: int) -> RunRecord:
    """Return a run in which these steps are done."""
    run = runs.begun("r", PLAN)
    for name, version_ms in versions_ms.items():
        run = runs.succeeded(runs.started(run, name), name, "n.1", version_ms)
    return run


@pytest.fixture
async def store() -> AsyncIterator[DagStore]:
    async with nats_for_tests() as nats, nats.service("scheduler") as bus:
        store = await DagStore.open(bus, SystemClock(), 1, 3600.0, 1 << 20)
        await store.begin("default", runs.begun("r", PLAN), "own")
        yield store


def input_of(store: DagStore, run: RunRecord, **more: int) -> StepInput:
    return StepInput(
        store,
        Converters(),
        SystemClock(),
        project="default",
        run=run,
        name="sum",
        planned=PLAN.steps["sum"],
        **more,
    )


async def test_a_step_is_given_what_it_needs_and_is_newer_than_that(store: DagStore) -> None:
    await store.put_output("default", "r", "prices", 1, 1_000)
    await store.put_output("default", "r", "orders", 2, 1_200)
    read = input_of(store, after(prices=1_000, orders=1_200))
    with capture_logs() as logs:
        assert await read.settle() == 1_250
        farther = input_of(store, after(prices=1_000, orders=1_200), clock_tolerance_ms=300)
        assert await farther.settle() == 1_500
    assert read.value == {"x": 1, "y": 2, "z": "own"}
    assert not logs


async def test_a_step_that_would_be_given_what_is_old_stands_still_until_it_is_not(
    store: DagStore,
) -> None:
    """As with a copy of the bucket that is behind: the run knows of more than can be read."""
    await store.put_output("default", "r", "prices", "old", 900)
    await store.put_output("default", "r", "orders", 2, 1_200)
    run = after(prices=1_000, orders=1_200)
    assert run.steps["sum"].state is StepState.WAITING
    read = input_of(store, run)
    with capture_logs() as logs:
        settling = asyncio.create_task(read.settle())
        await until(lambda: bool(logs))
        assert not settling.done()
        await store.put_output("default", "r", "prices", "new", 1_000)
        assert await settling == 1_250
    assert read.value == {"x": "new", "y": 2, "z": "own"}
    assert [log["event"] for log in logs] == [
        "a step stands still",
        "a step goes on with what is so now",
    ]
    assert logs[0]["reason"] == "its state of 950 is behind prices: synchronise to 1050"
    assert (logs[0]["run"], logs[0]["step"]) == ("r", "sum")


async def test_a_run_whose_own_input_is_gone_says_so(store: DagStore) -> None:
    lost = msgspec.structs.replace(after(), run_id="lost")
    with pytest.raises(DsecError) as caught:
        await input_of(store, lost).settle()
    assert caught.value.code is ErrorCode.NOT_FOUND


async def test_a_step_whose_input_stays_behind_does_not_begin(store: DagStore) -> None:
    await store.put_output("default", "r", "orders", 2, 1_200)
    read = input_of(store, after(prices=1_000, orders=1_200))
    with pytest.raises(DsecError) as caught:
        await read.settle()
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert read.value is None
