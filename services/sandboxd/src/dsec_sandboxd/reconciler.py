"""Finding and removing what this node has that belongs to no sandbox, at its start and regularly.

A crash may come after any line, and people and programs with the same rights leave things too. What
is looked at carries this node's name or is below its own directories; what another node has is
never touched, nor anything of a sandbox from the moment on that its intent is kept.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

import structlog

from dsec_common.clock import Clock
from dsec_common.errors import DsecError
from dsec_sandboxd import metrics
from dsec_sandboxd.kernel.interface import Kernel, Orphan
from dsec_sandboxd.layer_holds import LayerHolds
from dsec_sandboxd.layers.names import DIGEST_PREFIX
from dsec_sandboxd.run_directory import RunDirectory

_log: Final = structlog.get_logger(__name__)
_MNT_DETACH: Final = 2
_libc: Final = ctypes.CDLL(None, use_errno=True)


class Keeper(Protocol):
    """A part of the daemon that keeps files and knows which of them it still needs."""

    def remove_orphans(self) -> list[Orphan]:
        """Remove the files that nobody needs; return what was found."""
        ...


class Reconciler:
    """Looks for orphans, removes them, counts them and says so."""

    def __init__(
        self,
        kernel: Kernel,
        holds: LayerHolds,
        directories: RunDirectory,
        is_living: Callable[[str], bool],
        keepers: Sequence[Keeper] = (),
    ) -> None:
        """Take the parts to look at.

        Args:
            kernel: knows its own sandboxes.
            holds: knows which layers are in use.
            directories: of the sandboxes.
            is_living: whether a local id belongs to a sandbox that is not over.
            keepers: parts that have files of their own.
        """
        self._kernel = kernel
        self._holds = holds
        self._directories = directories
        self._is_living = is_living
        self._keepers = keepers

    async def run(self, clock: Clock, interval_s: float) -> None:
        """Remove orphans each ``interval_s`` until cancelled."""
        while True:
            await clock.sleep(interval_s)
            await self.run_once()

    async def run_once(self) -> list[Orphan]:
        """Remove every orphan that can be removed; return what was found.

        What cannot be removed is logged and looked at again next time.
        """
        found: list[Orphan] = []
        try:
            found += await self._kernel.reconcile(self._is_held)
        except DsecError as error:
            _log.error("reconcile_failed", part="kernel", error=str(error))
        found += self._remove_mounts()
        await asyncio.sleep(0)  # requests go first
        found += self._remove_directories()
        for keeper in self._keepers:
            try:
                found += keeper.remove_orphans()
            except (DsecError, OSError) as error:
                _log.error("reconcile_failed", part=type(keeper).__name__, error=str(error))
        for orphan in found:
            metrics.ORPHANS.labels(orphan.kind).inc()
            _log.warning("orphan_removed", kind=orphan.kind, name=orphan.name)
        return found

    def _is_held(self, digest: str) -> bool:
        # What else is held, copies of writable layers say, has owners of its own.
        return not digest.startswith(DIGEST_PREFIX) or digest in self._holds.in_use

    def _remove_directories(self) -> list[Orphan]:
        found = []
        for local in self._directories.names():
            if self._is_living(local):
                continue
            try:
                self._directories.remove(local)
            except OSError as error:
                _log.error("orphan_stays", kind="run_directory", name=local, error=str(error))
            else:
                found.append(Orphan("run_directory", local))
        return found

    def _remove_mounts(self) -> list[Orphan]:
        """Detach what is mounted below the run directories: sandboxes have no mounts there."""
        found = []
        own = str(self._directories.path)
        for target in mounts_below(own):
            if _libc.umount2(os.fsencode(target), _MNT_DETACH) < 0:
                error = os.strerror(ctypes.get_errno())
                _log.error("orphan_stays", kind="mount", name=target, error=error)
            else:
                found.append(Orphan("mount", target))
        return found


def mounts_below(directory: str) -> list[str]:
    """Return where this mount namespace has mounts below a directory, the latest first."""
    lines = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines()
    targets = [_unescaped(line.split()[4]) for line in lines]
    return [target for target in reversed(targets) if target.startswith(f"{directory}/")]


def _unescaped(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
