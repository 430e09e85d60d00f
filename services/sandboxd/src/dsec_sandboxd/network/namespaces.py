"""Network namespaces: the calling thread enters one, and comes back whatever happens."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

CLONE_NEWNET: Final = 0x4000_0000
_MS_BIND: Final = 4096
_MNT_DETACH: Final = 2
_OWN: Final = "/proc/thread-self/ns/net"

_libc = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")


def _check(result: int, operation: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{operation}: {os.strerror(number)}")


def open_own() -> int:
    """Return a descriptor of the calling thread's network namespace; the caller closes it."""
    return os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)


def enter(namespace_fd: int) -> None:
    """Move the calling thread, and no other, into a network namespace."""
    _check(_libc.setns(namespace_fd, CLONE_NEWNET), "setns")


def enter_new() -> None:
    """Move the calling thread into a network namespace of its own."""
    _check(_libc.unshare(CLONE_NEWNET), "unshare")


@contextmanager
def inside(namespace_fd: int) -> Iterator[None]:
    """Let the calling thread be in ``namespace_fd`` for a while. Nothing may be awaited within."""
    home = open_own()
    try:
        enter(namespace_fd)
        try:
            yield
        finally:
            try:
                enter(home)
            except OSError:  # pragma: no cover  cannot fail; going on in there would be unsafe
                os.abort()
    finally:
        os.close(home)


def make_in(namespace_fd: int, make: Callable[[], T]) -> T:
    """Return what ``make`` makes in a namespace: a socket belongs to where it was made."""
    with inside(namespace_fd):
        return make()


def tcp_socket_in(namespace_fd: int, family: socket.AddressFamily) -> socket.socket:
    """Return a non-blocking TCP socket of a namespace."""

    def make() -> socket.socket:
        return socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)

    return make_in(namespace_fd, make)


def keep_at(path: Path) -> None:
    """Keep the calling thread's namespace alive under a path, over the end of this process."""
    path.touch(mode=0o600)
    try:
        _check(_libc.mount(os.fsencode(_OWN), os.fsencode(path), b"none", _MS_BIND, None), "mount")
    except OSError:
        path.unlink()
        raise


def is_kept_at(path: Path) -> bool:
    """Return whether a namespace is kept under a path."""
    try:
        # A namespace file lies on nsfs, not on the file system of its directory.
        return path.stat().st_dev != path.parent.stat().st_dev
    except FileNotFoundError:
        return False


def let_go_of(path: Path) -> None:
    """Undo :func:`keep_at`. Idempotent."""
    while is_kept_at(path):
        _check(_libc.umount2(os.fsencode(path), _MNT_DETACH), "umount2")
    path.unlink(missing_ok=True)
