"""Puts, gets and batches of the StateDB beside bare RocksDB; snapshots and rollbacks by size.

Both databases are in the same directory with the same options and hold 1,000,000 values of 200
bytes in files (none in memory), ours after 100 rollbacks, each of which undid a write. They take
turns with the same keys in random order. The peer is rocksdict in raw mode with nothing around it:
no versions, no snapshots, no bounds.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from rocksdict import Rdict, WriteBatch

from benchmarks.report import Options, Reach, Report, median, percentile
from dsec_common.statedb import Namespace, StateDB
from dsec_common.statedb.engine import options as database_options
from dsec_common.statedb.memory import usable_memory_bytes, write_buffer_bytes

LARGE: Final = 1_000_000
SMALL: Final = 1_000
ROLLBACKS: Final = 100
VALUE_BYTES: Final = 200
BATCH: Final = 100
_TURN: Final = 200
_PER_ROUND: Final = 10_000
_SOURCE: Final = random.Random(0)  # noqa: S311  it must be repeatable
_NOISE: Final = _SOURCE.randbytes(100_000)


class Work(NamedTuple):
    """The same keys and values for both."""

    keys: list[str]
    stored: list[bytes]
    values: list[bytes]


class Times(NamedTuple):
    """Seconds of one turn of ours and of the peer, the median of many."""

    ours: float
    bare: float

    @property
    def ratio(self) -> float:
        """How fast ours is in relation to the peer."""
        return self.bare / self.ours


def work(count: int) -> Work:
    """Return random keys with values, each an object of its own, as requests bring them."""
    names = [f"key-{number:07}" for number in _SOURCE.choices(range(LARGE), k=count)]
    values = [value_of(number) for number in _SOURCE.choices(range(LARGE), k=count)]
    return Work(names, [name.encode() for name in names], values)


def value_of(number: int) -> bytes:
    """Return 200 bytes that do not compress."""
    start = number * 37 % (len(_NOISE) - VALUE_BYTES)
    return _NOISE[start : start + VALUE_BYTES]


def timed(action: Callable[[], Any]) -> float:
    """Return the seconds that an action takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def put_ours(space: Namespace, turn: Work) -> None:
    """Put each value."""
    for key, value in zip(turn.keys, turn.values, strict=True):
        space.put(key, value)


def put_bare(database: Rdict, turn: Work) -> None:
    """Do the same with the peer."""
    for key, value in zip(turn.stored, turn.values, strict=True):
        database[key] = value


def get_ours(space: Namespace, turn: Work) -> None:
    """Get each value."""
    for key in turn.keys:
        space.get(key)


def get_bare(database: Rdict, turn: Work) -> None:
    """Do the same with the peer."""
    for key in turn.stored:
        database.get(key)


def batch_ours(space: Namespace, turn: Work) -> None:
    """Write the values a hundred at a time."""
    for start in range(0, len(turn.keys), BATCH):
        end = start + BATCH
        space.write(dict(zip(turn.keys[start:end], turn.values[start:end], strict=True)))


def batch_bare(database: Rdict, turn: Work) -> None:
    """Do the same with the peer."""
    for start in range(0, len(turn.stored), BATCH):
        end = start + BATCH
        batch = WriteBatch(raw_mode=True)
        for key, value in zip(turn.stored[start:end], turn.values[start:end], strict=True):
            batch.put(key, value)
        database.write(batch)


def one_round(
    ours: Callable[[Namespace, Work], None],
    bare: Callable[[Rdict, Work], None],
    space: Namespace,
    peer: Rdict,
    count: int,
) -> Times:
    """Let both do the same in turns so short that what else runs here leaves most alone."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(max(1, count // _TURN)):
        turn = work(_TURN)
        turns = [(0, lambda turn=turn: ours(space, turn)), (1, lambda turn=turn: bare(peer, turn))]
        for index, action in turns if number % 2 else turns[::-1]:
            times[index].append(timed(action))
    return Times(*map(median, times))


def fill(space: Namespace, peer: Rdict | None, count: int) -> None:
    """Put all keys."""
    for start in range(0, count, BATCH):
        numbers = range(start, min(start + BATCH, count))
        puts = {f"key-{number:07}": value_of(number) for number in numbers}
        space.write(puts)
        if peer is not None:
            batch = WriteBatch(raw_mode=True)
            for key, value in puts.items():
                batch.put(key.encode(), value)
            peer.write(batch)


def in_files(database: Rdict) -> None:
    """Leave nothing in memory."""
    database.flush()
    database.compact_range(None, None)


def roll_back_often(space: Namespace, count: int) -> tuple[list[float], list[float]]:
    """Undo single writes; return the seconds of each snapshot and of each rollback."""
    snapshots, rollbacks = [], []
    for turn in (work(1) for _ in range(count)):
        started = time.perf_counter()
        held = space.snapshot()
        snapshots.append(time.perf_counter() - started)
        space.put(turn.keys[0], b"undone")
        started = time.perf_counter()
        space.rollback(held)
        rollbacks.append(time.perf_counter() - started)
        space.release(held)
    return snapshots, rollbacks


async def run(options: Options) -> Report:
    """Measure ours and the peer in turns."""
    count = options.count or _PER_ROUND
    buffer_bytes = write_buffer_bytes(usable_memory_bytes())
    with tempfile.TemporaryDirectory(prefix="dsec-statedb-") as name:
        directory = Path(name)
        peer = Rdict(str(directory / "bare"), database_options(buffer_bytes))
        async with StateDB(directory / "ours") as database:
            large, small = database.namespace("large"), database.namespace("small")
            fill(small, None, SMALL)
            fill(large, peer, LARGE)
            of_small = roll_back_often(small, ROLLBACKS)
            of_large = roll_back_often(large, ROLLBACKS)
            await database._engine.job(in_files)  # noqa: SLF001  what the peer is put into, too
            in_files(peer)
            gets = [
                one_round(get_ours, get_bare, large, peer, count) for _ in range(options.rounds)
            ]
            puts, batches = [], []
            for _ in range(options.rounds):
                puts.append(one_round(put_ours, put_bare, large, peer, count))
                batches.append(one_round(batch_ours, batch_bare, large, peer, count))
        peer.close()
    return report((puts, gets, batches), of_small, of_large)


def report(
    turns: tuple[list[Times], list[Times], list[Times]],
    of_small: tuple[list[float], list[float]],
    of_large: tuple[list[float], list[float]],
) -> Report:
    """Return what was measured; ``turns`` are puts, gets and batches."""
    put, get, batch = (median(it.ratio for it in times) for times in turns)
    p50_ms = {
        f"{what}_{size}_p50_ms": 1e3 * percentile(times, 0.5)
        for size, both in (("1k", of_small), ("1m", of_large))
        for what, times in zip(("snapshot", "rollback"), both, strict=True)
    }
    operations = {
        f"{who}{what}_us": 1e6 * median(getattr(it, side) for it in times) / (_TURN / size)
        for (what, size), times in zip(
            (("put", 1), ("get", 1), ("batch", BATCH)), turns, strict=True
        )
        for who, side in (("", "ours"), ("bare_", "bare"))
    }
    return Report(
        name="statedb",
        figures={"keys": LARGE, "rollbacks": ROLLBACKS, **operations, **p50_ms},
        ratios={
            "put_to_bare": put,
            "get_to_bare": get,
            "batch_to_bare": batch,
            "rollback_1m_to_1k": p50_ms["rollback_1m_p50_ms"] / p50_ms["rollback_1k_p50_ms"],
        },
        reach=(
            Reach.at_least("put_to_bare", put, 0.5),
            Reach.at_least("get_to_bare", get, 0.4),
            Reach.at_least("batch_to_bare", batch, 0.6),
            *(Reach.at_most(name, value, 0.2) for name, value in p50_ms.items()),
        ),
    )
