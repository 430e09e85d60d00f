"""What a command printed: kept in order, mended after a crash, bounded; work per moment bounded."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from dsec.session import _Capture
from dsec_sandboxd.exec_flow import Flow
from dsec_sandboxd.exec_log import TAKE_BYTES, ExecLog, Nowhere
from dsec_sandboxd.exec_store import ExecStore, JournalEntry
from dsec_sandboxd.kernel.interface import Stream

KIB = 1024


class Place:
    """A directory on a tmpfs, a pipe for each stream, and logs over them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.nowhere = Nowhere()
        self.pipes = {stream: os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) for stream in Stream}
        self.logs: list[ExecLog] = []

    def log(self, *, limit_bytes: int = 1 << 20, ordered: bool = True) -> ExecLog:
        made = ExecLog(
            self.directory,
            limit_bytes=limit_bytes,
            nowhere=self.nowhere,
            make_room=lambda: False,
            ordered=ordered,
        )
        self.logs.append(made)
        return made

    def print(self, log: ExecLog, data: bytes, stream: Stream = Stream.STDOUT) -> None:
        reading, writing = self.pipes[stream]
        for at in range(0, len(data), TAKE_BYTES):
            os.write(writing, data[at : at + TAKE_BYTES])
            log.take(stream, reading)

    def close(self) -> None:
        for log in self.logs:
            log.close()
        self.nowhere.close()
        for pair in self.pipes.values():
            for descriptor in pair:
                os.close(descriptor)


@pytest.fixture
def place() -> Iterator[Place]:
    with TemporaryDirectory(dir="/dev/shm", prefix="dsec-log-") as directory:
        made = Place(Path(directory))
        yield made
        made.close()


def read_all(log: ExecLog, after: int = 0) -> list[tuple[int, str, bytes]]:
    return [(piece.seq, piece.stream.value, piece.data) for piece in log.read(after, 1 << 30)]


def test_pieces_keep_their_order_and_numbers(place: Place) -> None:
    log = place.log()
    place.print(log, b"one")
    place.print(log, b"two", Stream.STDERR)
    place.print(log, b"three")
    expected = [(1, "stdout", b"one"), (2, "stderr", b"two"), (3, "stdout", b"three")]
    assert read_all(log) == expected
    assert read_all(log, after=2) == expected[2:]
    assert (log.first_seq(), log.last_seq) == (1, 3)


def test_a_log_opened_again_is_the_same(place: Place) -> None:
    first = place.log()
    place.print(first, b"one")
    place.print(first, b"two", Stream.STDERR)
    first.close()
    again = place.log()
    place.print(again, b"three")
    assert [data for _, _, data in read_all(again)] == [b"one", b"two", b"three"]


def test_what_a_dying_daemon_took_and_did_not_index_is_found(place: Place) -> None:
    first = place.log()
    place.print(first, b"indexed")
    reading, writing = place.pipes[Stream.STDERR]
    os.write(writing, b"taken")
    # The daemon died between the two lines of ExecLog.take.
    first.streams[Stream.STDERR].take(reading)
    first.close()
    again = place.log()
    assert read_all(again) == [(1, "stdout", b"indexed"), (2, "stderr", b"taken")]


def test_an_index_that_was_cut_short_is_mended(place: Place) -> None:
    first = place.log()
    place.print(first, b"one")
    place.print(first, b"two")
    first.close()
    os.truncate(place.directory / "index", 16 + 7)
    again = place.log()
    assert read_all(again) == [(1, "stdout", b"one"), (2, "stdout", b"two")]


def test_the_oldest_pieces_go_and_the_numbers_stay(place: Place) -> None:
    log = place.log(limit_bytes=256 * KIB)
    for number in range(40):
        place.print(log, bytes([number]) * TAKE_BYTES)
    first = log.first_seq()
    assert first > 1
    pieces = read_all(log)
    assert [seq for seq, _, _ in pieces] == list(range(first, 41))
    assert all(data == bytes([seq - 1]) * TAKE_BYTES for seq, _, data in pieces)
    assert sum(len(data) for _, _, data in pieces) >= 256 * KIB
    assert log.truncated == {Stream.STDOUT: True, Stream.STDERR: False}
    blocks = sum(path.stat().st_blocks * 512 for path in place.directory.iterdir())
    assert blocks < 1 << 20
    log.close()
    again = place.log(limit_bytes=256 * KIB)
    assert (again.first_seq(), again.last_seq) == (first, 40)
    assert again.truncated[Stream.STDOUT]


def test_a_one_shots_log_keeps_the_beginning(place: Place) -> None:
    log = place.log(limit_bytes=100, ordered=False)
    place.print(log, b"x" * 60)
    place.print(log, b"y" * 60)
    place.print(log, b"z" * 60)
    assert log.streams[Stream.STDOUT].kept() == b"x" * 60 + b"y" * 40
    assert log.truncated[Stream.STDOUT]
    assert not log.truncated[Stream.STDERR]
    with pytest.raises(BlockingIOError):
        log.take(Stream.STDOUT, place.pipes[Stream.STDOUT][0])


def test_a_full_tmpfs_drops_output_and_never_blocks_the_command(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = place.log()
    splice = os.splice

    def full(source: int, target: int, size: int, **more: int) -> int:
        if "offset_dst" in more:
            raise OSError(errno.ENOSPC, "No space left on device")
        return splice(source, target, size, **more)

    monkeypatch.setattr(os, "splice", full)
    place.print(log, b"lost")
    with pytest.raises(BlockingIOError):
        log.take(Stream.STDOUT, place.pipes[Stream.STDOUT][0])
    assert log.truncated[Stream.STDOUT]
    monkeypatch.undo()
    place.print(log, b"kept")
    assert [data for _, _, data in read_all(log)] == [b"kept"]


async def test_whoever_comes_late_in_a_moment_has_its_turn_in_the_next() -> None:
    flow = Flow(window_bytes=100, window_s=0.01)
    assert flow.spend(60)
    assert not flow.spend(60)
    turn = asyncio.Event()
    flow.later(turn.set)
    assert not flow.spend(1)
    async with asyncio.timeout(20):
        await turn.wait()
    assert flow.spend(60)
    flow.close()


def test_the_journal_survives_a_line_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory(dir="/dev/shm", prefix="dsec-store-") as directory:
        monkeypatch.setattr(ExecStore, "_mount", lambda _: None)
        store = ExecStore(Path(directory), size_bytes=1 << 20, output_bytes=1 << 20)
        store.open()
        for number in range(3):
            store.note(JournalEntry("a", f"m{number}", number, 1.5, False, 0.0, 10))
        with (Path(directory) / "journal").open("ab") as journal:
            journal.write(b'["a","m3",3')
        assert [entry.message_id for entry in store.noted()] == ["m0", "m1", "m2"]
        store.close(keep=True)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_sessions_output_ends_at_its_word_however_it_is_cut(size: int) -> None:
    text = b"out\nno newline\nword 12 tricks\n\nword 7\n"
    capture = _Capture("word", 1000, with_status=True)
    for at in range(0, len(text), size):
        capture.feed(text[at : at + size])
    assert (bytes(capture.kept), capture.status) == (b"out\nno newline\nword 12 tricks\n", 7)
    assert capture.over


def test_a_sessions_output_is_bounded() -> None:
    capture = _Capture("word", 5, with_status=False)
    capture.feed(b"0123456789" * 100 + b"\nword\n")
    assert (bytes(capture.kept), capture.truncated, capture.over) == (b"01234", True, True)
