"""Which neighbouring layers of a sandbox are better mounted as one image. No I/O.

A sandbox of many layers pays for each of them at its creation, and the kernel part takes only so
many. Two rules say what becomes one image, a *fold*:

- **Small neighbours.** Above a number of layers, each run of neighbouring toolkits and data that
  are small becomes one. A run never holds a base or a workspace: those differ from sandbox to
  sandbox, and one fold is to serve all of them.
- **Too many.** Where even so more than the most are left, the cheapest neighbours are folded
  too, whatever they are.

Both look at nothing but the layers and their order, so the same layers give the same folds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dsec_common.errors import DsecError, invalid
from dsec_common.wire.layer import LayerKind
from dsec_sandboxd.layers.records import Layer

NAMED_MAX: Final = 64
"""Layers that one sandbox may name."""
FOLDED_TO_MAX: Final = 10
"""So many of them are mounted at most where more are named than the kernel part mounts; the rest
of its places are for snapshots."""
RUN_MAX: Final = 16
"""Layers in one fold: the kernel part folds so many at once."""

_KINDS: Final = (LayerKind.TOOLKIT, LayerKind.DATA)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldRules:
    """Bounds of folding.

    Attributes:
        above: sandboxes of at most so many layers are left alone.
        small_bytes: a larger image is not small.
        small_entries: nor is one of more files.
        fold_bytes: the images of one fold together; it is made in memory.
        fold_entries: their files together.
    """

    above: int
    small_bytes: int = 32 << 20
    small_entries: int = 10_000
    fold_bytes: int = 256 << 20
    fold_entries: int = 50_000


def small_runs(layers: Sequence[Layer], rules: FoldRules) -> list[range]:
    """Return the runs of small neighbours that become one image each, lowest first."""
    if len(layers) <= rules.above:
        return []
    runs: list[range] = []
    first = 0
    while first < len(layers):
        last = first
        while last < len(layers) and _is_small(layers[last], rules):
            if not _fits(layers[first : last + 1], rules):
                break
            last += 1
        if last - first > 1:
            runs.append(range(first, last))
        first = max(last, first + 1)
    return runs


def needed_runs(
    layers: Sequence[Layer], at_most: int, rules: FoldRules, runs: Sequence[range]
) -> list[range]:
    """Return ``runs`` and those without which more than ``at_most`` mounts are left, lowest first.

    Raises:
        DsecError: ``invalid`` with reason ``too_many_layers`` when the layers are too large for
            that to be done.
    """
    found = list(runs)
    while (mounts := mount_count(len(layers), found)) > at_most:
        taken = {place for run in found for place in run}
        run = _cheapest(layers, taken, min(mounts - at_most + 1, RUN_MAX), rules)
        if run is None:
            raise _too_many(len(layers), at_most, rules)
        found = sorted([*found, run], key=lambda each: each.start)
    return found


def mount_count(named: int, runs: Sequence[range]) -> int:
    """Return how many mounts ``named`` layers need when ``runs`` of them are one each."""
    return named - sum(len(run) - 1 for run in runs)


def mounts_below_snapshots(named: int, mounted_max: int) -> int:
    """Return how many mounts a sandbox of ``named`` layers has at most, without its snapshots."""
    return named if named <= mounted_max else FOLDED_TO_MAX


def fold_key(layers: Sequence[Layer]) -> str:
    """Return the name of a fold: it depends on the digests and their order, and nothing else."""
    return hashlib.sha256("\n".join(layer.digest for layer in layers).encode()).hexdigest()


def _is_small(layer: Layer, rules: FoldRules) -> bool:
    return (
        layer.kind in _KINDS
        and layer.size_bytes <= rules.small_bytes
        and layer.entries <= rules.small_entries
    )


def _fits(layers: Sequence[Layer], rules: FoldRules) -> bool:
    return (
        len(layers) <= RUN_MAX
        and sum(layer.size_bytes for layer in layers) <= rules.fold_bytes
        and sum(layer.entries for layer in layers) <= rules.fold_entries
    )


def _cheapest(
    layers: Sequence[Layer], taken: set[int], length: int, rules: FoldRules
) -> range | None:
    """Return the smallest run of ``length`` or else of fewer layers that are in no fold yet."""
    for size in range(length, 1, -1):
        runs = [
            range(first, first + size)
            for first in range(len(layers) - size + 1)
            if taken.isdisjoint(range(first, first + size))
            and _fits(layers[first : first + size], rules)
        ]
        if runs:
            return min(runs, key=lambda run: sum(layers[place].size_bytes for place in run))
    return None


def _too_many(named: int, at_most: int, rules: FoldRules) -> DsecError:
    return invalid(
        f"the sandbox has {named} layers, too large to be folded into the {at_most} that can be "
        f"mounted: neighbours of together at most {rules.fold_bytes >> 20} MiB and "
        f"{rules.fold_entries} files are folded; use fewer, or merge some",
        reason="too_many_layers",
    )
