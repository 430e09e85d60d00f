"""Nothing written is lost with the process, and a power cut takes only the newest writes, whole."""

from __future__ import annotations

import asyncio
import random
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsec_common.errors import MAY_HAVE_HAPPENED, DsecError, ErrorCode
from dsec_common.statedb import Namespace, StateDB

WRITER = Path(__file__).resolve().parents[1] / "framework" / "statedb_writer.py"


def killed_after(directory: Path, first: int, lines: int) -> tuple[int, int]:
    """Let a process write, kill it, and return the last write and version that had returned."""
    process = subprocess.Popen(
        [sys.executable, str(WRITER), str(directory), str(first)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for _ in range(lines):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    told = process.stdout.read().splitlines()
    process.stdout.close()
    process.wait()
    whole = [line.split() for line in told[:-1]]
    last = whole[-1] if whole else [str(first + lines - 1), "0"]
    return int(last[0]), int(last[1])


def count_of(space: Namespace) -> int:
    """Return how many writes there are, each of them whole, the newest last."""
    steps = int(space.get("step") or b"0")
    found = 0
    after: str | None = "key-"
    while after is not None:
        page = space.scan("key-", after=after)
        for entry in page.entries:
            found += 1
            assert entry.key == f"key-{found:06}"
        after = page.after
    assert steps == found
    return found


async def test_what_was_written_survives_a_process_that_is_killed_at_any_moment(
    tmp_path: Path,
) -> None:
    chance = random.Random(7)  # noqa: S311  it must be repeatable
    written = 0
    for _ in range(4):
        last, version = killed_after(tmp_path / "db", written + 1, chance.randrange(1, 400))
        async with StateDB(tmp_path / "db") as database:
            space = database.namespace("rollout")
            if space.get("step") == b"undone":  # killed between a write and its rollback
                space.rollback(space.snapshots[-1])
            written = count_of(space)
            assert written >= last
            assert space.version >= version
            assert len(space.snapshots) in {written // 10, written // 10 - 1}
            for number in space.snapshots[-3:]:
                assert int(space.get("step", at=number) or b"") % 10 == 0


async def test_a_power_cut_takes_only_the_newest_writes_and_each_whole(tmp_path: Path) -> None:
    """The log is cut at every kind of place: within a record, between two, within a batch."""
    async with StateDB(tmp_path / "db") as database:
        space = database.namespace("rollout")
        for number in range(1, 301):
            space.write({"step": b"%d" % number, f"key-{number:06}": b"x" * 100})
            if number == 100:
                await database._engine.job(lambda it: it.flush())
            if number == 200:
                await database.sync()
                synced_bytes = newest_log(tmp_path / "db").stat().st_size
        version = space.version
        whole = newest_log(tmp_path / "db")
        size = whole.stat().st_size
        shutil.copytree(tmp_path / "db", tmp_path / "copy")
    chance = random.Random(11)  # noqa: S311  as above
    cuts = {0, 1, synced_bytes, size - 1, *(chance.randrange(size) for _ in range(20))}
    counts = []
    for cut in sorted(cuts):
        directory = tmp_path / f"cut-{cut}"
        shutil.copytree(tmp_path / "copy", directory)
        with (directory / whole.name).open("r+b") as log:
            log.truncate(cut)
        async with StateDB(directory) as database:
            space = database.namespace("rollout")
            counts.append(count_of(space))
            if cut >= synced_bytes:
                assert counts[-1] >= 200
            assert space.write({"step": b"1"}) > 0
            assert await database.verify() >= 2 * counts[-1] + 1
        shutil.rmtree(directory)
    assert counts == sorted(counts)
    assert counts[0] == 100
    assert 290 <= counts[-1] < 300
    assert version > 0


async def test_a_byte_of_the_log_that_changed_ends_what_is_read_of_it(tmp_path: Path) -> None:
    async with StateDB(tmp_path / "db") as database:
        for number in range(1, 101):
            database.namespace("rollout").write(
                {"step": b"%d" % number, f"key-{number:06}": b"x" * 100}
            )
        shutil.copytree(tmp_path / "db", tmp_path / "copy")
    log = newest_log(tmp_path / "copy")
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1
    log.write_bytes(content)
    async with StateDB(tmp_path / "copy") as database:
        assert 0 < count_of(database.namespace("rollout")) < 100


def put_for_ever(space: Namespace) -> None:
    while True:
        space.put("big", b"x" * 60_000)


def newest_log(directory: Path) -> Path:
    return max(directory.glob("*.log"))


async def test_a_full_disk_is_told_and_writes_go_on_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec_common.statedb.engine._REOPEN_PAUSE_S", 0.0)
    async with StateDB(tmp_path / "db") as database:
        space = database.namespace("rollout")
        space.put("k", b"before")
        held = space.snapshot()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            with pytest.raises(DsecError) as refused:
                put_for_ever(space)
            assert refused.value.code is ErrorCode.UNAVAILABLE
            assert refused.value.details[MAY_HAVE_HAPPENED] is True
            with pytest.raises(DsecError):
                space.rollback(held)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        given = space.version
        assert space.put("k", b"after") > given
        assert space.get("k") == b"after"
        space.rollback(held)
        assert (space.get("k"), space.get("big")) == (b"before", None)
    async with StateDB(tmp_path / "db") as database:
        space = database.namespace("rollout")
        assert (space.get("k"), space.snapshots) == (b"before", (held,))


async def test_writes_go_on_after_a_compaction_that_a_full_disk_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec_common.statedb.engine._REOPEN_PAUSE_S", 0.0)
    async with StateDB(tmp_path / "db") as database:
        put_often(database.namespace("rollout"))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            with pytest.raises(DsecError) as refused:
                await database.compact()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        # Whoever keeps the error keeps nothing open by it.
        assert refused.value.code is ErrorCode.UNAVAILABLE
        database.namespace("rollout").put("k", b"after")
        assert (await database.compact()).kept == 601


def put_often(space: Namespace) -> None:
    for turn in range(3):
        for number in range(600):
            space.put(f"key-{number:05}", b"%d" % turn)


async def test_a_compaction_cut_off_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    database = StateDB(tmp_path / "db")
    space = database.namespace("rollout")
    for turn in range(3):
        for number in range(600):
            space.put(f"key-{number:05}", b"%d" % turn)
        held = space.snapshot()
    space.put("key-00000", b"undone")
    space.rollback(held)
    compacting = asyncio.create_task(database.compact())
    for _ in range(4):
        await asyncio.sleep(0)
    compacting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await compacting
    database._engine.close_now()
    async with StateDB(tmp_path / "db") as database:
        space = database.namespace("rollout")
        for turn, number in enumerate(space.snapshots):
            assert {it.value for it in space.scan(at=number).entries} == {b"%d" % turn}
        assert {it.value for it in space.scan().entries} == {b"2"}
        assert (await database.compact()).kept == 1800
