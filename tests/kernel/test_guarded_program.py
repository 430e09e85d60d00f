"""The C program that forks are compared with: it guards its children as the platform does."""

from __future__ import annotations

import pytest

from benchmarks import peers
from dsec_common.errors import DsecError
from dsec_sandboxd.kernel.cgroups_layout import detect_layout


@pytest.mark.parametrize(("processes", "count"), [(1, 5), (2, 11)])
async def test_it_makes_children_and_leaves_nothing(processes: int, count: int) -> None:
    forks = await peers.run_guarded_forks(processes, count)
    assert (forks.count, forks.processes) == (count - count % processes, processes)
    assert forks.fork_rate_per_s > 1
    assert not list(detect_layout().unified.glob("guarded-*"))


async def test_what_it_cannot_do_is_told_in_its_own_words() -> None:
    with pytest.raises(DsecError, match="usage: guarded"):
        await peers.run_guarded_forks(2, 1)
    assert not list(detect_layout().unified.glob("guarded-*"))
