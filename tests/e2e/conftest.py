"""One platform for all end-to-end tests; what it leaves behind fails the run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec import sync
from stack import Stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    if os.geteuid() != 0:
        pytest.skip("sandboxes need root")
    platform = Stack(Path(tmp_path_factory.mktemp("stack")))
    try:
        platform.start()
        yield platform
    finally:
        code = platform.stop()
    assert code == 0, platform.said()
    assert platform.leftovers() == []


@pytest.fixture(scope="session")
def base(stack: Stack) -> str:
    """A base layer with the host's shell and Python."""
    return stack.import_host_base()


@pytest.fixture(scope="session")
def router(stack: Stack, base: str) -> None:
    """Have the node's router made before the tests: it stays, mounted, as long as the daemon."""
    with (
        sync.DSecClient(stack.context.nats_servers, stack.context.credentials) as client,
        client.create_sandbox(base, network={"allow": ["10.0.0.0/8"]}),
    ):
        pass
