"""One sandbox's output cannot fill the node's store: each has a part of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_sandboxd.exec_log import ExecLog
from dsec_sandboxd.exec_share import SHARE_PART
from dsec_sandboxd.exec_store import ExecMeta, ExecStore
from dsec_sandboxd.kernel.interface import Stream

MIB = 1 << 20
STORE_BYTES = 16 * MIB
PIECE = b"y\n" * 16_384


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ExecStore]:
    if os.geteuid() != 0:
        pytest.skip("the store mounts a tmpfs of its own")
    store = ExecStore(tmp_path / "execs", size_bytes=STORE_BYTES, output_bytes=MIB)
    store.open()
    yield store
    store.close()


def begin(store: ExecStore, local: str, number: int, *, one_shot: bool = False) -> ExecLog:
    meta = ExecMeta(
        exec_id=f"e{number}",
        message_id=f"m{number}",
        one_shot=one_shot,
        argv=("yes",),
        cwd="/",
        user="0",
        started_at=0.0,
        limit_bytes=MIB,
    )
    store.make(local, meta)
    return store.log(local, meta)


def print_into(log: ExecLog, size_bytes: int) -> None:
    """Have a command print so much."""
    reading, writing = os.pipe()
    try:
        for _ in range(size_bytes // len(PIECE)):
            os.write(writing, PIECE)
            log.take(Stream.STDOUT, reading)
    finally:
        os.close(reading)
        os.close(writing)


def on_disk(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*"))


@pytest.mark.parametrize("one_shot", [False, True])
def test_a_sandbox_that_prints_without_end_keeps_its_part_and_no_more(
    store: ExecStore, *, one_shot: bool
) -> None:
    logs = [begin(store, "hog", number, one_shot=one_shot) for number in range(20)]
    for _ in range(3):
        for log in logs:
            print_into(log, 2 * MIB)
    assert on_disk(store.root / "hog") <= STORE_BYTES // SHARE_PART + MIB
    assert all(log.truncated[Stream.STDOUT] for log in logs)
    beside = begin(store, "neighbour", 1)
    print_into(beside, MIB)
    assert not beside.truncated[Stream.STDOUT]
    assert beside.streams[Stream.STDOUT].kept() == PIECE * (MIB // len(PIECE))
    for log in (*logs, beside):
        log.close()


def test_what_is_forgotten_makes_room_for_the_sandboxs_next(store: ExecStore) -> None:
    logs = {number: begin(store, "a", number) for number in range(4)}
    for log in logs.values():
        print_into(log, 2 * MIB)
        log.close()
    forgotten = []

    def make_room(local: str, others: bool) -> bool:
        assert (local, others) == ("a", False)
        if not logs:
            return False
        number, _ = logs.popitem()
        forgotten.append(number)
        store.remove("a", f"e{number}")
        return True

    store.make_room = make_room
    newest = begin(store, "a", 9)
    print_into(newest, MIB)
    assert forgotten
    assert not newest.truncated[Stream.STDOUT]
    newest.close()


def test_a_log_that_is_opened_again_is_counted_once(store: ExecStore) -> None:
    log = begin(store, "a", 1)
    print_into(log, MIB)
    log.close()
    for _ in range(10):
        begin_again = store.log("a", store.load("a")[0])
        assert len(begin_again.streams[Stream.STDOUT].kept()) == MIB
        begin_again.close()
    other = begin(store, "a", 2)
    print_into(other, MIB // 2)
    assert not other.truncated[Stream.STDOUT]
    other.close()
