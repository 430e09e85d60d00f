"""What a tool is, and the desk through which each of its calls goes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, cast

from dsec.tools.allowances import Allowance, RateGate
from dsec.tools.calls import ToolCall, ToolResult
from dsec_common.errors import DsecError, ErrorCode

P = ParamSpec("P")
R = TypeVar("R")
ToolT = TypeVar("ToolT", bound="Tool")

_CALL_MARK: Final = "__dsec_tool_call__"
_STREAM_MARK: Final = "__dsec_tool_stream__"


NodeCall = Callable[[str, Mapping[str, Any], float], tuple[Mapping[str, Any], bytes]]
"""Has the node make a call, with arguments, within seconds; returns its result and its body."""


class Desk:
    """Holds a tool's calls to what the contract allows, and tells of each when it is over."""

    def __init__(
        self,
        name: str,
        allowance: Allowance | None,
        tell: Callable[[ToolResult], None],
        environment: Mapping[str, str] | None = None,
        node: Callable[[], NodeCall | None] = lambda: None,
    ) -> None:
        """Take whose desk it is.

        Args:
            name: the tool's name in the contract.
            allowance: what the contract allows it; None when the contract does not name it.
            tell: takes each call when it is over, refused ones too; without what it returned, which
                may be large.
            environment: settings, as environment variables.
            node: returns what has the sandbox's node make the tool's calls, where it does.
        """
        self.name = name
        self.allowance = allowance or Allowance(tool=name)
        self.environment = os.environ if environment is None else environment
        self.node = node
        self._named = allowance is not None
        self._tell = tell
        rate = self.allowance.rate
        self._gate = None if rate is None else RateGate(name, rate)

    def admit(self, permissions: frozenset[str]) -> None:
        """Let one call through.

        Raises:
            DsecError: ``denied`` without a permission that it needs; ``exhausted`` when the tool
                was called too often.
        """
        if not self._named:
            raise DsecError(
                ErrorCode.DENIED,
                f"the agent's contract names no tool {self.name!r}; add it to its capabilities",
            )
        missing = sorted(permissions - self.allowance.permissions)
        if missing:
            raise DsecError(
                ErrorCode.DENIED,
                f"{self.name} lacks the permission {', '.join(missing)}; the agent's contract "
                "grants it where it names the tool",
                details={"permission": missing[0]},
            )
        if self._gate is not None:
            self._gate.take()

    def over(self, result: ToolResult) -> None:
        """Tell of a call."""
        self._tell(result)


class _Running:
    """A call that runs: what it says of itself, and how long it has run."""

    def __init__(self, tool: Tool, call: ToolCall) -> None:
        self.status = "ok"
        self.tokens_in = 0
        self.tokens_out = 0
        self.notes: dict[str, str] = {}
        self.by_node = False
        self.method = call.method
        self._tool = tool
        self._call = call
        self._began = time.monotonic()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Be the call that :meth:`Tool.note` speaks of; tell of it when it fails.

        Raises:
            DsecError: whatever goes wrong within.
        """
        before, _here.running = getattr(_here, "running", None), self
        try:
            yield
        except DsecError as error:
            self.over(error)
            raise
        except Exception as error:
            failed = DsecError(
                ErrorCode.INTERNAL, f"{self._call.action}: {type(error).__name__}: {error}"
            )
            self.over(failed)
            raise failed from error
        finally:
            _here.running = before

    def over(self, error: DsecError | None = None) -> None:
        self._tool.desk.over(
            ToolResult(
                call=self._call,
                status=self.status if error is None else error.code.value,
                latency_ms=1000 * (time.monotonic() - self._began),
                error=error,
                tokens_in=self.tokens_in,
                tokens_out=self.tokens_out,
                notes=self.notes,
                by_node=self.by_node,
            )
        )


class _Here(threading.local):
    running: _Running | None = None


_here: Final = _Here()


class Tool:
    """A tool. Its calls are methods that carry :func:`tool_call`.

    A plug-in is a subclass under the entry point group ``dsec.tools``; the entry's name is the
    tool's. It is made once for each agent that asks for it.
    """

    def __init__(self, desk: Desk) -> None:
        """Take the desk: ``desk.allowance`` has the limits that the tool itself has to keep."""
        self.desk = desk

    def close(self) -> None:
        """Let go of what the tool holds. Idempotent."""

    @staticmethod
    def note(*, status: str = "", tokens_in: int = 0, tokens_out: int = 0, **notes: str) -> None:
        """Say of the call that runs how it ended, what it cost and what it was about."""
        running = _here.running
        if running is None:
            return
        running.status = status or running.status
        running.tokens_in += tokens_in
        running.tokens_out += tokens_out
        running.notes.update(notes)

    def ask_node(
        self, arguments: Mapping[str, Any], timeout_s: float
    ) -> tuple[Mapping[str, Any], bytes] | None:
        """Have the node make the call that runs; None where it does not run this tool.

        The node holds it to the contract once more, and writes it down.

        Raises:
            DsecError: the node's refusal.
        """
        running, node = _here.running, self.desk.node()
        if running is None or node is None:
            return None
        running.by_node = True
        return node(running.method, arguments, timeout_s)


def tool_call(
    *permissions: str,
) -> Callable[[Callable[Concatenate[ToolT, P], R]], Callable[Concatenate[ToolT, P], R]]:
    """Make a method one of its tool's calls.

    It is refused without all of ``permissions``, counted against the rate limit, and told of when
    it is over, refused or not. What it raises other than :class:`DsecError` becomes ``internal``.
    The call of a generator begins at once and is over when the generator is.
    """
    needed = frozenset(permissions)

    def decorate(method: Callable[Concatenate[ToolT, P], R]) -> Callable[Concatenate[ToolT, P], R]:
        signature = inspect.signature(method)

        def begun(tool: ToolT, args: Any, kwargs: Any) -> _Running:
            bound = signature.bind(tool, *args, **kwargs).arguments
            arguments = {name: value for name, value in bound.items() if value is not tool}
            running = _Running(tool, ToolCall(tool.desk.name, method.__name__, arguments))
            with running.at_work():
                tool.desk.admit(needed)
            return running

        @functools.wraps(method)
        def called(tool: ToolT, *args: P.args, **kwargs: P.kwargs) -> R:
            running = begun(tool, args, kwargs)
            with running.at_work():
                value = method(tool, *args, **kwargs)
            running.over()
            return value

        @functools.wraps(method)
        def streamed(tool: ToolT, *args: P.args, **kwargs: P.kwargs) -> Iterator[Any]:
            running = begun(tool, args, kwargs)
            pieces = cast("Generator[Any, None, None]", method(tool, *args, **kwargs))
            return _stream(running, pieces)

        is_generator = inspect.isgeneratorfunction(method)
        wrapper: Any = streamed if is_generator else called
        setattr(wrapper, _CALL_MARK, True)
        setattr(wrapper, _STREAM_MARK, is_generator)
        return cast("Callable[Concatenate[ToolT, P], R]", wrapper)

    return decorate


def is_tool_call(method: object) -> bool:
    """Return whether a method is one of its tool's calls."""
    return bool(getattr(method, _CALL_MARK, False))


def is_stream(method: object) -> bool:
    """Return whether a call of a tool yields what it has piece by piece."""
    return bool(getattr(method, _STREAM_MARK, False))


def _stream(running: _Running, pieces: Generator[Any, None, None]) -> Iterator[Any]:
    with contextlib.closing(pieces):
        while True:
            with running.at_work():
                piece = next(pieces, pieces)
            if piece is pieces:
                break
            try:
                yield piece
            except GeneratorExit:
                running.status = "stopped"
                break
    running.over()
