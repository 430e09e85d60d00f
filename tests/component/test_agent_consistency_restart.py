"""State consistency outlives whoever keeps it: daemons and schedulers that are killed."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from consistency_world import ConsistencyWorld, consistency_world, goes_on, now_ms, until
from dsec_common.compute.consistency import CLOCK_TOLERANCE_MS
from dsec_common.errors import ErrorCode
from refusals import refused
from sandboxd_process import DaemonProcess, daemon_for_tests

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")

Both = tuple[DaemonProcess, ConsistencyWorld]


@pytest.fixture
async def both(tmp_path: Path, layers: Path) -> AsyncIterator[Both]:
    async with (
        daemon_for_tests(tmp_path, layers) as (daemon, node),
        consistency_world(node) as world,
    ):
        yield daemon, world


async def test_a_daemon_that_is_killed_on_the_way_begins_again_and_has_the_agent_go_on(
    both: Both,
) -> None:
    daemon, world = both
    sandbox, inside = await world.trader()
    inside.touch("wait")
    changed_ms = now_ms()
    await world.agents.report_dependencies({"prices": changed_ms})
    await until(lambda: bool(inside.read("told")))
    for scheduler in world.schedulers:  # the daemon needs none of them for what it has begun
        await scheduler.stop()
    await daemon.kill()
    inside.remove("told")
    await daemon.start()
    # What ran alone was ended, and is begun anew; the agent stands still for it again.
    await until(lambda: bool(inside.read("told")))
    assert inside.stood_still() == []
    count = inside.read("count")
    inside.remove("wait")
    info = await world.info(sandbox, lambda info: not info.behind)
    assert info.state_version_ms == changed_ms + CLOCK_TOLERANCE_MS
    assert inside.stood_still() == [True]
    await until(lambda: inside.read("count") not in {count, ""})


async def test_one_that_failed_stands_still_over_the_daemons_death_until_there_is_a_reason(
    both: Both,
) -> None:
    daemon, world = both
    sandbox, inside = await world.trader()
    inside.touch("fail")
    await world.agents.report_dependencies({"prices": now_ms()})
    before = await world.info(sandbox, lambda info: bool(info.synchronise_error))
    inside.remove("told")
    await daemon.kill()
    await daemon.start()
    assert inside.frozen
    after = await sandbox.inspect()
    assert (after.behind, after.synchronise_error, after.state_version_ms) == (
        before.behind,
        before.synchronise_error,
        before.state_version_ms,
    )
    assert (await refused(sandbox.exec("true"))).code is ErrorCode.DENIED
    assert inside.read("told") == ""
    inside.remove("fail")
    changed_ms = now_ms()
    await world.agents.report_dependencies({"orders": changed_ms})
    required_ms = changed_ms + CLOCK_TOLERANCE_MS
    await world.info(sandbox, lambda info: info.state_version_ms == required_ms)
    await goes_on(inside)


async def test_what_is_over_when_the_daemon_is_back_is_forgotten(both: Both) -> None:
    daemon, world = both
    sandbox, inside = await world.trader()
    inside.touch("fail")
    await world.agents.report_dependencies({"prices": now_ms()})
    await world.info(sandbox, lambda info: bool(info.synchronise_error))
    await daemon.kill()
    (inside.cgroup / "cgroup.kill").write_text("1")
    await daemon.start()
    info = await sandbox.inspect()
    assert (info.behind, info.synchronise_error) == ("", "")
    assert info.end_cause is not None
