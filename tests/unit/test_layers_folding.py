"""Which layers are folded: pure decisions."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.layer import LayerKind
from dsec_sandboxd.layers.folding import (
    FOLDED_TO_MAX,
    NAMED_MAX,
    RUN_MAX,
    FoldRules,
    fold_key,
    mount_count,
    mounts_below_snapshots,
    needed_runs,
    small_runs,
)
from dsec_sandboxd.layers.records import Layer

MIB = 1 << 20
RULES = FoldRules(above=4)


def layer(
    number: int, kind: LayerKind = LayerKind.TOOLKIT, mib: int = 1, entries: int = 9
) -> Layer:
    return Layer(
        project="default",
        name=f"l{number}",
        version="1",
        digest=f"sha256:{number:064x}",
        kind=kind,
        size_bytes=mib * MIB,
        entries=entries,
        created_at=0.0,
        source_digest="",
        image_path=Path("/none"),
    )


def stack(toolkits: int, mib: int = 1) -> list[Layer]:
    return [
        layer(0, LayerKind.BASE, mib=500),
        layer(1, LayerKind.WORKSPACE),
        *(layer(2 + number, mib=mib) for number in range(toolkits)),
    ]


def test_few_layers_are_left_alone() -> None:
    assert small_runs(stack(2), RULES) == []
    assert small_runs(stack(3), RULES) == [range(2, 5)]


def test_base_and_workspace_are_in_no_run_of_small_layers() -> None:
    assert small_runs(stack(10), RULES) == [range(2, 12)]


def test_a_large_layer_parts_two_runs() -> None:
    layers = stack(7)
    layers[5] = layer(5, mib=100)
    assert small_runs(layers, RULES) == [range(2, 5), range(6, 9)]
    layers[5] = layer(5, entries=20_000)
    assert small_runs(layers, RULES) == [range(2, 5), range(6, 9)]


def test_a_run_is_bounded_in_layers_and_bytes() -> None:
    assert small_runs(stack(40), RULES) == [range(2, 18), range(18, 34), range(34, 42)]
    assert small_runs(stack(10, mib=30), RULES) == [range(2, 10), range(10, 12)]


def test_the_same_layers_in_another_order_are_another_fold() -> None:
    layers = stack(2)
    assert fold_key(layers) == fold_key(list(layers))
    assert fold_key(layers) != fold_key(list(reversed(layers)))


@pytest.mark.parametrize(
    ("named", "mib"),
    # Seven of 33 MiB are the most in one fold.
    [
        *((named, 1) for named in range(17, NAMED_MAX + 1)),
        *((named, 33) for named in range(17, 46)),
    ],
)
def test_as_many_as_may_be_named_can_be_mounted(named: int, mib: int) -> None:
    layers = stack(named - 2, mib)
    runs = needed_runs(layers, FOLDED_TO_MAX, RULES, small_runs(layers, RULES))
    assert mount_count(named, runs) <= FOLDED_TO_MAX
    places = [place for run in runs for place in run]
    assert len(places) == len(set(places))
    assert all(2 <= len(run) <= RUN_MAX for run in runs)
    assert runs == sorted(runs, key=lambda run: run.start)


def test_layers_too_large_to_be_folded_are_refused() -> None:
    with pytest.raises(DsecError) as caught:
        needed_runs(stack(20, mib=200), FOLDED_TO_MAX, RULES, [])
    assert caught.value.code is ErrorCode.INVALID
    assert caught.value.details["reason"] == "too_many_layers"


def test_a_snapshot_finds_room_above_many_layers() -> None:
    assert mounts_below_snapshots(16, 16) == 16
    assert mounts_below_snapshots(17, 16) == FOLDED_TO_MAX
