"""What goes on over several requests is shared, bounded, remembered when it failed, and ended."""

from __future__ import annotations

import asyncio

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.testing.clock import FakeClock
from dsec_sandboxd.file_sessions import Key, Sessions


class _Thing:
    def __init__(self) -> None:
        self.ended = False

    async def end(self) -> None:
        self.ended = True


def sessions(clock: FakeClock) -> Sessions[_Thing]:
    return Sessions("things", clock, per_sandbox=2, per_node=6, idle_s=10.0)


def key(name: str, local: str = "s1", project: str = "p") -> Key:
    return project, local, name


async def make() -> _Thing:
    return _Thing()


async def test_requests_that_come_together_share_one_session() -> None:
    kept = sessions(FakeClock())
    first, second = await asyncio.gather(kept.use(key("a"), make), kept.use(key("a"), make))
    assert first is second


async def test_there_are_only_so_many_and_one_project_has_half() -> None:
    kept = sessions(FakeClock())
    for name, local in (("a", "s1"), ("b", "s1"), ("a", "s2")):
        await kept.use(key(name, local), make)
    for full in (key("c", "s1"), key("a", "s3")):
        with pytest.raises(DsecError) as caught:
            await kept.use(full, make)
        assert (caught.value.code, caught.value.retryable) == (ErrorCode.EXHAUSTED, True)
    await kept.use(key("a", "s4", "other"), make)


async def test_late_pieces_of_what_failed_hear_the_same_and_begin_nothing() -> None:
    kept = sessions(FakeClock())
    thing = await kept.use(key("a"), make)
    full = DsecError(ErrorCode.EXHAUSTED, "full")
    told = await kept.fail(key("a"), full)
    assert (told.retryable, thing.ended, len(kept)) == (False, True, 0)
    with pytest.raises(DsecError, match="full"):
        await kept.use(key("a"), make)


async def test_what_could_not_begin_may_be_tried_again() -> None:
    kept = sessions(FakeClock())

    async def refuse() -> _Thing:
        raise DsecError(ErrorCode.UNAVAILABLE, "not now")

    with pytest.raises(DsecError, match="not now"):
        await kept.use(key("a"), refuse)
    assert len(kept) == 0
    await kept.use(key("a"), make)


async def test_idle_sessions_end_and_busy_ones_do_not() -> None:
    clock = FakeClock()
    kept = sessions(clock)
    idle, busy = await kept.use(key("a"), make), await kept.use(key("b"), make)
    kept.rest(key("a"))
    await kept.remove_idle()
    assert not idle.ended
    await clock.advance(11.0)
    await kept.remove_idle()
    assert (idle.ended, busy.ended) == (True, False)
    kept.rest(key("b"))
    await kept.sandbox_ending("s2")
    assert not busy.ended
    await kept.sandbox_ending("s1")
    assert busy.ended
