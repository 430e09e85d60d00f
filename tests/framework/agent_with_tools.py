"""An agent that has the tools that a test names, one of them of the tests' own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from dsec.agent import Agent, Context
from dsec.tools import Tool, tool_call
from dsec_common.errors import DsecError

EVERY = ["network_access", "read_file", "write_file", "run_command"]


class Echo(Tool):
    @tool_call("network_access")
    def say(self, word: str) -> str:
        self.note(status="said", tokens_out=1, word=word)
        return word

    @tool_call()
    def fail(self) -> None:
        raise KeyError("gone")

    @tool_call()
    def count(self, to: int) -> Iterator[int]:
        for number in range(to):
            if number == 3:
                raise ValueError("three")
            self.note(tokens_out=1)
            yield number


class Worker(Agent):
    tools: ClassVar = {"echo": Echo}

    def execute(self) -> None:
        return None


def agent(*tools: str, permissions: list[str] | None = None, **limits: Any) -> Worker:
    granted = EVERY if permissions is None else permissions
    capabilities = [{"tool": tool, "permissions": granted, **limits} for tool in tools]
    return Worker(contract={"name": "worker", "capabilities": capabilities}, context=Context("t"))


def code_of(refused: pytest.ExceptionInfo[DsecError]) -> str:
    return refused.value.code.value


@contextlib.contextmanager
def slow_server(head: bytes) -> Iterator[str]:
    """Yield the address of a server that sends a head at once, and then a byte now and then."""
    over = threading.Event()

    def serve() -> None:
        peer, _ = listener.accept()
        with peer, contextlib.suppress(OSError):
            peer.sendall(head)
            while not over.wait(0.02):
                peer.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            thread.join()
