"""What tests have in common: a layer store, a daemon that runs on it, and a model endpoint."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec_common.testing.nats import NatsForTests, nats_for_tests
from model_engine import ScriptedServer, scripted_server
from model_world import ModelWorld, model_world
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


# --- A model endpoint; modules with a world of another kind have their own ------------------------


@pytest.fixture
async def nats() -> AsyncIterator[NatsForTests]:
    """Yield a server that nobody else is connected to."""
    async with nats_for_tests(projects=("other",)) as running:
        yield running


@pytest.fixture
async def world(nats: NatsForTests, tmp_path: Path) -> AsyncIterator[ModelWorld]:
    """Yield a sandbox's model endpoint with a Chronus and a rollout behind it."""
    async with model_world(nats, tmp_path) as running:
        yield running


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    """Yield a model server that knows three answers."""
    async with scripted_server("first", "second", "third") as running:
        yield running
