"""The core of snapshots: places in the tree, what needs what, what is garbage."""

from __future__ import annotations

import random

import msgspec
import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.sandbox import Limits
from dsec_sandboxd.snapshot_tree import (
    CHAIN_MAX,
    LAYERS_MAX,
    SnapshotRecord,
    SnapshotTree,
    plan_copy,
)


def record(local: str, *chain: str, parent: str = "", **changes: object) -> SnapshotRecord:
    plain = SnapshotRecord(
        local=local,
        project="default",
        sandbox="box",
        created_at=float(len(local)),
        layer_references=("base@1",),
        layer_digests=("sha256:1",),
        chain=(*chain, local),
        limits=Limits(),
        parent=parent,
    )
    return msgspec.structs.replace(plain, **changes)


def locals_of(records: list[SnapshotRecord]) -> set[str]:
    return {one.local for one in records}


def test_a_chain_grows_until_the_next_copy_folds_it() -> None:
    chain: tuple[str, ...] = ()
    for number in range(CHAIN_MAX):
        plan = plan_copy(f"s{number}", 3, chain)
        assert (plan.fold, plan.chain) == ((), (*chain, f"s{number}"))
        chain = plan.chain
    plan = plan_copy("folded", 3, chain)
    assert plan.fold == tuple(reversed(chain))
    assert plan.chain == ("folded",)


def test_many_layers_leave_room_for_a_shorter_chain() -> None:
    assert plan_copy("b", LAYERS_MAX - 1, ("a",)).fold == ("a",)
    assert plan_copy("b", LAYERS_MAX - 2, ("a",)).chain == ("a", "b")
    with pytest.raises(DsecError) as caught:
        plan_copy("a", LAYERS_MAX, ())
    assert caught.value.details["reason"] == "too_many_layers"


def test_another_project_never_sees_a_snapshot() -> None:
    tree = SnapshotTree("n")
    tree.add(record("a"))
    assert tree.find("default", "a").local == "a"
    for project, local in (("other", "a"), ("default", "b")):
        with pytest.raises(DsecError) as caught:
            tree.find(project, local)
        assert caught.value.code is ErrorCode.NOT_FOUND


def test_children_of_a_deleted_snapshot_become_its_parents() -> None:
    tree = SnapshotTree("n")
    for one in (record("a"), record("b", parent="a"), record("c", parent="b")):
        tree.add(one)
    changed, garbage = tree.delete("b")
    assert [(one.local, one.parent) for one in changed] == [("c", "a")]
    assert locals_of(garbage) == {"b"}
    tree.validate()


def test_a_parent_that_is_gone_is_no_parent() -> None:
    assert SnapshotTree("n").add(record("b", parent="gone")).parent == ""


def test_a_layer_stays_until_the_last_that_needs_it_has_gone() -> None:
    tree = SnapshotTree("n")
    for one in (record("a"), record("b", "a"), record("c", "a", "b")):
        tree.add(one)
    tree.mount(("a", "b"))
    assert tree.delete("b")[1] == []
    assert tree.delete("a")[1] == []
    assert locals_of(tree.delete("c")[1]) == {"c"}
    tree.validate()
    assert locals_of(tree.unmount(("a", "b"))) == {"a", "b"}
    assert tree.all_layers() == []


def test_a_transient_snapshot_goes_with_the_last_child_unless_something_builds_on_it() -> None:
    tree = SnapshotTree("n")
    tree.add(record("f", transient=True))
    tree.mount(("f",))
    tree.mount(("f",))
    assert tree.unmount(("f",)) == []
    tree.add(record("s", "f", parent="f"))
    assert tree.unmount(("f",)) == []
    assert tree.find("default", "f").transient
    # Nothing mounts it; the snapshot that builds on it goes, and then it does at the next sweep.
    assert locals_of(tree.delete("s")[1]) == {"s"}
    assert locals_of(tree.sweep()) == {"f"}


def test_what_an_earlier_daemon_lost_is_told_with_all_that_needs_it() -> None:
    tree = SnapshotTree("n")
    broken = tree.load([record("b", "a"), record("c"), record("d", "c"), record("e", "a", "b")])
    assert locals_of(broken) == {"b", "e"}
    assert locals_of(tree.all_layers()) == {"c", "d"}
    with pytest.raises(DsecError) as caught:
        tree.layer("a")
    assert caught.value.details["reason"] == "snapshot_lost"


def test_deleted_layers_that_are_still_needed_come_back_as_deleted() -> None:
    tree = SnapshotTree("n")
    tree.load([record("a", deleted=True), record("b", "a"), record("z", deleted=True)])
    assert locals_of(tree.records("default")) == {"b"}
    assert locals_of(tree.sweep()) == {"z"}
    assert locals_of(tree.delete("b")[1]) == {"a", "b"}


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_doing_things_loses_a_layer_or_keeps_garbage(seed: int) -> None:
    dice = random.Random(seed)  # noqa: S311  repeatable
    tree = SnapshotTree("n")
    mounted: list[tuple[str, ...]] = []
    disk: set[str] = set()
    for number in range(200):
        match dice.randrange(4):
            case 0 | 1:
                below = dice.choice([(), *mounted])
                plan = plan_copy(f"s{number:03}", 3, below)
                parent = dice.choice(["", *locals_of(tree.records("default"))])
                transient = dice.random() < 0.3
                one = record(plan.chain[-1], *plan.chain[:-1], parent=parent, transient=transient)
                tree.add(one)
                disk.add(one.local)
                mounted.append(one.chain)
                tree.mount(one.chain)
            case 2 if mounted:
                gone = mounted.pop(dice.randrange(len(mounted)))
                disk -= locals_of(tree.unmount(gone))
            case _ if tree.records("default"):
                local = dice.choice(tree.records("default")).local
                disk -= locals_of(tree.delete(local)[1])
            case _:
                pass
        tree.validate()
        assert disk == locals_of(tree.all_layers())
        for chain in mounted:
            assert set(chain) <= disk
    for chain in mounted:
        disk -= locals_of(tree.unmount(chain))
    for one in tree.records("default"):
        disk -= locals_of(tree.delete(one.local)[1])
    assert disk == set()
