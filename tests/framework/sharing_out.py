"""How the suite is shared out among processes (``pytest -n 2``), a file's tests to one of them.

What takes a file's tests most of the time is waiting (a server starts, a lease runs out), so two
processes side by side need little more than half the time of one. Each sees mounts of its own only.
A test whose figures are the whole machine's is marked ``alone`` and left to a run without others.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

import pytest

SESSION_PLATFORM: Final = "t"
"""What the nodes of a process's platform for all its end-to-end tests begin with, before its id."""

# The longest come first, so that at the end no process waits for another one's last long file.
_ORDER: Final = ("machines", "e2e", "contract", "security", "kernel", "component", "unit")
_CLONE_NEWNS: Final = 0x00020000
_MS_REC: Final = 1 << 14
_MS_PRIVATE: Final = 1 << 18


def pytest_configure(config: pytest.Config) -> None:
    """Give each of several processes mounts of its own: those of the others are no leaks."""
    if hasattr(config, "workerinput") and os.geteuid() == 0:
        _leave_mount_namespace()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the directories in order; a file's tests stay as they are."""
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    directory = item.path.parent.name
    return _ORDER.index(directory) if directory in _ORDER else len(_ORDER)


def _leave_mount_namespace() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        number = ctypes.get_errno()
        raise OSError(number, f"a mount namespace of its own: {os.strerror(number)}")
