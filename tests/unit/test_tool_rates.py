"""How often tools may be called: never more in any window, also after the daemon was killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.tools import Rate
from dsec_sandboxd.state_database import StateDatabase
from dsec_sandboxd.tools.rates import CallRates

TEN_A_MINUTE = Rate(count=10, window_s=60)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[StateDatabase]:
    opened = StateDatabase(tmp_path / "state")
    yield opened
    opened.close()


class Clock:
    """Turned by hand."""

    def __init__(self) -> None:
        self.now_s = 1e6

    def monotonic(self) -> float:
        return self.now_s


def passes(rates: CallRates, rate: Rate, local: str = "s1", tool: str = "http_client") -> bool:
    try:
        rates.take(local, tool, rate)
    except DsecError as error:
        if error.code is not ErrorCode.EXHAUSTED or not error.retry_after_s > 0:
            raise
        return False
    return True


def test_calls_pass_until_there_were_too_many_and_again_when_they_are_long_ago(
    database: StateDatabase,
) -> None:
    clock = Clock()
    rates = CallRates(database, clock.monotonic)
    assert [passes(rates, TEN_A_MINUTE) for _ in range(12)] == [True] * 10 + [False] * 2
    with pytest.raises(DsecError) as refused:
        rates.take("s1", "http_client", TEN_A_MINUTE)
    assert refused.value.retry_after_s <= TEN_A_MINUTE.window_s * 1.01
    clock.now_s += refused.value.retry_after_s + 0.001
    assert passes(rates, TEN_A_MINUTE)


def test_sandboxes_and_tools_have_counts_of_their_own(database: StateDatabase) -> None:
    rates = CallRates(database, Clock().monotonic)
    once = Rate(count=1, window_s=60)
    assert passes(rates, once)
    assert passes(rates, once, local="s2")
    assert passes(rates, once, tool="llm")
    assert not passes(rates, once)


def test_a_daemon_that_is_started_again_goes_on_counting(database: StateDatabase) -> None:
    clock = Clock()
    before = CallRates(database, clock.monotonic)
    for _ in range(7):
        before.take("s1", "http_client", TEN_A_MINUTE)
    after = CallRates(database, clock.monotonic)
    after.recovered({"s1"})
    assert [passes(after, TEN_A_MINUTE) for _ in range(4)] == [True] * 3 + [False]


async def test_what_is_kept_goes_with_its_sandbox(database: StateDatabase) -> None:
    rates = CallRates(database, Clock().monotonic)
    for local in ("s1", "s10", "s2"):
        rates.take(local, "http_client", TEN_A_MINUTE)
    await rates.sandbox_put_back("s1")
    await rates.sandbox_ending("s1")
    await rates.sandbox_ending("s1")
    assert [key for key, _ in database.items(b"tool|")] == [
        b"tool|s10|http_client",
        b"tool|s2|http_client",
    ]
    CallRates(database, Clock().monotonic).recovered({"s2"})
    assert [key for key, _ in database.items(b"tool|")] == [b"tool|s2|http_client"]


class Memory(dict[bytes, bytes]):
    """A database in memory, for many runs."""

    largest = 0

    def __setitem__(self, key: bytes, value: bytes) -> None:
        self.largest = max(self.largest, len(value))
        super().__setitem__(key, value)

    def items(self, from_key: bytes) -> Iterator[tuple[bytes, bytes]]:  # type: ignore[override]
        return iter(sorted(it for it in super().items() if it[0] >= from_key))


@given(
    count=st.sampled_from([0.5, 1.0, 3.0, 1000.0, 1e9]),
    window_s=st.sampled_from([1.0, 60.0, 86_400.0]),
    pauses=st.lists(st.floats(0, 0.3), min_size=1, max_size=60),
)
def test_no_window_ever_has_more_calls_than_the_rate(
    count: float, window_s: float, pauses: list[float]
) -> None:
    clock, kept = Clock(), Memory()
    rates, rate = CallRates(kept, clock.monotonic), Rate(count=count, window_s=window_s)
    calls = max(int(count), 1)
    whole_s = window_s * calls / count
    passed: list[float] = []
    for pause in pauses:
        clock.now_s += pause * whole_s
        if passes(rates, rate):
            passed.append(clock.now_s)
    for began in passed:
        assert sum(began <= at < began + whole_s - 1e-6 for at in passed) <= calls
    assert kept.largest < 4096
