"""A started kernel for each test, and proof that nothing of it stays."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsec_sandboxd.kernel.linux import LinuxKernel
from kernel_world import NODE, Layers, World, build_layers, cgroups_left


@pytest.fixture(scope="session")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Layers:
    return build_layers(tmp_path_factory.mktemp("layers"))


@pytest.fixture(autouse=True)
def _no_cgroups_left() -> Iterator[None]:
    yield
    assert cgroups_left() == []


@pytest.fixture
async def world(layers: Layers, tmp_path: Path) -> AsyncIterator[World]:
    if os.geteuid() != 0:
        pytest.skip("sandboxes need root")
    kernel = LinuxKernel(NODE)
    await kernel.start()
    try:
        for digest, image in layers.items():
            await kernel.hold_layer(digest, image)
        yield World(kernel, layers, tmp_path)
    finally:
        await kernel.close()
