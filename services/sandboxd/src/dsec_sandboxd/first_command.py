"""The command that a create request carries: run as soon as its sandbox runs, answered with it.

The scheduler is answered when the sandbox runs, so that its books are right at once and nothing
there waits for a command; the caller is answered when the command has ended. The command never runs
twice: with an idempotency key its outcome is kept beside the sandbox's record, and whoever asks
again is told the same. Without one only a scheduler that missed an answer may ask, and soon; for it
the latest outcomes are kept in memory.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

import msgspec
import structlog

from dsec_common.errors import DsecError
from dsec_common.wire.base import ErrorReply
from dsec_common.wire.sandbox import (
    CreateSandbox,
    ExecCommand,
    ExecResult,
    SandboxCreated,
    SandboxInfo,
)
from dsec_common.wire.task import TaskFiles
from dsec_sandboxd.calls import TaskDesk, check_task
from dsec_sandboxd.record_store import RecordStore
from dsec_sandboxd.records import SandboxRecord

_log: Final = structlog.get_logger(__name__)

#: Of each stream so much is kept for who asks again; the first answer carries all.
OUTCOME_STREAM_MAX_BYTES: Final = 64 * 1024
_RECENT_BYTES: Final = 8 * 1024 * 1024

RUNNING: Final = "running"
DONE: Final = "done"
LOST: Final = "lost"


class Visits(Protocol):
    """The way into sandboxes."""

    def visit(self, project: str, local: str) -> AbstractAsyncContextManager[SandboxRecord]:
        """Keep a sandbox running and in use while the context lasts."""
        ...


class CommandRunner(Protocol):
    """The part of the node that runs commands."""

    def check(self, command: ExecCommand, record: SandboxRecord) -> None:
        """Return if the command can be run in the sandbox at all.

        Raises:
            DsecError: ``invalid``, naming the field.
        """
        ...

    async def run(self, command: ExecCommand, record: SandboxRecord) -> ExecResult:
        """Run a command in a running sandbox and return how it ended.

        Raises:
            DsecError: why it was not run, or that its end is not known.
        """
        ...


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a first command: one of the two; both where a file of its task is not there."""

    result: ExecResult | None = None
    error: ErrorReply | None = None
    files: dict[str, bytes] = msgspec.field(default_factory=dict)


class FirstCommands:
    """Runs first commands and keeps what came of those that may be asked about again."""

    def __init__(
        self,
        commands: CommandRunner,
        gate: Visits,
        store: RecordStore,
        tasks: TaskDesk | None = None,
    ) -> None:
        self._commands = commands
        self._gate = gate
        self._store = store
        self._tasks = tasks
        self._running: set[str] = set()
        self._recent: OrderedDict[str, bytes] = OrderedDict()
        self._recent_bytes = 0

    def check(self, request: CreateSandbox, record: SandboxRecord) -> None:
        """Return if the request's command can be run, and others where and as whom it says.

        Raises:
            DsecError: ``invalid``, naming the field.
        """
        check_task(request)
        if request.cwd or request.user:
            self._commands.check(ExecCommand(argv=("true",)), record)
        if request.command is not None:
            self._commands.check(request.command, record)

    async def run(self, request: CreateSandbox, record: SandboxRecord) -> Outcome:
        """Run the request's command once and return what came of it, which is never an error."""
        command = request.command
        if command is None:
            return Outcome()
        self._running.add(record.local)
        try:
            async with self._gate.visit(record.project, record.local):
                outcome = await self._run(command, request.task, record)
        except DsecError as error:
            outcome = Outcome(error=ErrorReply.of(error, command.message_id))
        finally:
            self._running.discard(record.local)
        outcome_kept = msgspec.msgpack.encode(_bounded(outcome))
        if request.idempotency_key:
            self._keep(record.local, outcome_kept)
        else:
            self._remember(record.local, outcome_kept)
        return outcome

    async def _run(
        self, command: ExecCommand, task: TaskFiles | None, record: SandboxRecord
    ) -> Outcome:
        if task is None or self._tasks is None:
            return Outcome(result=await self._commands.run(command, record))
        await self._tasks.write(record.local, task, record.user_for(command.user))
        result = await self._commands.run(command, record)
        files, missing = await self._tasks.read(record.local, task, record.user_for(command.user))
        error = ErrorReply.of(missing, command.message_id) if missing else None
        return Outcome(result=result, error=error, files=files)

    def _remember(self, local: str, outcome: bytes) -> None:
        self._recent[local] = outcome
        self._recent_bytes += len(outcome)
        while self._recent_bytes > _RECENT_BYTES:
            _, oldest = self._recent.popitem(last=False)
            self._recent_bytes -= len(oldest)

    def _keep(self, local: str, outcome: bytes) -> None:
        try:
            self._store.put_outcome(local, outcome)
        except DsecError as error:
            # Who asks again is told that it is lost, and not that it never ran.
            _log.error("outcome_not_kept", local=local, error=str(error))

    def told(self, info: SandboxInfo, local: str) -> SandboxInfo:
        """Return an inspection with what is known of the sandbox's first command."""
        if local in self._running:
            return msgspec.structs.replace(info, first_command=RUNNING)
        kept = self._recent.get(local) or self._store.outcome(local)
        if kept is None:
            return msgspec.structs.replace(info, first_command=LOST)
        outcome = msgspec.msgpack.decode(kept, type=Outcome)
        return msgspec.structs.replace(
            info,
            first_command=DONE,
            result=outcome.result,
            error=outcome.error,
            files=outcome.files,
        )


def _bounded(outcome: Outcome) -> Outcome:
    """Return an outcome as it is kept: state on disk must not grow by what commands print."""
    result = outcome.result
    if result is None:
        return outcome
    cut = {
        name: getattr(result, name)[:OUTCOME_STREAM_MAX_BYTES]
        for name in ("stdout", "stderr")
        if len(getattr(result, name)) > OUTCOME_STREAM_MAX_BYTES
    }
    marks = {f"{name}_truncated": True for name in cut}
    if not cut:
        return outcome
    return msgspec.structs.replace(outcome, result=msgspec.structs.replace(result, **cut, **marks))


def with_outcome(created: SandboxCreated, outcome: Outcome) -> SandboxCreated:
    """Return the answer to a create request with what came of its command."""
    return msgspec.structs.replace(
        created, result=outcome.result, error=outcome.error, files=outcome.files
    )
