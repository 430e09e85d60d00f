"""What schedulers tell each other of what waits: however large, it is said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from control_plane import ControlPlane, control_plane, request, until
from dsec_common import subjects
from dsec_common.bus import Request
from dsec_common.compute.model import MODEL_CHARACTERS_MAX, MODELS_MAX, GpuDemand
from dsec_common.errors import DsecError
from dsec_common.testing.nats import nats_for_tests
from dsec_common.wire.node import Gpu
from dsec_common.wire.waiting import GANG_MAX, CreateGang, GangCreated, WaitingReport

GANGS = 4


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    async with nats_for_tests() as nats, control_plane(nats) as plane:
        await plane.broker()
        yield plane


async def test_large_gangs_that_wait_are_told_of_as_far_as_they_fit(plane: ControlPlane) -> None:
    await plane.node("gpu-1", gpus=(Gpu(uuid="GPU-0", model="NVIDIA A100"),))
    await plane.scheduler()
    user = await plane.project()
    heard: list[WaitingReport] = []

    async def hear(event: Request[WaitingReport]) -> None:
        heard.append(event.message)

    async with plane.nats.service("scheduler") as other:
        await other.subscribe(subjects.WAITING_REPORTS, WaitingReport, hear)
        names = tuple(f"{at:0{MODEL_CHARACTERS_MAX}d}" for at in range(MODELS_MAX))
        member = request(gpu=GpuDemand(min_cu=1.0, max_cu=1.0, models=names), timeout_s=20.0)
        gang = tuple(member for _ in range(GANG_MAX))
        asked = [
            asyncio.create_task(
                user.request(
                    "dsec.v1.default.sandbox.create_gang",
                    CreateGang(requests=gang, timeout_s=20.0),
                    GangCreated,
                    timeout_s=30.0,
                )
            )
            for _ in range(GANGS)
        ]
        await until(lambda: any(report.waiting == GANGS for report in heard))
        report = next(report for report in heard if report.waiting == GANGS)
        assert 1 <= len(report.heads) < GANGS
        for task in asked:
            task.cancel()
        assert all(
            isinstance(it, DsecError | asyncio.CancelledError)
            for it in await asyncio.gather(*asked, return_exceptions=True)
        )
