"""The whole platform on this machine, for benchmarks that go through NATS."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from dsec import DSecClient
from dsec.rootfs import build_host_rootfs
from dsec.stack.options import StackOptions
from dsec.stack.supervisor import Supervisor


async def _say_nothing(_what: str, _facts: Mapping[str, Any]) -> None:
    return


@contextlib.asynccontextmanager
async def running_platform() -> AsyncIterator[DSecClient]:
    """Run NATS, Kafka and the services in a temporary directory; yield a connected client.

    Needs root. Nothing is left behind.
    """
    with tempfile.TemporaryDirectory(prefix="dsec-bench-") as directory:
        options = StackOptions(
            directory=Path(directory) / "platform",
            nats_port=0,
            node_prefix="bench",
            log_level="warning",
        )
        supervisor = Supervisor(options, _say_nothing)
        try:
            await supervisor.start()
            context = supervisor.context
            assert context is not None
            async with DSecClient(context.nats_servers, context.credentials) as client:
                yield client
        finally:
            await supervisor.stop()


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
