"""A StateDB by a clock that tests turn."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec_common.statedb import StateDB
from dsec_common.testing.clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    """A clock that stands still."""
    return FakeClock()


@pytest.fixture
async def database(tmp_path: Path, clock: FakeClock) -> AsyncIterator[StateDB]:
    """An empty StateDB that counts every operation."""
    async with StateDB(tmp_path / "db", clock=clock, count_one_of=1) as opened:
        yield opened


def put_all(database: StateDB, name: str, count: int) -> None:
    """Put ``key-00000`` and so on."""
    for number in range(count):
        database.namespace(name).put(f"key-{number:05}", b"%d" % number)
