"""Commands of a node, put together: one-shots, started execs, and where both are kept."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from dsec_common.bus_types import Request
from dsec_common.clock import Clock
from dsec_common.wire.base import Message
from dsec_common.wire.exec import (
    AddArguments,
    CancelExec,
    InspectExec,
    ListExecs,
    ReadExec,
    ResizeExec,
    SignalExec,
    StartExec,
    WriteStdin,
)
from dsec_common.wire.sandbox import ExecCommand, ExecResult
from dsec_sandboxd.commands import Commands
from dsec_sandboxd.config import SandboxdConfig
from dsec_sandboxd.exec_arguments import ArgumentLists
from dsec_sandboxd.exec_doors import Admit, ExecDoors
from dsec_sandboxd.exec_store import ExecStore
from dsec_sandboxd.exec_table import ExecTable
from dsec_sandboxd.gate import Gate
from dsec_sandboxd.kernel.interface import Kernel
from dsec_sandboxd.lifecycle import local_of
from dsec_sandboxd.making import Maker
from dsec_sandboxd.one_shots import OneShots
from dsec_sandboxd.ports import Uses
from dsec_sandboxd.state import NodeState
from dsec_sandboxd.step_log import StepLog

#: A killed command is over within milliseconds where anybody can tell.
_END_PATIENCE_S: Final = 2.0

Serve = Callable[..., Awaitable[Any]]
_Verb = tuple[str, type[Message], Callable[[Any], Awaitable[Any]]]


class _Uses:
    def __init__(self, late: Callable[[], Uses]) -> None:
        self._late = late

    def began(self, local: str) -> None:
        self._late().began(local)

    def ended(self, local: str) -> None:
        self._late().ended(local)


class ExecService:
    """Everything about commands that the daemon's shell has to hold.

    Attributes:
        commands: runs one-shots.
        table: knows the started execs.
    """

    def __init__(
        self,
        config: SandboxdConfig,
        state: NodeState,
        kernel: Kernel,
        steps: StepLog,
        uses: Callable[[], Gate],
        *,
        clock: Clock,
        run_path: Path,
    ) -> None:
        store = ExecStore(
            run_path / "execs",
            size_bytes=config.exec_memory_bytes,
            output_bytes=config.exec_output_bytes,
        )
        self.table = ExecTable(
            kernel,
            store,
            _Uses(uses),
            kept_s=config.exec_kept_s,
            kept_max=config.execs_kept_max,
            execs_max=config.execs_max,
        )
        self._one_shots = OneShots(
            self.table, kept_s=config.exec_kept_s, kept_bytes=config.exec_results_bytes
        )
        self.commands = Commands(
            state,
            kernel,
            steps,
            self.table,
            self._one_shots,
            end_known=lambda record: uses().end_known(record),
            timeout_max_s=config.exec_timeout_max_s,
        )
        self._state = state
        self._endings: set[asyncio.Task[None]] = set()
        self._admit: Admit
        self._arguments = ArgumentLists(clock)
        self._doors = ExecDoors(
            state,
            self.table,
            self.commands,
            steps,
            self._arguments,
            clock=clock,
            timeout_max_s=config.exec_timeout_max_s,
        )

    def use_actions(self, admit: Admit) -> None:
        """Take what says whether commands may run in actions, and what they see then."""
        self._doors.admit = self._admit = admit

    def open(self, maker: Maker) -> None:
        """Make the place for output; be told of sandboxes that end or are taken over.

        Raises:
            DsecError: naming the call that failed.
        """
        self.table.store.open()
        maker.on_end(self.table, self._put_back)
        maker.on_end(self._arguments)
        maker.on_adoption(self.table)

    async def serve(
        self,
        serve: Serve,
        verb: Callable[[str], str],
        inside: Callable[[Any], Any],
        many: int,
    ) -> None:
        """Take requests. One that waits holds its place, so there are places for all of them."""
        doors = self._doors
        # It waits by itself for an adopted sandbox's commands.
        run = self._unless_known(inside(self._exec))
        await serve(verb("exec"), ExecCommand, run, concurrency=many)
        # What only looks at commands neither wakes a sandbox nor is a use of it.
        looks: tuple[_Verb, ...] = (
            ("read_exec", ReadExec, doors.read),
            ("inspect_exec", InspectExec, doors.inspect),
            ("list_execs", ListExecs, doors.list),
        )
        for name, kind, handler in looks:
            await serve(verb(name), kind, self._adopted(handler), concurrency=many)
        uses: tuple[_Verb, ...] = (
            ("start_exec", StartExec, doors.start),
            ("add_arguments", AddArguments, self._arguments.add),
            ("write_stdin", WriteStdin, doors.write_stdin),
            ("resize_exec", ResizeExec, doors.resize),
            ("signal_exec", SignalExec, doors.signal),
            ("cancel_exec", CancelExec, doors.cancel),
        )
        for name, kind, handler in uses:
            await serve(verb(name), kind, inside(self._adopted(handler)), concurrency=many)

    async def _exec(self, request: Request[ExecCommand]) -> ExecResult:
        command = request.message
        if not command.action:
            return await self.commands.exec(request)
        record = self._state.running(request.project, local_of(request))
        await self.table.adopted(record.local)
        # From here to its start nothing is waited for: whoever ends the action finds it.
        record = self._admit(record, command.action, command.message_id)
        return await self.commands.run(command, record)

    async def end(self, local: str, message_id: str) -> None:
        """Kill the command of a message and return when it is over; one that is over is fine.

        That of a sandbox that stands still is killed all the same, but its PID 1 cannot say so.
        One that starts only later, or is found only later, is killed then.

        Raises:
            DsecError: it is not known any more.
        """
        ending = asyncio.create_task(self._end(local, message_id), name=f"end {message_id}")
        self._endings.add(ending)
        ending.add_done_callback(self._has_ended)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_PATIENCE_S):
                await asyncio.shield(ending)

    async def _end(self, local: str, message_id: str) -> None:
        await self.table.adopted(local)
        await self._doors.started(local, message_id)
        over = self._one_shots.running((local, message_id))
        if over is not None and self.commands.cancel(local, message_id):
            await asyncio.wait({over})
        elif (one := self.table.find_message(local, message_id)) is not None:
            await one.cancel(0.0)

    def _has_ended(self, ending: asyncio.Task[None]) -> None:
        self._endings.discard(ending)
        if not ending.cancelled():
            ending.exception()  # nobody may wait for it any more

    def _unless_known(
        self, inside: Callable[[Request[ExecCommand]], Awaitable[ExecResult]]
    ) -> Callable[[Request[ExecCommand]], Awaitable[ExecResult]]:
        """Return ``inside`` for new commands; asking for the result of another wakes nothing."""

        async def run(request: Request[ExecCommand]) -> ExecResult:
            if self.commands.knows(local_of(request), request.message.message_id):
                return await self.commands.exec(request)
            return await inside(request)

        return run

    def _adopted(self, handler: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        """Return ``handler`` for when the commands of an adopted sandbox are known."""

        async def known(request: Any) -> Any:
            await self.table.adopted(local_of(request))
            return await handler(request)

        return known

    async def _put_back(self, local: str) -> None:
        self._one_shots.put_back(local)
        await self.table.sandbox_put_back(local)

    def tick(self) -> None:
        """Let time pass: what is kept long enough is forgotten."""
        self.table.remove_old()
        self._one_shots.remove_old()
        self._arguments.remove_old()

    def close(self, *, keep: bool) -> None:
        """Let go of everything but what the kernel holds; with ``keep``, for a later daemon."""
        for ending in self._endings:
            ending.cancel()
        if keep:
            self.commands.leave()
        self.table.close(keep=keep)
