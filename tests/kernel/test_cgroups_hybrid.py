"""What only the hybrid backend has: limits in v1 hierarchies beside the v2 directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cgroup_processes import make_cgroup
from dsec_sandboxd.kernel.cgroups import CgroupLimits, detect_layout
from dsec_sandboxd.kernel.cgroups_v1 import HybridDriver

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYOUT = detect_layout()
NODE = f"hybrid-{os.getpid()}"
LIMITS = CgroupLimits(memory_bytes=64 << 20, cpus=1.5, pids=32)

pytestmark = pytest.mark.skipif(LAYOUT.mode != "hybrid", reason="this host has no v1 controllers")


@pytest.fixture
def driver() -> Iterator[HybridDriver]:
    driver = HybridDriver(LAYOUT, NODE)
    yield driver
    assert driver.leftovers() == []
    driver.close()


@pytest.mark.parametrize("controller", ["memory", "cpu", "pids"])
def test_a_leftover_in_one_tree_is_found_and_removed(driver: HybridDriver, controller: str) -> None:
    (LAYOUT.v1[controller] / f"dsec-{NODE}" / "half").mkdir()
    assert driver.leftovers() == ["half"]
    assert driver.adopt("half").remove()
    assert not list(Path("/sys/fs/cgroup").glob(f"*/*{NODE}/half"))


def test_the_nodes_directories_stay_while_a_sandbox_lives_and_go_after_it() -> None:
    driver = HybridDriver(LAYOUT, NODE)
    make_cgroup(driver, "last", LIMITS)
    driver.close()
    later = HybridDriver(LAYOUT, NODE)
    assert later.leftovers() == ["last"]
    assert later.adopt("last").remove()
    later.close()
    later.close()
    assert not list(Path("/sys/fs/cgroup").glob(f"*/dsec-{NODE}"))
