"""What a host's trees can enforce, which limits are valid, and the v2 controller files.

Directories stand in for cgroup trees here, so that hosts unlike this one are covered. They show
which files are read and written, with what text and in what order; they do not show that the kernel
takes it. The contract suite shows that, for the backend that its host needs; on a hybrid host,
``tests/framework/pure_v2_guest.py`` runs it for the other one in an emulated machine.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel import cgroups_v1, cgroups_v2, protocol
from dsec_sandboxd.kernel.cgroups import CgroupLimits, detect_layout, open_driver
from dsec_sandboxd.kernel.cgroups_layout import MAXIMUM_MEMORY_BYTES, MAXIMUM_PIDS

if TYPE_CHECKING:
    from pathlib import Path

V1_FILES = {
    "memory": ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"],
    "cpu": ["cpu.shares"],
    "pids": ["tasks"],
}


def hybrid_host(root: Path, *, without: tuple[str, ...] = ()) -> Path:
    for controller, names in V1_FILES.items():
        for name in names:
            if not {controller, name} & set(without):
                (root / controller).mkdir(exist_ok=True)
                (root / controller / name).touch()
    if "unified" not in without:
        (root / "unified").mkdir()
        (root / "unified" / "cgroup.controllers").write_text("hugetlb\n")
    return root


def v2_host(root: Path, controllers: str) -> Path:
    (root / "cgroup.controllers").write_text(controllers + "\n")
    return root


def test_a_hybrid_host_keeps_limits_in_v1_and_processes_in_v2(tmp_path: Path) -> None:
    layout = detect_layout(hybrid_host(tmp_path))
    assert layout.mode == "hybrid"
    assert layout.unified == tmp_path / "unified"
    assert layout.v1 == {name: tmp_path / name for name in ("memory", "cpu", "pids")}
    assert layout.missing == ()


def test_a_v2_host_has_one_tree(tmp_path: Path) -> None:
    layout = detect_layout(v2_host(tmp_path, "cpuset cpu io memory hugetlb pids"))
    assert (layout.mode, layout.unified, layout.v1, layout.missing) == ("v2", tmp_path, {}, ())


@pytest.mark.parametrize(
    ("without", "missing"),
    [
        (("pids",), ("pids",)),
        (("memory", "cpu"), ("memory", "cpu")),
        (("memory.memsw.limit_in_bytes",), ("swap",)),
        (("unified",), ("unified",)),
        (("unified", "memory", "cpu", "pids"), ("unified", "memory", "cpu", "pids")),
    ],
)
def test_a_host_that_cannot_enforce_a_limit_is_refused_by_name(
    tmp_path: Path, without: tuple[str, ...], missing: tuple[str, ...]
) -> None:
    layout = detect_layout(hybrid_host(tmp_path, without=without))
    assert layout.missing == missing
    with pytest.raises(DsecError, match=missing[0]) as caught:
        open_driver(layout, "node")
    assert caught.value.code is ErrorCode.UNSUPPORTED


def test_a_v2_host_without_a_controller_is_refused(tmp_path: Path) -> None:
    layout = detect_layout(v2_host(tmp_path, "cpu memory"))
    assert layout.missing == ("pids",)
    with pytest.raises(DsecError, match="pids"):
        open_driver(layout, "node")


def test_a_kernel_without_cgroup_kill_is_refused_and_left_clean(tmp_path: Path) -> None:
    layout = detect_layout(hybrid_host(tmp_path))
    with pytest.raises(DsecError, match=r"cgroup\.kill") as caught:
        open_driver(layout, "node")
    assert caught.value.code is ErrorCode.UNSUPPORTED
    assert not list(tmp_path.glob("*/dsec-node"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory_bytes": 0},
        {"memory_bytes": -1},
        {"memory_bytes": 1 << 20},
        {"memory_bytes": 1 << 61},
        {"cpus": 0},
        {"cpus": -1.0},
        {"cpus": math.nan},
        {"cpus": math.inf},
        {"cpus": 5000},
        {"pids": 0},
        {"pids": 1},
        {"pids": 1 << 23},
    ],
)
def test_a_limit_that_cannot_hold_is_invalid_and_named(wrong: dict[str, Any]) -> None:
    good: dict[str, Any] = {"memory_bytes": 64 << 20, "cpus": 1.0, "pids": 16}
    with pytest.raises(DsecError, match=next(iter(wrong))) as caught:
        CgroupLimits(**good | wrong)
    assert caught.value.code is ErrorCode.INVALID


@pytest.mark.parametrize(
    ("cpus", "shares", "weight", "quota_us"),
    [(1, 1024, 100, 100_000), (0.01, 10, 1, 1_000), (2.5, 2560, 250, 250_000)],
)
def test_processors_become_shares_weight_and_quota(
    cpus: float, shares: int, weight: int, quota_us: int
) -> None:
    limits = CgroupLimits(memory_bytes=64 << 20, cpus=cpus, pids=16)
    assert (limits.cpu_shares, limits.cpu_weight, limits.cpu_quota_us) == (shares, weight, quota_us)


def test_more_processors_than_the_kernel_can_weigh_get_its_most() -> None:
    limits = CgroupLimits(memory_bytes=64 << 20, cpus=1000, pids=16)
    assert (limits.cpu_shares, limits.cpu_weight) == (262_144, 10_000)


def test_v2_limits_are_written_without_swap_and_with_group_kill() -> None:
    limits = CgroupLimits(memory_bytes=64 << 20, cpus=2, pids=16)
    assert cgroups_v2.limit_texts(limits) == [
        (0, "memory.max", b"67108864"),
        (0, "memory.swap.max", b"0"),
        (0, "memory.oom.group", b"1"),
        (0, "cpu.weight", b"200"),
        (0, "pids.max", b"16"),
    ]


def test_v2_quota_and_single_kill_are_written_only_when_asked_for() -> None:
    limits = CgroupLimits(
        memory_bytes=64 << 20, cpus=0.5, pids=16, cpu_quota=True, end_all_on_oom=False
    )
    written = {file: text for _, file, text in cgroups_v2.limit_texts(limits)}
    assert written["cpu.max"] == b"50000 100000"
    assert "memory.oom.group" not in written


def test_v1_limits_count_swap_and_sockets_and_are_written_in_the_order_that_the_kernel_takes() -> (
    None
):
    limits = CgroupLimits(memory_bytes=64 << 20, cpus=1, pids=16, cpu_quota=True)
    assert cgroups_v1.limit_texts(limits) == [
        (1, "memory.limit_in_bytes", b"67108864"),
        (1, "memory.memsw.limit_in_bytes", b"67108864"),
        (1, "memory.kmem.tcp.limit_in_bytes", b"8388608"),
        (2, "cpu.cfs_period_us", b"100000"),
        (2, "cpu.cfs_quota_us", b"100000"),
        (3, "pids.max", b"16"),
    ]


@pytest.mark.parametrize("backend", [cgroups_v1, cgroups_v2])
def test_best_effort_is_idle_in_either_tree_and_has_no_share(backend: Any) -> None:
    limits = CgroupLimits(memory_bytes=64 << 20, cpus=2, pids=16, best_effort=True)
    written = {file: text for _, file, text in backend.limit_texts(limits)}
    assert written["cpu.idle"] == b"1"
    assert not {"cpu.weight", "cpu.shares"} & set(written)


@pytest.mark.parametrize("backend", [cgroups_v1, cgroups_v2])
def test_the_largest_limits_fit_into_a_request_to_the_spawner(backend: Any) -> None:
    limits = CgroupLimits(
        memory_bytes=MAXIMUM_MEMORY_BYTES, cpus=1023.5, pids=MAXIMUM_PIDS, cpu_quota=True
    )
    texts = backend.limit_texts(limits)
    size = sum(len(file) + len(text) + 3 for _, file, text in texts)
    assert size <= protocol.LIMIT_TEXTS_BYTES


def test_v2_out_of_memory_notices_name_the_sandboxes_whose_count_rose(tmp_path: Path) -> None:
    """Plain files: real inotify, with the test as the one who changes ``memory.events``."""
    watch = cgroups_v2.InotifyOomWatch()
    events = {}
    for local in ("first", "second", "gone"):
        (tmp_path / local).mkdir()
        events[local] = tmp_path / local / "memory.events"
        events[local].write_text("low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0\n")
        watch.add(local, str(tmp_path / local))
    assert watch.read() == []
    events["first"].write_text("low 0\nhigh 0\nmax 9\noom 1\noom_kill 2\noom_group_kill 1\n")
    events["second"].write_text("low 0\nhigh 0\nmax 9\noom 0\noom_kill 0\noom_group_kill 0\n")
    events["gone"].write_text("oom_kill 1\n")
    events["gone"].unlink()
    assert watch.read() == ["first"]
    assert watch.read() == []
    watch.discard("first")
    watch.discard("first")
    events["first"].write_text("oom_kill 3\n")
    assert watch.read() == []
    watch.close()
    watch.close()
