"""The whole platform on this machine, for benchmarks that go through NATS."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsec import DSecClient
from dsec.rootfs import build_host_rootfs
from dsec.stack.options import StackOptions
from dsec.stack.supervisor import Supervisor


async def _say_nothing(_what: str, _facts: Mapping[str, Any]) -> None:
    return


@dataclass(frozen=True, slots=True)
class Platform:
    """A running platform.

    Attributes:
        client: connected to it.
        supervisor: runs it; knows its processes.
    """

    client: DSecClient
    supervisor: Supervisor

    @property
    def node(self) -> str:
        """The name of its one node."""
        return self.supervisor.options.node_names()[0]

    def processes(self) -> dict[str, int]:
        """Return the processes of all parts by name, the node's spawner included."""
        found = {
            part.name.replace(f"-{self.node}", ""): part.process.pid
            for part in self.supervisor.parts()
            if part.process is not None
        }
        for listing in Path(f"/proc/{found['sandboxd']}/task").glob("*/children"):
            for child in listing.read_text(encoding="ascii").split():
                if Path(f"/proc/{child}/comm").read_text(encoding="ascii") == "dsec-spawner\n":
                    found["spawner"] = int(child)
        return found


@contextlib.asynccontextmanager
async def running_parts(
    settings: Mapping[str, str] | None = None, *, layers: Path | None = None
) -> AsyncIterator[Platform]:
    """Run NATS, Kafka and the services in a temporary directory; yield them and a client.

    Needs root. Nothing is left behind.

    Args:
        settings: of the services, as ``DSEC_…`` variables name them.
        layers: a layer store to use instead of one of its own.
    """
    with (
        tempfile.TemporaryDirectory(prefix="dsec-bench-") as directory,
        _environment(settings or {}),
    ):
        options = StackOptions(
            directory=Path(directory) / "platform",
            nats_port=0,
            node_prefix=f"bench{os.getpid()}",  # others may measure on this machine, too
            log_level="warning",
            layers_directory=layers,
        )
        supervisor = Supervisor(options, _say_nothing)
        try:
            await supervisor.start()
            context = supervisor.context
            assert context is not None
            async with DSecClient(context.nats_servers, context.credentials) as client:
                yield Platform(client, supervisor)
        finally:
            await supervisor.stop()


@contextlib.asynccontextmanager
async def running_platform() -> AsyncIterator[DSecClient]:
    """Run a platform as :func:`running_parts` does; yield the client alone."""
    async with running_parts() as platform:
        yield platform.client


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


async def import_three_layers(client: DSecClient) -> dict[str, Any]:
    """Make a base, a workspace and a toolkit; return the arguments of ``create_sandbox``."""
    with tempfile.TemporaryDirectory(prefix="dsec-bench-layers-") as directory:
        base = Path(directory) / "base"
        build_host_rootfs(base, python=False)
        await client.layers.import_directory(base, kind="base", name="shell", version="1")
        for kind in ("workspace", "toolkit"):
            tree = Path(directory) / kind
            tree.mkdir()
            (tree / f"{kind}.txt").write_text(f"the {kind} layer\n")
            await client.layers.import_directory(tree, kind=kind, name=kind, version="1")
    return {"base": "shell@1", "workspace": "workspace@1", "toolkits": ("toolkit@1",)}
