"""What tests of a whole node have in common: a layer store, and a daemon that runs on it."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandboxd_node import NodeForTests, build_layers, node_for_tests
from snapshot_node import Asker


@pytest.fixture(scope="session")
def built_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a layer store, once: nobody writes to this one."""
    directory = tmp_path_factory.mktemp("layers")
    build_layers(directory)
    return directory / "store"


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory, built_layers: Path) -> Path:
    """Give a module a layer store of its own."""
    store = tmp_path_factory.mktemp("layers") / "store"
    return Path(shutil.copytree(built_layers, store, symlinks=True))


@pytest.fixture
async def node(tmp_path: Path, layers: Path) -> AsyncIterator[NodeForTests]:
    """Yield a node that a test may do anything with."""
    async with node_for_tests(tmp_path, layers) as running:
        yield running


@pytest.fixture
def ask(node: NodeForTests) -> Asker:
    """Ask for the node's snapshots."""
    return Asker(node)
