"""Whatever is written, undone, held, let go, compacted or cut off: reads see what a model says."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dsec_common.statedb import Namespace, StateDB, compaction
from dsec_common.testing.clock import FakeClock

#: Names and keys that an encoding could take for parts of each other.
NAMES = ("run", "run\x01", "r")
KEYS = ("k", "k\x01", "kk", "k/1", "ü", "\U0001f600", "\x01")

CHANGES = ("put", "put", "delete", "snapshot", "roll back", "roll back", "release")

names = st.sampled_from(NAMES)
keys = st.sampled_from(KEYS)
values = st.binary(max_size=3)
State = dict[str, tuple[bytes, int]]


class Expected:
    """One namespace as it should be."""

    def __init__(self) -> None:
        self.state: State = {}
        self.held: dict[int, State] = {}
        self.newest = 0

    def seen(self, state: State, now_ms: int) -> dict[str, bytes]:
        return {
            key: value for key, (value, expires_ms) in state.items() if not 0 < expires_ms <= now_ms
        }


class Stored(RuleBasedStateMachine):
    """A StateDB and what it should hold."""

    @initialize()
    def begin(self) -> None:
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # nothing waits for a disk
        self.directory = Path(tempfile.mkdtemp(prefix="statedb-", dir=memory))
        self.clock = FakeClock()
        # So that something happens in the middle of a pass.
        self.short_steps = mock.patch.object(compaction, "_STEP", 2)
        self.short_steps.start()
        self.expected = {name: Expected() for name in NAMES}
        self.open()

    def open(self) -> None:
        self.database = StateDB(self.directory / "db", clock=self.clock, count_one_of=1)

    def space(self, name: str) -> Namespace:
        return self.database.namespace(name)

    def given(self, name: str, version: int) -> None:
        assert version > self.expected[name].newest
        assert version >= int(self.clock.now() * 1000) << 16
        self.expected[name].newest = version

    def expiry(self, ttl_s: float) -> int:
        return math.ceil((self.clock.now() + ttl_s) * 1000) if ttl_s else 0

    @rule(name=names, key=keys, value=values, ttl_s=st.sampled_from((0.0, 0.0, 2.0)))
    def put(self, name: str, key: str, value: bytes, ttl_s: float) -> None:
        self.given(name, self.space(name).put(key, value, ttl_s=ttl_s))
        self.expected[name].state[key] = value, self.expiry(ttl_s)

    @rule(name=names, key=keys)
    def delete(self, name: str, key: str) -> None:
        self.given(name, self.space(name).delete(key))
        self.expected[name].state.pop(key, None)

    @rule(
        name=names,
        puts=st.dictionaries(keys, values, min_size=1),
        deletes=st.sets(keys),
        ttl_s=st.sampled_from((0.0, 0.0, 2.0)),
    )
    def write(self, name: str, puts: dict[str, bytes], deletes: set[str], ttl_s: float) -> None:
        deletes -= puts.keys()
        self.given(name, self.space(name).write(puts, deletes, ttl_s=ttl_s))
        state = self.expected[name].state
        state |= {key: (value, self.expiry(ttl_s)) for key, value in puts.items()}
        for key in deletes:
            state.pop(key, None)

    @rule(name=names)
    def snapshot(self, name: str) -> None:
        expected = self.expected[name]
        number = self.space(name).snapshot()
        self.given(name, number)
        expected.held[number] = dict(expected.state)

    @precondition(lambda self: any(it.held for it in self.expected.values()))
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name in NAMES if self.expected[name].held]))
        expected = self.expected[name]
        number = data.draw(st.sampled_from([0, *expected.held, *expected.held]))
        self.given(name, self.space(name).rollback(number))
        expected.state = dict(expected.held.get(number, {}))

    @precondition(lambda self: any(it.held for it in self.expected.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name in NAMES if self.expected[name].held]))
        number = data.draw(st.sampled_from([*self.expected[name].held]))
        self.space(name).release(number)
        del self.expected[name].held[number]

    @rule(name=names)
    def compact(self, name: str) -> None:
        asyncio.run(self.database.compact(name))

    @rule(data=st.data(), changes=st.lists(st.sampled_from(CHANGES), min_size=1, max_size=6))
    def change_while_compacting(self, data: st.DataObject, changes: list[str]) -> None:
        async def both() -> None:
            compacting = asyncio.create_task(self.database.compact())
            for change in changes:
                for _ in range(data.draw(st.integers(1, 4))):
                    await asyncio.sleep(0)
                self.change(change, data)
            await compacting

        asyncio.run(both())

    def change(self, what: str, data: st.DataObject) -> None:
        if what == "put":
            self.put(data.draw(names), data.draw(keys), data.draw(values), 0.0)
        elif what == "delete":
            self.delete(data.draw(names), data.draw(keys))
        elif what == "snapshot":
            self.snapshot(data.draw(names))
        elif any(it.held for it in self.expected.values()):
            (self.roll_back if what == "roll back" else self.release)(data)

    @rule()
    def flush(self) -> None:
        asyncio.run(self.database._engine.job(lambda database: database.flush()))

    @rule(orderly=st.booleans())
    def open_again(self, orderly: bool) -> None:
        """As after a shutdown, or after a kill, which writes nothing more."""
        if orderly:
            asyncio.run(self.database.close())
        else:
            self.database._engine.close_now()
        self.open()

    @rule(seconds=st.sampled_from((0.0005, 0.7, 3.0)))
    def let_time_pass(self, seconds: float) -> None:
        self.clock.jump(seconds)

    @invariant()
    def everything_reads_as_expected(self) -> None:
        now_ms = int(self.clock.now() * 1000)
        for name in NAMES:
            space, expected = self.space(name), self.expected[name]
            assert space.snapshots == tuple(sorted(expected.held))
            views: list[tuple[int | None, State]] = [(None, expected.state), (0, {})]
            for at, state in [*views, *expected.held.items()]:
                seen = expected.seen(state, now_ms)
                page = space.scan(at=at)
                assert {it.key: it.value for it in page.entries} == seen
                assert [it.key for it in page.entries] == sorted(seen)
                assert page.after is None
                for key in KEYS:
                    assert space.get(key, at=at) == seen.get(key)
            self.differs(space, expected, now_ms)

    def differs(self, space: Namespace, expected: Expected, now_ms: int) -> None:
        now = expected.seen(expected.state, now_ms)
        for number, state in [(0, {}), *expected.held.items()]:
            then = expected.seen(state, now_ms)
            found = {it.key: (it.before, it.after) for it in space.diff(number).differences}
            assert found == {
                key: (then.get(key), now.get(key))
                for key in then.keys() | now.keys()
                if then.get(key) != now.get(key)
            }

    def teardown(self) -> None:
        """Without snapshots, a compaction leaves exactly the values that can be read."""
        if not hasattr(self, "database"):
            return
        for name in NAMES:
            space, expected = self.space(name), self.expected[name]
            for number in expected.held:
                space.release(number)
            expected.held.clear()
            kept = asyncio.run(self.database.compact(name)).kept
            now_ms = int(self.clock.now() * 1000)
            assert kept == len(expected.seen(expected.state, now_ms))
            assert space.lineage.is_straight
            assert not space.lineage.branches
        self.everything_reads_as_expected()
        asyncio.run(self.database.close())
        self.open()
        self.everything_reads_as_expected()
        for name in NAMES:
            self.space(name).clear()
        self.clock.jump(5)
        assert asyncio.run(self.database.compact()).kept == 0
        assert self.database.namespaces() == ()
        assert asyncio.run(self.database.verify()) == 0
        asyncio.run(self.database.close())
        shutil.rmtree(self.directory)
        self.short_steps.stop()


Stored.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
test_reads_see_what_the_model_says = Stored.TestCase
