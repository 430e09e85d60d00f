"""HTTP connections that end at a deadline, however slowly the other side goes on."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import urllib.request
from types import TracebackType
from typing import Any, Self


class Deadline:
    """Breaks the connections of one request when its time is over.

    The library's own timeout is of each read, so that a server which sends a byte now and then is
    never late.

    Attributes:
        is_over: whether the time is over.
    """

    def __init__(self, timeout_s: float) -> None:
        """Take the time; it begins to run with the context."""
        self.is_over = False
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._timer = threading.Timer(timeout_s, self._end)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        """Begin."""
        self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let go of the connections.

        Raises:
            TimeoutError: when the time was over: an error is its work then, and what looks like
                the end of an answer may be, too.
        """
        self._timer.cancel()
        self._timer.join()
        for watched in self._sockets:
            watched.close()
        if self.is_over and (error is None or isinstance(error, Exception)):
            raise TimeoutError from error

    def connected(self, *arguments: Any, **options: Any) -> socket.socket:
        """Return a new connection that breaks at the deadline."""
        made = socket.create_connection(*arguments, **options)
        # Another handle of the same connection: the first one may change hands, as for TLS.
        watched = made.dup()
        with self._lock:
            self._sockets.append(watched)
            if self.is_over:
                _break(watched)
        return made

    def handlers(self) -> list[urllib.request.BaseHandler]:
        """Return what opens addresses over such connections."""
        deadline = self

        class Connection(http.client.HTTPConnection):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                self._create_connection = deadline.connected

        class SecureConnection(http.client.HTTPSConnection):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                self._create_connection = deadline.connected

        class Handler(urllib.request.HTTPHandler):
            def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
                return self.do_open(Connection, req)

        class SecureHandler(urllib.request.HTTPSHandler):
            def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
                return self.do_open(SecureConnection, req)

        return [Handler(), SecureHandler()]

    def _end(self) -> None:
        with self._lock:
            self.is_over = True
            for watched in self._sockets:
                _break(watched)


def _break(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side was quicker
        connection.shutdown(socket.SHUT_RDWR)
