"""The platform on this machine, for examples: NATS, Kafka and all five services."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from dsec.stack.options import StackOptions
from dsec.stack.supervisor import Supervisor

Say = Callable[[str], None]


@contextlib.asynccontextmanager
async def platform(directory: Path, node_prefix: str, say: Say) -> AsyncIterator[Supervisor]:
    """Run all parts as child processes; nothing is left afterwards but ``directory``.

    Args:
        directory: where their state is, and the layers, which the next run finds again.
        node_prefix: what the node's name begins with.
        say: is told of parts that failed.
    """

    async def report(what: str, facts: Mapping[str, Any]) -> None:
        if what in {"service_ended", "service_start_failed"}:
            say(f"[red]{what}[/] {facts}")

    options = StackOptions(
        directory=directory / "platform",
        nats_port=0,
        node_prefix=node_prefix,
        layers_directory=directory / "layers",
    )
    supervisor = Supervisor(options, report)
    try:
        await supervisor.start()
        yield supervisor
    finally:
        await supervisor.stop()
