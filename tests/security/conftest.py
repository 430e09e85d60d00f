"""An attacker's sandbox beside a neighbour's on a real kernel, and proof that no harm was done."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from attack_world import AttackWorld, build_attackers
from dsec_sandboxd.kernel.linux import LinuxKernel
from kernel_world import NODE, Layers, build_layers, cgroups_left


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Layers, Path]:
    directory = tmp_path_factory.mktemp("layers")
    return build_layers(directory), build_attackers(directory)


@pytest.fixture
async def arena(images: tuple[Layers, Path], tmp_path: Path) -> AsyncIterator[AttackWorld]:
    """Yield a world in which ``a`` attacks; afterwards nobody else may have noticed."""
    if os.geteuid() != 0:
        pytest.skip("sandboxes need root")
    layers, attackers = images
    kernel = LinuxKernel(NODE)
    await kernel.start()
    try:
        for digest, image in (*layers.items(), ("attackers", attackers)):
            await kernel.hold_layer(digest, image)
        arena = AttackWorld(kernel, layers, tmp_path)
        await arena.begin()
        try:
            yield arena
            await arena.check_unharmed()
        finally:
            await arena.end()
    finally:
        await kernel.close()
    assert cgroups_left() == []
