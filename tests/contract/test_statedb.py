"""What the StateDB promises: names, bounds, versions, pages, space, copies, refusals."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dsec_common.compute.consistency import judge
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.statedb import Changes, StateDB, version_ms
from dsec_common.statedb.keys import (
    BATCH_BYTES_MAX,
    KEY_BYTES_MAX,
    NAMESPACE_BYTES_MAX,
    VALUE_BYTES_MAX,
)
from dsec_common.statedb.versions import version_at
from dsec_common.testing.clock import FakeClock
from statedb_world import put_all

_SOURCE = random.Random(0)  # noqa: S311  it must be repeatable


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.sst"))


def test_no_key_of_one_namespace_is_reachable_from_another(database: StateDB) -> None:
    names = ("a", "a\x01", "ab", "a|b", "ü", "a/b", "\U0001f600", "m", "d")
    for name in names:
        database.namespace(name).put("k", name.encode())
        database.namespace(name).put("b|k", b"other")
    for name in names:
        page = database.namespace(name).scan()
        assert [(it.key, it.value) for it in page.entries] == [
            ("b|k", b"other"),
            ("k", name.encode()),
        ]
    assert set(database.namespaces()) == set(names)
    assert database.namespaces(limit=2) == tuple(sorted(names, key=str.encode))[:2]
    assert database.namespaces(after="ü") == ("\U0001f600",)


@pytest.mark.parametrize("bad", ["", "a\0b", "\ud800", "k" * (KEY_BYTES_MAX + 1), "é" * 513])
def test_a_key_that_cannot_be_kept_is_refused_and_changes_nothing(
    database: StateDB, bad: str
) -> None:
    space = database.namespace("a")
    space.put("k", b"v")
    before = space.version
    for attempt in (
        lambda: space.put(bad, b""),
        lambda: space.get(bad),
        lambda: space.entry(bad),
        lambda: space.delete(bad),
        lambda: space.write({"k": b"new", bad: b""}),
        lambda: space.write({"k": b"new"}, [bad]),
        lambda: space.history(bad),
    ):
        with pytest.raises(DsecError) as refused:
            attempt()
        assert refused.value.code is ErrorCode.INVALID
    assert (space.version, space.get("k")) == (before, b"v")


@pytest.mark.parametrize("bad", ["", "a\0", "\ud800", "n" * (NAMESPACE_BYTES_MAX + 1)])
def test_a_namespace_that_cannot_be_kept_is_refused(database: StateDB, bad: str) -> None:
    with pytest.raises(DsecError, match="namespace"):
        database.namespace(bad)
    assert database.namespaces() == ()


def test_the_largest_names_and_values_are_kept(database: StateDB) -> None:
    space = database.namespace("n" * NAMESPACE_BYTES_MAX)
    key, value = "k" * KEY_BYTES_MAX, b"v" * VALUE_BYTES_MAX
    space.put(key, value)
    assert space.get(key) == value
    space.write({key: b"", "k": value[1:]})
    assert (space.get(key), space.get("k")) == (b"", value[1:])


def test_what_is_too_large_is_refused_and_changes_nothing(database: StateDB) -> None:
    space = database.namespace("a")
    half = b"v" * (BATCH_BYTES_MAX // 2)
    for attempt in (
        lambda: space.put("k", b"v" * (VALUE_BYTES_MAX + 1)),
        lambda: space.write({"k": b"v" * (VALUE_BYTES_MAX + 1)}),
        lambda: space.write({"k": half, "l": half}),
        lambda: database.write({"a": Changes({"k": half}), "b": Changes({"k": half})}),
        lambda: space.write({}),
        lambda: space.write({"k": b""}, ["k"]),
        lambda: space.put("k", b"", ttl_s=-1),
        lambda: space.put("k", b"", ttl_s=float("nan")),
        lambda: space.put("k", b"", ttl_s=float("inf")),
        lambda: space.scan(limit=0),
        lambda: space.scan(limit=1001),
    ):
        with pytest.raises(DsecError) as refused:
            attempt()
        assert refused.value.code is ErrorCode.INVALID
    assert space.version == 0
    assert space.scan().entries == ()


def test_a_value_that_is_no_bytes_is_the_callers_fault_and_changes_nothing(
    database: StateDB,
) -> None:
    space = database.namespace("a")
    openings = database._engine.openings
    for value in ("text", bytearray(b"x")):
        with pytest.raises((TypeError, ValueError)):
            space.put("k", value)  # type: ignore[arg-type]
        with pytest.raises((TypeError, ValueError)):
            space.write({"k": value})  # type: ignore[dict-item]
    assert database._engine.openings == openings
    assert space.get("k") is None


def test_several_namespaces_change_together(database: StateDB) -> None:
    versions = database.write(
        {"a": Changes({"k": b"1"}), "b": Changes({"l": b"2"}, deletes=("k",), ttl_s=5)}
    )
    for name, version in versions.items():
        assert database.namespace(name).version == version
    assert database.namespace("a").get("k") == b"1"
    assert database.namespace("b").get("l") == b"2"


def test_a_version_is_never_behind_what_it_depends_on(database: StateDB, clock: FakeClock) -> None:
    planner, writer = database.namespace("planner"), database.namespace("writer")
    plan = planner.put("plan", b"search")
    text = writer.put("text", b"found", dependencies={"planner": plan})
    assert version_ms(text) == version_ms(plan) + 50
    assert judge(version_ms(text), {"planner": version_ms(plan)}) is None
    for _ in range(100):
        newer = writer.put("text", b"more")
        assert newer > text
        text = newer
    plan = planner.put("plan", b"write", dependencies={"writer": text})
    assert judge(version_ms(writer.version), {"planner": version_ms(plan)}) is not None
    assert version_ms(writer.synchronise({"planner": plan})) == version_ms(plan) + 50
    assert judge(version_ms(writer.version), {"planner": version_ms(plan)}) is None
    assert writer.get("text") == b"more"


def test_a_dependency_that_no_clock_can_have_is_refused(
    database: StateDB, clock: FakeClock
) -> None:
    space = database.namespace("a")
    ahead = version_at(int(clock.now() * 1000) + 3_601_000)
    milliseconds = int(clock.now() * 1000)
    for version, code in (
        (-1, ErrorCode.INVALID),
        (milliseconds, ErrorCode.INVALID),
        (ahead, ErrorCode.CONFLICT),
    ):
        with pytest.raises(DsecError) as refused:
            space.put("k", b"", dependencies={"other": version})
        assert refused.value.code is code
    assert (space.version, space.get("k")) == (0, None)
    assert space.put("k", b"", dependencies={"new": 0})


@pytest.mark.parametrize("orderly", [True, False])
async def test_versions_go_on_over_restarts_and_when_the_clock_is_set_back(
    tmp_path: Path, clock: FakeClock, *, orderly: bool
) -> None:
    newest = 0
    for number in range(4):
        database = StateDB(tmp_path / "db", clock=clock)
        space = database.namespace("a")
        assert space.version >= newest
        versions = [space.put("k", b"%d" % number) for _ in range(3)]
        versions.append(space.snapshot())
        versions.append(space.put("k", b"%d" % number, dependencies={"b": space.version}))
        assert sorted({newest, *versions}) == [newest, *versions]
        newest = versions[-1]
        if orderly:
            await database.close()
        else:
            database._engine.close_now()
        clock.jump(-1000)


async def test_a_restart_does_not_run_ahead_of_the_clock(tmp_path: Path, clock: FakeClock) -> None:
    for _ in range(20):
        async with StateDB(tmp_path / "db", clock=clock) as database:
            version = database.namespace("a").put("k", b"")
    assert version_ms(version) == int(clock.now() * 1000)


async def test_namespaces_beyond_those_at_hand_do_not_run_ahead_either(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec_common.statedb.database._KEPT_AT_HAND", 2)
    async with StateDB(tmp_path / "db", clock=clock) as database:
        for _ in range(5):
            for name in "abcd":
                database.namespace(name).put("k", b"")
        assert {version_ms(database.namespace(name).version) for name in "abcd"} == {
            int(clock.now() * 1000)
        }


def test_two_handles_of_one_namespace_are_one(database: StateDB) -> None:
    one, other = database.namespace("a"), database.namespace("a")
    held = one.snapshot()
    assert other.put("k", b"") > held
    other.rollback(held)
    assert one.get("k") is None


def test_an_expired_value_is_absent_and_hides_what_was_before(
    database: StateDB, clock: FakeClock
) -> None:
    space = database.namespace("a")
    space.put("token", b"old")
    space.put("token", b"new", ttl_s=2)
    held = space.snapshot()
    clock.jump(1.999)
    assert space.get("token") == b"new"
    clock.jump(0.001)
    assert space.get("token") is None
    assert space.get("token", at=held) is None
    assert space.scan().entries == ()
    entry = space.entry("token")
    assert entry is not None
    assert entry.value is None
    assert entry.expires_at == pytest.approx(clock.now())


def test_pages_follow_each_other_and_a_snapshot_is_of_one_moment(database: StateDB) -> None:
    put_all(database, "a", 2500)
    space = database.namespace("a")
    for number in range(0, 2500, 2):
        space.delete(f"key-{number:05}")
    held = space.snapshot()
    put_all(database, "a", 2500)
    found: list[str] = []
    after: str | None = ""
    while after is not None:
        page = space.scan("key-", at=held, after=after, limit=300)
        assert len(page.entries) <= 300
        found += [it.key for it in page.entries]
        after = page.after
    assert found == [f"key-{number:05}" for number in range(1, 2500, 2)]
    assert [it.key for it in space.scan("key-0249").entries] == [
        f"key-{number:05}" for number in range(2490, 2500)
    ]
    assert len(space.diff(held, limit=1000).differences) == 1000


def test_a_page_is_bounded_in_bytes_and_in_what_it_looks_at(database: StateDB) -> None:
    space = database.namespace("a")
    for number in range(20):
        space.put(f"{number:02}", b"v" * 50_000)
    page = space.scan()
    assert len(page.entries) == 6
    assert page.after == "05"
    assert space.scan(after="05").entries[0].key == "06"


def test_a_long_stretch_of_deleted_keys_is_looked_through_in_pages(
    database: StateDB, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec_common.statedb.reading._EXAMINED_MAX", 100)
    space = database.namespace("a")
    put_all(database, "a", 250)
    for number in range(240):
        space.delete(f"key-{number:05}")
    pages = [space.scan()]
    while (after := pages[-1].after) is not None:
        pages.append(space.scan(after=after))
    assert [len(page.entries) for page in pages] == [0, 0, 10]


def test_the_history_of_a_key_leaves_out_what_was_undone(database: StateDB) -> None:
    space = database.namespace("a")
    first = space.put("k", b"1")
    held = space.snapshot()
    space.put("k", b"undone")
    space.rollback(held)
    gone = space.delete("k")
    last = space.put("k", b"3")
    assert [(it.value, it.version) for it in space.history("k")] == [
        (b"3", last),
        (None, gone),
        (b"1", first),
    ]
    assert len(space.history("k", limit=2)) == 2
    assert space.history("other") == ()


def test_a_state_that_a_rollback_undid_can_be_gone_back_to(database: StateDB) -> None:
    space = database.namespace("rollout")
    numbers = []
    for step in range(5):
        space.put("step", b"%d" % step)
        numbers.append(space.snapshot())
    for step in (1, 4, 0, 3, 2, 4):
        space.rollback(numbers[step])
        assert space.get("step") == b"%d" % step
        space.put("step", b"other")
    for step, number in enumerate(numbers):
        assert space.get("step", at=number) == b"%d" % step


async def test_what_another_branch_still_sees_stays_dead_to_those_that_do_not(
    database: StateDB,
) -> None:
    space = database.namespace("a")
    first = space.snapshot()
    space.put("k", b"later")
    second = space.snapshot()
    space.rollback(first)
    branch = space.snapshot()
    space.rollback(second)
    space.release(second)
    for _ in range(2):
        await database.compact()
        assert space.get("k") == b"later"
        assert space.get("k", at=branch) is None
    space.rollback(branch)
    assert space.get("k") is None


def test_only_held_snapshots_can_be_read_gone_back_to_and_let_go(database: StateDB) -> None:
    space = database.namespace("a")
    version = space.put("k", b"v")
    held = space.snapshot()
    space.release(held)
    for number in (held, version, 7, -1):
        for attempt in (
            lambda number=number: space.get("k", at=number),
            lambda number=number: space.rollback(number),
            lambda number=number: space.release(number),
            lambda number=number: space.diff(number),
        ):
            with pytest.raises(DsecError) as refused:
                attempt()
            assert refused.value.code is ErrorCode.NOT_FOUND
    with pytest.raises(DsecError, match="cannot be released"):
        space.release(0)
    assert space.get("k") == b"v"


def test_snapshots_are_bounded(database: StateDB, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec_common.statedb.namespace.SNAPSHOTS_MAX", 2)
    space = database.namespace("a")
    first = space.snapshot()
    space.snapshot()
    with pytest.raises(DsecError) as refused:
        space.snapshot()
    assert (refused.value.code, refused.value.retryable) == (ErrorCode.EXHAUSTED, False)
    space.release(first)
    assert space.snapshot()


async def test_a_compaction_keeps_what_somebody_can_see_and_nothing_else(
    database: StateDB,
) -> None:
    space = database.namespace("a")
    for number in range(50):
        space.put("k", b"%d" % number)
    held = space.snapshot()
    for number in range(100):
        space.put("k", b"%d" % number)
        undone = space.snapshot()
        space.put("k", b"undone")
        space.rollback(undone)
        space.release(undone)
    space.put("gone", b"")
    space.delete("gone")
    assert len(space.lineage.now.starts) > 1
    compacted = await database.compact()
    assert compacted.kept == 2
    assert compacted.removed == 250
    assert space.lineage.is_straight
    assert [it.value for it in space.history("k")] == [b"99", b"49"]
    assert space.get("k", at=held) == b"49"
    assert await database.verify() == 2


async def test_a_compaction_frees_space_on_the_disk(database: StateDB) -> None:
    space = database.namespace("a")
    for _ in range(20):
        for number in range(20):
            space.put(f"{number}", _SOURCE.randbytes(20_000))
        await database._engine.job(lambda it: it.flush())
    before = size_of(database.directory)
    space.get("1")  # it must not hold files either
    await database.compact()
    assert before > 8_000_000
    assert size_of(database.directory) < before / 5


async def test_a_cleared_namespace_is_forgotten_and_can_begin_anew(
    database: StateDB, clock: FakeClock
) -> None:
    space = database.namespace("a")
    space.put("k", b"v")
    space.snapshot()
    last = space.clear()
    assert (space.get("k"), space.snapshots) == (None, ())
    clock.jump(1)
    await database.compact()
    assert database.namespaces() == ()
    assert space.put("k", b"again") > last
    assert database.namespaces() == ("a",)


async def test_hot_keys_are_named_with_how_hot_they_are(
    database: StateDB, clock: FakeClock
) -> None:
    space = database.namespace("a")
    put_all(database, "a", 3000)
    for _ in range(5000):
        space.get("key-00007")
    space.write(dict.fromkeys(("key-00008", "key-00009"), b""))
    await clock.advance(10)
    hottest = database.hot_keys(1)
    assert [(it.namespace, it.key) for it in hottest] == [("a", "key-00007")]
    assert hottest[0].reads_per_s == pytest.approx(500)
    assert hottest[0].part > 0.5
    await clock.advance(200)
    space.get("key-00001")
    space.get("key-00001")
    await clock.advance(61)
    space.get("key-00001")
    assert [it.key for it in database.hot_keys()] == ["key-00001"]
