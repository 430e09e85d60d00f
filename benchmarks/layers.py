"""A toolkit is updated under 100 workspaces: one layer rebuilt, against 100 whole images.

Both sides use the same importer and the same store. A whole image holds what a sandbox of its
workspace sees: base, workspace and toolkit in one tree; putting that tree together is not counted.
The base is this host's shell and its programs; workspaces are small and all different.

Another figure is how fast a cold node gets a large image from a store in NATS, checks included.

The last is what folding small neighbours saves: create to first exec with 16 layers, on a platform
that mounts each and on one that mounts a fold, in turns.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.create import create_and_exec
from benchmarks.platform import Platform, running_parts
from benchmarks.report import Options, Reach, Report, percentile
from dsec import DSecClient
from dsec.rootfs import build_host_rootfs
from dsec_common.testing.nats import nats_for_tests
from dsec_common.wire.layer import LayerKind
from dsec_sandboxd.layers import Layer, LayerStore
from dsec_sandboxd.layers.nats_storage import NatsStorage
from dsec_sandboxd.layers.object_backend import ObjectBackend

WORKSPACES = 100
WORKSPACE_BYTES = 256 << 10
TOOLKIT_BYTES = 4 << 20
LARGE_BYTES = 128 << 20
MIB = 1 << 20
NAMED_LAYERS = 16
FOLD_SAMPLES = 100
FOLD_ROUNDS = 3
FOLD_TIMEOUT_S = 60.0
PROJECT = "benchmark"


class Trees:
    """The directories that are imported."""

    def __init__(self, directory: Path, workspaces: int) -> None:
        self.base = directory / "base"
        self.workspaces = [directory / f"workspace-{number}" for number in range(workspaces)]
        self.toolkit = directory / "toolkit"
        build_host_rootfs(self.base, python=False)
        for workspace in self.workspaces:
            (workspace / "work").mkdir(parents=True)
            (workspace / "work" / "data").write_bytes(os.urandom(WORKSPACE_BYTES))
        (self.toolkit / "opt" / "tools").mkdir(parents=True)
        self.update_toolkit()

    def update_toolkit(self) -> None:
        """Change what the toolkit holds, as an update does."""
        (self.toolkit / "opt" / "tools" / "tool").write_bytes(os.urandom(TOOLKIT_BYTES))

    def whole(self, workspace: Path, target: Path) -> Path:
        """Put base, workspace and toolkit into one tree, without copying their content."""
        shutil.copytree(self.base, target, symlinks=True, copy_function=os.link)
        for tree in (workspace, self.toolkit):
            shutil.copytree(tree, target, symlinks=True, copy_function=os.link, dirs_exist_ok=True)
        return target


async def import_tree(
    store: LayerStore, tree: Path, kind: LayerKind, name: str, version: str
) -> Layer:
    """Import a directory as a new version."""
    imported = await store.import_layer(PROJECT, name, version, tree, kind=kind)
    return imported.layer


async def updated(trees: Trees, directory: Path) -> dict[str, float]:
    """Update the toolkit both ways; return seconds and bytes written of each."""
    async with LayerStore(directory / "layered") as store:
        await import_tree(store, trees.base, LayerKind.BASE, "base", "1")
        for number, workspace in enumerate(trees.workspaces):
            await import_tree(store, workspace, LayerKind.WORKSPACE, f"work-{number}", "1")
        await import_tree(store, trees.toolkit, LayerKind.TOOLKIT, "tools", "1")
        await store.tag(PROJECT, "tools", "latest", "1")
        trees.update_toolkit()
        started = time.perf_counter()
        layer = await import_tree(store, trees.toolkit, LayerKind.TOOLKIT, "tools", "2")
        await store.tag(PROJECT, "tools", "latest", "2")
        layered_s = time.perf_counter() - started
    whole_s, whole_bytes = 0.0, 0
    async with LayerStore(directory / "whole") as store:
        for number, workspace in enumerate(trees.workspaces):
            tree = await asyncio.to_thread(trees.whole, workspace, directory / "tree")
            started = time.perf_counter()
            whole = await import_tree(store, tree, LayerKind.BASE, f"image-{number}", "2")
            whole_s += time.perf_counter() - started
            whole_bytes += whole.size_bytes
            # Only the disk of this machine: a fleet would keep all of them.
            await store.remove(PROJECT, whole.reference)
            await store.collect_garbage()
            await asyncio.to_thread(shutil.rmtree, tree)
    return {
        "layered_update_s": layered_s,
        "layered_update_mib": layer.size_bytes / MIB,
        "whole_update_s": whole_s,
        "whole_update_mib": whole_bytes / MIB,
    }


def write_large(tree: Path) -> None:
    """Make a tree of one file that nothing can make smaller."""
    tree.mkdir()
    with (tree / "large").open("wb") as file:
        for _ in range(LARGE_BYTES // MIB):
            file.write(os.urandom(MIB))


async def fetched_from_nats(directory: Path) -> float:
    """Return MiB a second of a cold node that fetches a large image from NATS, checks included."""
    async with nats_for_tests() as nats, nats.service("sandboxd", "benchmark") as bus:
        storage = NatsStorage(bus, "dsec-layers")
        backends = [
            ObjectBackend(storage, directory / f"node-{number}", cache_bytes=1 << 40)
            for number in range(2)
        ]
        async with LayerStore(backends[0]) as store:
            tree = directory / "large-tree"
            await asyncio.to_thread(write_large, tree)
            layer = await import_tree(store, tree, LayerKind.DATA, "large", "1")
        async with LayerStore(backends[1]) as store:
            started = time.perf_counter()
            await store.resolve(PROJECT, "large@1")
            return layer.size_bytes / MIB / (time.perf_counter() - started)


async def import_many_layers(client: DSecClient) -> dict[str, Any]:
    """Make a base and small toolkits; return the arguments of ``create_sandbox``."""
    names = [f"small{number}" for number in range(NAMED_LAYERS - 1)]
    with tempfile.TemporaryDirectory(prefix="dsec-bench-layers-") as directory:
        base = Path(directory) / "base"
        build_host_rootfs(base, python=False)
        await client.layers.import_directory(base, kind="base", name="shell", version="1")
        for name in names:
            tree = Path(directory) / name
            tree.mkdir()
            (tree / f"{name}.txt").write_text(f"the layer {name}\n")
            await client.layers.import_directory(tree, kind="toolkit", name=name, version="1")
    return {"base": "shell@1", "toolkits": tuple(f"{name}@1" for name in names)}


async def folded_and_not() -> dict[str, float]:
    """Return the median milliseconds from create to first exec, of both, and how many layers."""
    latencies: dict[str, list[float]] = {"unfolded": [], "folded": []}
    settings = {"unfolded": {"DSEC_LAYERS_FOLD_ABOVE": "64"}, "folded": {}}
    for _ in range(FOLD_ROUNDS):
        for name, found in latencies.items():
            async with running_parts(settings[name]) as platform:
                layers = await import_many_layers(platform.client)
                await create_and_exec(platform.client, layers)
                if name == "folded":
                    await fold_made(platform, layers)
                for _ in range(20):
                    await create_and_exec(platform.client, layers)
                found += [
                    await create_and_exec(platform.client, layers) for _ in range(FOLD_SAMPLES)
                ]
    return {
        "named_layers": NAMED_LAYERS,
        **{
            f"create_to_first_exec_{name}_p50_ms": 1000 * percentile(found, 0.5)
            for name, found in latencies.items()
        },
    }


async def fold_made(platform: Platform, layers: dict[str, Any]) -> None:
    """Return when the node has its fold: it is made in the background."""
    async with asyncio.timeout(FOLD_TIMEOUT_S):
        while not list(platform.supervisor.options.directory.rglob("folds/index/*.json")):
            await create_and_exec(platform.client, layers)


async def run(options: Options) -> Report:
    """Measure all of it once; the many images are the rounds."""
    count = options.count or WORKSPACES
    with tempfile.TemporaryDirectory(prefix="dsec-bench-layers-") as name:
        directory = Path(name)
        trees = await asyncio.to_thread(Trees, directory, count)
        figures = await updated(trees, directory)
        fetched = await fetched_from_nats(directory)
    folding = await folded_and_not()
    unfolded_to_folded = (
        folding["create_to_first_exec_unfolded_p50_ms"]
        / folding["create_to_first_exec_folded_p50_ms"]
    )
    seconds = figures["whole_update_s"] / figures["layered_update_s"]
    size = figures["whole_update_mib"] / figures["layered_update_mib"]
    return Report(
        name="layers",
        figures={
            "workspaces": count,
            **figures,
            "fetched_from_nats_mib_per_s": fetched,
            **folding,
        },
        ratios={
            "whole_to_layered_seconds": seconds,
            "whole_to_layered_bytes": size,
            "unfolded_to_folded_ms": unfolded_to_folded,
        },
        reach=(
            Reach.at_least("whole_to_layered_seconds", seconds, count / 2),
            Reach.at_least("whole_to_layered_bytes", size, count),
            Reach.at_least("fetched_from_nats_mib_per_s", fetched, 50.0),
            Reach.at_least("unfolded_to_folded_ms", unfolded_to_folded, 1.0),
        ),
    )
