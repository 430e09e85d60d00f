"""A scheduler as a process, for tests that kill it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any, Protocol

from control_plane import BEAT_S, until


class Platform(Protocol):
    """Where a service finds the server."""

    def settings(self, role: str) -> dict[str, Any]:
        """Return the settings with which a service finds it."""
        ...


class SchedulerProcess:
    """A scheduler in a process of its own; ``variables`` are set beside the usual ones."""

    def __init__(self, plane: Platform, directory: Path, name: str, **variables: str) -> None:
        settings = plane.settings("scheduler")
        self._runtime_file = directory / f"{name}.json"
        self._environment = {
            **os.environ,
            "DSEC_NATS_SERVERS": settings["nats_servers"][0],
            "DSEC_NATS_CREDENTIALS": settings["nats_credentials"],
            "DSEC_STATE_DIRECTORY": str(directory),
            "DSEC_RUNTIME_FILE": str(self._runtime_file),
            "DSEC_WARM_UP_S": str(3 * BEAT_S),
            "DSEC_LOG_LEVEL": "error",
            **variables,
        }
        self._process: asyncio.subprocess.Process

    async def start(self) -> None:
        """Return when it takes requests."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dsec_scheduler", env=self._environment
        )
        await until(self._runs, timeout_s=30)

    def _runs(self) -> bool:
        return self._runtime_file.exists() and '"running"' in self._runtime_file.read_text()

    async def kill(self) -> None:
        """End it with SIGKILL."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()
