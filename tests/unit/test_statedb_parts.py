"""The parts of the StateDB that need no disk: prefixes, memory, branches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsec_common.errors import DsecError
from dsec_common.statedb import KeyPrefix, shard_of
from dsec_common.statedb.keys import LAST_VERSION
from dsec_common.statedb.lineage import Lineage
from dsec_common.statedb.memory import usable_memory_bytes, write_buffer_bytes

MIB = 1024 * 1024


def test_a_prefix_spreads_keys_evenly_and_always_alike() -> None:
    prefix = KeyPrefix("{agent_type}_{shard_id}", "coder", shards=10)
    assert prefix.key("ü") == "coder_9/ü"
    keys = [prefix.key(f"memory/{number}") for number in range(10_000)]
    shares = [sum(key.startswith(it) for key in keys) for it in prefix.prefixes]
    assert sum(shares) == len(keys)
    assert all(800 < share < 1200 for share in shares)
    assert KeyPrefix("{agent_type}", "coder").prefixes == ("coder/",)
    assert KeyPrefix("s{shard_id}", "coder", shards=11).prefixes[2] == "s02/"


@pytest.mark.parametrize(
    "template",
    ["{agent}", "{}", "{0}", "{agent_type", "{agent_type!r}", "{shard_id:x}", "{shard_id}" * 2],
)
def test_a_prefix_that_names_anything_else_is_refused(template: str) -> None:
    with pytest.raises(DsecError, match="prefix"):
        KeyPrefix(template, "coder", shards=2)


@pytest.mark.parametrize(
    ("template", "shards"), [("a", 2), ("{shard_id}", 0), ("{shard_id}", 4097)]
)
def test_shards_that_cannot_be_told_apart_or_counted_are_refused(
    template: str, shards: int
) -> None:
    with pytest.raises(DsecError, match="shards"):
        KeyPrefix(template, "coder", shards=shards)
    if shards != 2:
        with pytest.raises(DsecError):
            shard_of("k", shards)


def test_the_write_buffer_is_a_part_of_memory_within_bounds() -> None:
    assert write_buffer_bytes(1000 * MIB) == 150 * MIB
    assert write_buffer_bytes(MIB) == 8 * MIB
    assert write_buffer_bytes(1 << 50) == 512 * MIB


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/a/b", "a/memory.max"),
        ("0::/a/b", "a/b/memory.max"),
        ("4:memory:/a", "memory/a/memory.limit_in_bytes"),
    ],
)
def test_memory_is_the_least_that_the_cgroups_allow(tmp_path: Path, line: str, file: str) -> None:
    limit = tmp_path / "cgroups" / file
    limit.parent.mkdir(parents=True)
    limit.write_text("67108864\n")
    (tmp_path / "cgroups" / "memory.max").write_text("max\n")
    (tmp_path / "cgroup").write_text(f"3:cpu:/x\n{line}\n")
    assert usable_memory_bytes(tmp_path, tmp_path / "cgroups") == 64 * MIB


def test_without_cgroups_memory_is_the_machines(tmp_path: Path) -> None:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert usable_memory_bytes(tmp_path, tmp_path) == machine


def test_rollbacks_to_one_snapshot_leave_one_gap_however_many_they_are() -> None:
    lineage = Lineage({}, [5])
    for version in range(10, 1000, 10):
        rollback = lineage.rolling_back(5, version)
        lineage.roll_back(rollback)
        assert lineage.branches == {version: 5}
    assert lineage.now == ([0, 990], [5, LAST_VERSION])


def test_branches_read_from_the_disk_are_those_that_were_made() -> None:
    lineage = Lineage({}, [5, 8])
    for snapshot, version in ((5, 10), (8, 20), (5, 30), (8, 40)):
        lineage.roll_back(lineage.rolling_back(snapshot, version))
        lineage.hold(version + 2)
        again = Lineage(lineage.branches, lineage.snapshots)
        assert again.now == lineage.now
        assert again.branches == lineage.branches
        for held in lineage.snapshots:
            assert again.at(held) == lineage.at(held)
            assert again.releasing(held) == lineage.releasing(held)
    assert lineage.at(22) == ([0, 20], [8, 22])
    assert lineage.at(22).at_most(19) == 8
    assert lineage.at(22).agrees_until(lineage.at(12)) == 5
