"""Giving a sandbox that was made ahead of need to the one who wants it now.

It has its id and its host name from the start. What is its owner's own in the kernel are limits; of
these only those that differ are changed, so most often nothing is done here but to look whether it
lives.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Final

from dsec_common.errors import invalid, unavailable
from dsec_sandboxd.kernel.adoption import is_alive
from dsec_sandboxd.kernel.init import ended_error
from dsec_sandboxd.kernel.part import KernelPart
from dsec_sandboxd.kernel.protocol import SpawnerKind, SpawnerRequest
from dsec_sandboxd.kernel.specification import check_spec

if TYPE_CHECKING:
    from dsec_sandboxd.kernel.interface import SandboxSpec
    from dsec_sandboxd.kernel.sandbox import Sandbox

#: What no process of a sandbox can be given later.
_FIXED: Final = (
    "layers",
    "on_snapshot",
    "best_effort",
    "core_scheduling",
    "oom_group",
    "cpu_quota",
    "hostname",
)
#: States of a process that does not go on by itself: stopped, traced, dead.
_STANDS_STILL: Final = frozenset(b"TtXxZ")
#: With one of these on its way it will be in such a state before it does anything else.
_ENDS_OR_STOPS: Final = 1 << (signal.SIGKILL - 1) | 1 << (signal.SIGSTOP - 1)


class Binding(KernelPart):
    """The part of ``Kernel`` that hands out what was made ahead. See the interface."""

    _bound: dict[str, str]
    _missing: tuple[str, ...]

    async def bind(self, spec: SandboxSpec) -> None:
        """Give a sandbox that nothing has run in yet the limits of its owner."""
        limits = check_spec(spec, self._missing)
        sandbox = self._require(spec.local)
        made, sandbox.spec = sandbox.spec, None
        if made is None or any(getattr(made, name) != getattr(spec, name) for name in _FIXED):
            sandbox.spec = made
            raise invalid(f"the sandbox {spec.local!r} was not made for this")
        if (made.disk_bytes, made.inodes) != (spec.disk_bytes, spec.inodes):
            await self._resize(sandbox, spec)
        if (made.memory_bytes, made.cpus, made.pids) != (spec.memory_bytes, spec.cpus, spec.pids):
            sandbox.cgroup.change_limits(limits)
        _check_living(sandbox)

    async def _resize(self, sandbox: Sandbox, spec: SandboxSpec) -> None:
        """Give its writable layer another size."""
        spawner = await self._living_spawner()
        await spawner.request(
            SpawnerRequest(
                kind=SpawnerKind.RESIZE,
                slot=sandbox.slot,
                base_id=self._base_id(sandbox.slot),
                disk_bytes=spec.disk_bytes,
                inodes=spec.inodes,
            )
        )

    def _rename(self, sandbox: Sandbox, local: str) -> None:
        del self._sandboxes[sandbox.local]
        self._bound.pop(sandbox.cgroup.local, None)
        sandbox.local = local
        self._sandboxes[local] = sandbox
        if local != sandbox.cgroup.local:
            self._bound[sandbox.cgroup.local] = local


def _check_living(sandbox: Sandbox) -> None:
    """Return if PID 1 lives and is not stopped: then it waits for what it is told.

    Asking it would wake it, which costs more than all else that a hand-out does; what the kernel
    says of it says as much, since nothing has run in the sandbox yet that could keep it busy.

    Raises:
        DsecError: ``unavailable`` otherwise.
    """
    stands_still = _stands_still(sandbox.pidfd)
    # After that: a process that lives now was the one that was looked at.
    if sandbox.ending is not None or not sandbox.init.alive or not is_alive(sandbox.pidfd):
        raise ended_error()
    if stands_still:
        raise unavailable(f"PID 1 of {sandbox.local!r} stands still")


def _stands_still(pidfd: int) -> bool:
    """Return whether a process is stopped or dead, or is about to be."""
    try:
        pid = _field(_read(f"/proc/self/fdinfo/{pidfd}"), b"Pid:").decode()
        status = _read(f"/proc/{pid}/status")
        state = _field(status, b"\nState:")[0]
        pending = int(_field(status, b"\nSigPnd:"), 16) | int(_field(status, b"\nShdPnd:"), 16)
    except (OSError, ValueError, IndexError):
        return True
    return state in _STANDS_STILL or bool(pending & _ENDS_OR_STOPS)


def _field(text: bytes, name: bytes) -> bytes:
    """Return the first word after a name; ``ValueError`` when the name is not there."""
    at = text.index(name) + len(name)
    return text[at : text.index(b"\n", at)].split(maxsplit=1)[0]


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # a hot path; a Path costs twice that
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)
