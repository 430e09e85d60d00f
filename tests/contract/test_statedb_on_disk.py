"""A StateDB on the disk: its format, copies, damage, and who has it open."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rocksdict import Options, Rdict

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.statedb import StateDB, repair, restore
from dsec_common.testing.clock import FakeClock
from statedb_world import put_all


def read_all(database: StateDB, name: str, count: int) -> None:
    for number in range(count):
        database.namespace(name).get(f"key-{number:05}")


def changed_table(directory: Path, *, changed: bool = True) -> Path:
    """Return the oldest file of a database, with one bit changed."""
    table = min(directory.glob("*.sst"))
    content = bytearray(table.read_bytes())
    content[len(content) // 2] ^= changed
    table.unlink()  # a checkpoint's is the database's own
    table.write_bytes(content)
    return table


async def test_a_checkpoint_is_of_one_moment_and_restores_elsewhere(
    database: StateDB, tmp_path: Path, clock: FakeClock
) -> None:
    put_all(database, "a", 1000)
    space = database.namespace("a")
    held = space.snapshot()
    undone = space.put("key-00000", b"undone")
    space.rollback(held)
    await database.checkpoint(tmp_path / "checkpoints" / "1")
    space.put("key-00000", b"later")
    await restore(tmp_path / "checkpoints" / "1", tmp_path / "restored")
    clock.jump(-10_000)
    async with StateDB(tmp_path / "restored", clock=clock) as restored:
        again = restored.namespace("a")
        assert again.get("key-00000") == b"0"
        assert again.snapshots == (held,)
        assert again.put("k", b"") > undone
        assert await restored.verify() == 1002
    for target in (tmp_path / "checkpoints" / "1", tmp_path / "restored"):
        with pytest.raises(DsecError) as refused:
            await database.checkpoint(target)
        assert refused.value.code is ErrorCode.CONFLICT
    with pytest.raises(DsecError) as refused:
        await restore(tmp_path / "checkpoints" / "1", tmp_path / "restored")
    assert refused.value.code is ErrorCode.CONFLICT


@pytest.mark.parametrize("how", ["changed", "shorter", "missing", "no list"])
async def test_a_damaged_checkpoint_is_refused_and_leaves_nothing(
    database: StateDB, tmp_path: Path, how: str
) -> None:
    put_all(database, "a", 1000)
    await database.checkpoint(tmp_path / "checkpoint")
    table = changed_table(tmp_path / "checkpoint", changed=how == "changed")
    if how == "shorter":
        os.truncate(table, table.stat().st_size - 1)
    elif how == "missing":
        table.unlink()
    elif how == "no list":
        (tmp_path / "checkpoint" / "checkpoint.json").unlink()
    with pytest.raises(DsecError) as refused:
        await restore(tmp_path / "checkpoint", tmp_path / "restored")
    wanted = ErrorCode.INVALID if how == "no list" else ErrorCode.INTERNAL
    assert refused.value.code is wanted
    assert set(os.listdir(tmp_path)) == {"checkpoint", "db"}  # noqa: PTH208  not async's business


async def test_damage_is_an_error_and_repair_keeps_the_rest(tmp_path: Path) -> None:
    async with StateDB(tmp_path / "db") as database:
        put_all(database, "a", 1000)
        await database._engine.job(lambda it: it.flush())
        put_all(database, "b", 1000)
        await database._engine.job(lambda it: it.flush())
    table = changed_table(tmp_path / "db")
    async with StateDB(tmp_path / "db") as database:
        with pytest.raises(DsecError) as refused:
            read_all(database, "a", 1000)
        assert (refused.value.code, refused.value.details) == (
            ErrorCode.INTERNAL,
            {"damaged": True},
        )
        with pytest.raises(DsecError):
            await database.verify()
        assert database.namespace("b").get("key-00999") == b"999"
    os.truncate(table, 200)
    await repair(tmp_path / "db")
    async with StateDB(tmp_path / "db") as database:
        assert database.namespace("b").get("key-00999") == b"999"
        assert database.namespace("a").get("key-00000") is None
        assert await database.verify() == 1000


def paths_of(directory: Path) -> list[Path]:
    """Return the same directory in several ways, one of them from where this process is."""
    (directory.parent / "link").symlink_to(directory)
    (directory.parent / "beside").mkdir()
    os.chdir(directory.parent)
    return [directory, Path("db"), directory.parent / "link", directory.parent / "beside/../db"]


def said_by_another_process(directory: Path) -> str:
    """Return what another process says that opens a StateDB; nothing when it may."""
    program = "import pathlib, sys; from dsec_common.statedb import StateDB; "
    program += "StateDB(pathlib.Path(sys.argv[1]))"
    words = [sys.executable, "-c", program, str(directory)]
    return subprocess.run(words, check=False, stderr=subprocess.PIPE, text=True).stderr


async def test_it_is_open_once_by_whatever_path(
    database: StateDB, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in paths_of(tmp_path / "db"):
        for opening in (asyncio.to_thread(StateDB, path), repair(path)):
            with pytest.raises(DsecError, match="open already") as refused:
                await opening
            assert refused.value.code is ErrorCode.UNAVAILABLE
    # What was refused has not let go of the lock that keeps other processes out.
    assert "open already" in said_by_another_process(tmp_path / "db")
    database.namespace("a").put("k", b"v")


async def test_after_its_end_every_call_says_so_and_it_can_be_opened_again(
    tmp_path: Path,
) -> None:
    database = StateDB(tmp_path / "db")
    space = database.namespace("a")
    space.put("k", b"v")
    await database.close()
    await database.close()
    for attempt in (
        lambda: space.put("k", b""),
        lambda: space.get("k"),
        space.scan,
        lambda: space.write({"k": b""}),
        space.snapshot,
        database.namespaces,
    ):
        with pytest.raises(DsecError, match="is closed") as refused:
            attempt()
        assert refused.value.code is ErrorCode.UNAVAILABLE
    with pytest.raises(DsecError, match="is closed"):
        await database.sync()
    async with StateDB(tmp_path / "db") as again:
        assert again.namespace("a").get("k") == b"v"


async def test_an_end_waits_for_what_is_under_way(tmp_path: Path) -> None:
    database = StateDB(tmp_path / "db")
    put_all(database, "a", 100)
    checkpoint = asyncio.create_task(database.checkpoint(tmp_path / "checkpoint"))
    await asyncio.sleep(0)
    await database.close()
    await checkpoint
    await restore(tmp_path / "checkpoint", tmp_path / "restored")


#: What format 1 looks like; it can never change.
FORMAT_1 = {
    "68": "00000001",
    "6d726f6c6c6f757400": "018bcfe568320000",
    "73726f6c6c6f757400018bcfe568000001": "",
    "62726f6c6c6f757400018bcfe568000004": "018bcfe568000001",
    "64726f6c6c6f7574007374657000fe74301a97ffffff01": "31",
    "64726f6c6c6f7574007374657000fe74301a97fffffc01": "756e646f6e65",
    "64726f6c6c6f757400c3bc00fe74301a97fffffd02": "0000018bcfe56c0076",
    "64726f6c6c6f757400676f6e6500fe74301a97fffffa00": "",
}


async def test_state_of_an_older_version_is_read(tmp_path: Path, clock: FakeClock) -> None:
    written = Rdict(str(tmp_path / "db"), Options(raw_mode=True))
    for key, value in FORMAT_1.items():
        written[bytes.fromhex(key)] = bytes.fromhex(value)
    written.close()
    async with StateDB(tmp_path / "db", clock=clock) as database:
        space = database.namespace("rollout")
        assert space.get("step") == b"1"
        assert space.get("ü") is None  # a rollback undid it
        (held,) = space.snapshots
        assert held == 0x018BCFE568000001
        assert space.put("step", b"2") > 0x018BCFE568320000
        entry = space.entry("gone")
        assert entry is not None
        assert entry.value is None


async def test_state_of_this_version_is_written_as_format_1(
    tmp_path: Path, clock: FakeClock
) -> None:
    database = StateDB(tmp_path / "db", clock=clock)
    space = database.namespace("rollout")
    space.put("step", b"1")
    held = space.snapshot()
    space.put("ü", b"v", ttl_s=1.024)
    space.put("step", b"undone")
    space.rollback(held)
    space.delete("gone")
    database._engine.close_now()
    raw = Rdict(str(tmp_path / "db"), Options(raw_mode=True))
    stored = {key.hex(): value.hex() for key, value in raw.items() if isinstance(key, bytes)}
    raw.close()
    assert stored == FORMAT_1


async def test_state_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    written = Rdict(str(tmp_path / "db"), Options(raw_mode=True))
    written[b"h"] = (2).to_bytes(4, "big")
    written.close()
    for _ in range(2):
        with pytest.raises(DsecError, match="newer version") as refused:
            StateDB(tmp_path / "db")
        assert refused.value.code is ErrorCode.UNSUPPORTED


async def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    written = Rdict(str(tmp_path / "db"), Options(raw_mode=True))
    written[b"sandbox|a"] = b""
    written.close()
    with pytest.raises(DsecError, match="something else") as refused:
        StateDB(tmp_path / "db")
    assert refused.value.code is ErrorCode.INVALID
    Rdict(str(tmp_path / "db"), Options(raw_mode=True)).close()  # and let go of
