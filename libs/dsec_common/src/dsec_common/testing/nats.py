"""A real NATS server for a test, with accounts, on a free port, gone afterwards."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from dsec_common.accounts import AuthDirectory
from dsec_common.bus import Bus, BusConfig
from dsec_common.embedded.nats import NatsServer


class NatsForTests:
    """A server in operator mode, and buses of whoever a test wants to be."""

    def __init__(self, directory: Path) -> None:
        self.auth = AuthDirectory.create_or_open(directory / "auth")
        self.server = NatsServer(directory / "nats", self.auth)

    def service_config(self, role: str, node: str = "") -> BusConfig:
        """Return how a service connects."""
        return self._config(self.auth.service_credentials(role, node), role)

    def project_config(self, project: str = "default") -> BusConfig:
        """Return how a project's user connects."""
        return self._config(self.auth.project(project), f"project {project}")

    def _config(self, credentials: Path, name: str) -> BusConfig:
        return BusConfig(
            servers=(self.server.url,),
            credentials_path=str(credentials),
            name=name,
            connect_timeout_s=10.0,
        )

    @contextlib.asynccontextmanager
    async def service(self, role: str, node: str = "") -> AsyncIterator[Bus]:
        """Yield the bus of a service; drained afterwards."""
        async with await Bus.connect(self.service_config(role, node)) as bus:
            yield bus

    @contextlib.asynccontextmanager
    async def project(self, project: str = "default") -> AsyncIterator[Bus]:
        """Yield the bus of a project's user; drained afterwards."""
        async with await Bus.connect(self.project_config(project)) as bus:
            yield bus


@contextlib.asynccontextmanager
async def nats_for_tests(*, projects: tuple[str, ...] = ()) -> AsyncIterator[NatsForTests]:
    """Yield a running server that knows ``default`` and ``projects``; leave nothing behind."""
    with tempfile.TemporaryDirectory(prefix="dsec-nats-") as directory:
        nats = NatsForTests(Path(directory))
        for project in projects:
            nats.auth.create_project(project)
        await nats.server.start()
        try:
            yield nats
        finally:
            await nats.server.stop()
