"""An agent: what it does is ``execute``, what it may use its contract says."""

from __future__ import annotations

import abc
import asyncio
import inspect
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self, overload

from dsec.agent.context import Context
from dsec.agent.contract import AgentContract, agent_contract
from dsec.tools import Desk, Tool, is_stream, is_tool_call, load_tool
from dsec.tools.calls import ToolCall, ToolResult
from dsec_common.errors import DsecError, invalid, not_found

if TYPE_CHECKING:
    from dsec.tools.files import Files
    from dsec.tools.http import HttpClient
    from dsec.tools.llm import Llm
    from dsec.tools.pdf import PdfParser
    from dsec.tools.shell import Shell
    from dsec.tools.sql import Sql

CONTRACT_VARIABLE: Final = "DSEC_AGENT_CONTRACT"
CALLS_KEPT: Final = 100


class Agent(abc.ABC):
    """Derive from it, say what it does in :meth:`execute`, and call :meth:`serve`.

    Its contract, the YAML file that is registered with it, says which tools it may use and how.
    It is what ``DSEC_AGENT_CONTRACT`` names, else the file beside the class's own with the same
    name (``weather_agent.yaml`` beside ``weather_agent.py``), else ``agent.yaml`` there. Without a
    contract it may use no tool.

    The checks of permissions and limits are the agent's own, so that it learns of a mistake at
    once. What a sandbox can do is decided outside of it: by its network policy, its limits, and
    its node, which makes the calls of tools that need a network.

    Attributes:
        tools: further tools by name, beside those of this package and of plug-ins.
        context: its way to the platform.
    """

    tools: ClassVar[Mapping[str, type[Tool]]] = {}

    def __init__(
        self,
        *,
        contract: str | Path | Mapping[str, Any] | None = None,
        context: Context | None = None,
    ) -> None:
        """Read the contract.

        Args:
            contract: a file, or what one says; by default where the class says.
            context: another way to the platform than the usual one.

        Raises:
            DsecError: ``invalid``, naming what is wrong with the contract.
        """
        self._contract = self._read_contract(contract)
        self.context = context or Context(self._contract.name or type(self).__name__)
        self._open: dict[str, Tool] = {}
        self._opening = threading.RLock()
        self._calls: deque[ToolResult] = deque(maxlen=CALLS_KEPT)
        self._last = threading.local()

    @abc.abstractmethod
    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Do the agent's work: take arguments that are JSON, return JSON. It may be ``async``."""

    def serve(self, arguments: Sequence[str] | None = None) -> None:
        """Take work and do it: from the trainer, the command line, or standard input.

        With arguments (by default those of the program) it works once: ``--location 5`` is the
        argument ``location`` of :meth:`execute`. In a sandbox that serves a rollout it works for
        the trainer until that says ``done``; ``docs/agent-protocol.md`` has the stages. Otherwise
        it reads its input from standard input as JSON, and prints its output as JSON, as a step
        of a DAG does.

        SIGTERM lets the work that is under way be finished.

        Raises:
            SystemExit: 1 when it worked once and failed; why is the last line on standard error.
            DsecError: the rollout cannot go on.
        """
        from dsec.agent.serving import serve  # noqa: PLC0415  most agents in tests never serve

        try:
            serve(self, arguments)
        finally:
            self.close()

    @property
    def name(self) -> str:
        """The contract's name for it, else the class's."""
        return self._contract.name or type(self).__name__

    @property
    def version(self) -> str:
        """The contract's version; empty without one."""
        return self._contract.version

    @property
    def calls(self) -> Sequence[ToolResult]:
        """The last hundred tool calls, refused ones too, the oldest first; without their values."""
        return tuple(self._calls)

    # --- Tools --------------------------------------------------------------------------------

    @overload
    def get_tool(self, name: Literal["http_client"]) -> HttpClient: ...
    @overload
    def get_tool(self, name: Literal["llm", "llm_summarizer"]) -> Llm: ...
    @overload
    def get_tool(self, name: Literal["shell"]) -> Shell: ...
    @overload
    def get_tool(self, name: Literal["files"]) -> Files: ...
    @overload
    def get_tool(self, name: Literal["pdf_parser"]) -> PdfParser: ...
    @overload
    def get_tool(self, name: Literal["sql"]) -> Sql: ...
    @overload
    def get_tool(self, name: str) -> Any: ...

    def get_tool(self, name: str) -> Any:
        """Return a tool, the same one each time.

        Any tool can be had; what it may do is looked at when it is called (``denied``,
        ``exhausted``). Every call is a step of the behaviour log, named ``tool.call``.

        Raises:
            DsecError: ``not_found`` when there is no such tool.
        """
        with self._opening:
            if name not in self._open:
                kind = self.tools.get(name) or load_tool(name)
                allowance = self._contract.allowances.get(name)
                node = partial(self.context.node_tool, name)
                desk = Desk(name, allowance, self._over, node=node)
                self._open[name] = kind(desk)
            return self._open[name]

    def get_async_tool(self, name: str) -> AsyncTool:
        """Return a tool whose calls are awaited, for an ``async def execute``; see get_tool."""
        return AsyncTool(self.get_tool(name))

    def call(self, call: ToolCall) -> ToolResult:
        """Make a call that is given as data, as a model asks for it; an error is a result, too.

        The value of a streamed call is the list of its pieces.
        """
        self._last.result = None
        try:
            tool = self.get_tool(call.tool)
            method = _call_of(tool, call)
            value = method(**call.arguments)
            if is_stream(method):
                value = list(value)
        except DsecError as error:
            made: ToolResult | None = self._last.result
            return made or ToolResult(call=call, status=error.code.value, error=error)
        made = self._last.result
        assert made is not None  # noqa: S101  a call that returned was told of
        return replace(made, value=value)

    def close(self) -> None:
        """Close tools and connections. Idempotent."""
        with self._opening:
            opened, self._open = self._open, {}
        for tool in opened.values():
            tool.close()
        self.context.close()

    def __enter__(self) -> Self:
        """Return the agent itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _over(self, result: ToolResult) -> None:
        self._calls.append(result)
        self._last.result = result
        self.context.log_call(result)

    def _read_contract(self, contract: str | Path | Mapping[str, Any] | None) -> AgentContract:
        given = contract or os.environ.get(CONTRACT_VARIABLE)
        if given:
            return agent_contract(given)
        try:
            home = Path(inspect.getfile(type(self))).absolute()
        except (TypeError, OSError):  # a class of no file, as in a notebook
            return AgentContract()
        for path in (home.with_suffix(".yaml"), home.with_name("agent.yaml")):
            if path.exists():
                return agent_contract(path)
        return AgentContract()


class AsyncTool:
    """A tool whose calls are awaited, each in a thread of its own.

    ``await tool.get(…)`` returns what the call returns, ``async for piece in tool.stream(…)``
    yields what it yields. A call that is cancelled goes on to its own timeout, unheard.
    """

    def __init__(self, tool: Tool) -> None:
        """Take the tool."""
        self._tool = tool

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a call of the tool."""
        method = getattr(self._tool, name)
        if not is_tool_call(method):
            raise AttributeError(f"{self._tool.desk.name} has no call {name!r}")

        async def called(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.to_thread(method, *args, **kwargs)

        async def streamed(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            pieces = await asyncio.to_thread(method, *args, **kwargs)
            try:
                while (piece := await asyncio.to_thread(next, pieces, pieces)) is not pieces:
                    yield piece
            finally:
                await asyncio.to_thread(pieces.close)

        return streamed if is_stream(method) else called


def _call_of(tool: Tool, call: ToolCall) -> Callable[..., Any]:
    method: Callable[..., Any] | None = getattr(tool, call.method, None)
    if method is None or not is_tool_call(method):
        raise not_found(f"{call.tool} has no call {call.method!r}")
    try:
        inspect.signature(method).bind(**call.arguments)
    except TypeError as error:
        raise invalid(f"{call.action}: {error}") from None
    return method
