"""The commands of one living sandbox, each in a cgroup of its own by which its tree is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from dsec_common.errors import DsecError
from dsec_sandboxd.kernel.descriptors import check_room
from dsec_sandboxd.kernel.init import command_error, ended_error
from dsec_sandboxd.kernel.interface import CommandSpec
from dsec_sandboxd.kernel.process import Process, ProcessExit, SignalScope
from dsec_sandboxd.kernel.protocol import ListedFlag

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsec_sandboxd.kernel.cgroups import Cgroup
    from dsec_sandboxd.kernel.command import CommandRun
    from dsec_sandboxd.kernel.init import InitClient, ListedCommand
    from dsec_sandboxd.kernel.interface import CommandResult, Stream
    from dsec_sandboxd.kernel.oom_victims import VictimLog
    from dsec_sandboxd.kernel.pausing import Countdown, Freezer
    from dsec_sandboxd.kernel.process import OutputKeeper

#: How many empty command cgroups one sandbox keeps for its next commands; and how many while the
#: node has descriptors to spare: Linux gives the lowest free number, so a low one says that.
_IDLE_DIRECTORIES_MAX: Final = 2
_IDLE_DIRECTORIES_SPARE_MAX: Final = 16
_DESCRIPTORS_TO_SPARE: Final = 2048
#: How many cgroups of commands that left daemons are looked at when a command begins.
_SWEPT_AT_ONCE: Final = 2


@dataclass(slots=True)
class _CommandDirectory:
    """A v2 cgroup for one command at a time, by which its whole tree is killed."""

    name: str
    descriptor: int
    killed: bool = False
    """Never used again: Linux kills whatever ``CLONE_INTO_CGROUP`` puts into a cgroup that was once
    killed, since it compares the cgroup's count of kills with that of the parent's own."""

    @property
    def reusable(self) -> bool:
        """Whether another command may run in it."""
        return self.descriptor >= 0 and not self.killed

    def close(self) -> None:
        """Let go of the descriptor. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class _Control:
    """What a process asks of the sandbox that it runs in."""

    def __init__(
        self,
        sandbox: SandboxCommands,
        directory: _CommandDirectory,
        read_ooms: Callable[[], None],
        *,
        adopted: bool = False,
    ) -> None:
        self._sandbox = sandbox
        self._directory = directory
        self._read_ooms = read_ooms
        self._adopted = adopted
        self._notices, self._victims = sandbox.oom_notices, sandbox.oom_victims.count

    def signal(self, run_id: int, number: int, scope: SignalScope) -> None:
        self._sandbox.init.signal(run_id, self._directory.descriptor, number, scope)

    def kill(self) -> None:
        self._sandbox.kill_directory(self._directory)

    def alive(self) -> bool:
        return self._sandbox.cgroup.exec_populated(self._directory.name)

    def close_stdin(self, run_id: int) -> None:
        self._sandbox.init.close_stdin(run_id)

    def finish(self, run_id: int) -> None:
        self._sandbox.init.finish(run_id)
        if self._adopted:  # the sandbox looks at it like at any that an earlier daemon left
            self._directory.close()
        else:
            self._sandbox.give_back_directory(self._directory)

    def abandon(self) -> None:
        self._directory.close()

    def ended(self, status: int) -> ProcessExit:
        if status == 0:
            return ProcessExit.of(0)
        self._read_ooms()
        if self._sandbox.oom_notices == self._notices:
            return ProcessExit.of(status)
        victim = self._sandbox.oom_victims.first_since(self._victims, self._directory.name)
        return ProcessExit.of(status, oom=True, oom_victim=victim)

    def countdown(self, delay_s: float, callback: Callable[[], None]) -> Callable[[], None]:
        timer = self._sandbox.freezer.countdown(delay_s, callback)
        return lambda: self._sandbox.freezer.forget(timer)


class _OneShot:
    """A command from its start until its cgroup is another's: its time limit, and what it left."""

    __slots__ = ("_directory", "_notices", "_read_ooms", "_sandbox", "_timer", "_victims")

    def __init__(
        self,
        sandbox: SandboxCommands,
        directory: _CommandDirectory,
        read_ooms: Callable[[], None],
    ) -> None:
        self._sandbox = sandbox
        self._directory: _CommandDirectory | None = directory
        self._read_ooms = read_ooms
        self._notices, self._victims = sandbox.oom_notices, sandbox.oom_victims.count
        self._timer: Countdown | None = None

    def arm(self, run: CommandRun) -> None:
        """End the command when its time is over; time in which it stands still does not count."""
        if run.spec.timeout_s > 0 and not run.done.done():
            self._count(run.spec.timeout_s, lambda: self._terminate(run))

    def _count(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._timer = self._sandbox.freezer.countdown(delay_s, callback)

    def _terminate(self, run: CommandRun) -> None:
        directory, init = self._directory, self._sandbox.init
        if directory is None:
            return
        run.timed_out = True
        self._count(run.spec.grace_s, lambda: self._sandbox.kill_directory(directory))
        if init.alive:
            init.signal(run.run_id, directory.descriptor, signal.SIGTERM)

    def is_dying(self, run: CommandRun) -> bool:
        """End a command that took too long whole; return whether something of it still lives."""
        directory, sandbox = self._directory, self._sandbox
        if directory is None or not run.timed_out or sandbox.pidfd < 0:
            return False
        if not directory.killed:
            sandbox.kill_directory(directory)
        try:
            return sandbox.cgroup.exec_populated(directory.name)
        except DsecError:  # without a descriptor nobody can see
            return False

    def settle(self, run: CommandRun, result: CommandResult | None) -> CommandResult | None:
        """Let go of what the command had; return its result with whether memory ran out."""
        directory = self._directory
        if directory is None:
            return result
        ended = result is not None and not run.timed_out
        self._let_go(
            kill=not ended and (result is not None or run.was_started),
            is_empty=ended and run.left_nothing,
        )
        if result is None or result.exit_code == 0:
            return result
        self._read_ooms()
        if self._sandbox.oom_notices == self._notices:
            return result
        victim = self._sandbox.oom_victims.first_since(self._victims, directory.name)
        return replace(result, oom=True, oom_victim=victim)

    def abandon(self, _: object) -> None:
        """End what nobody waits for any more: the call was cancelled. Else without effect."""
        self._let_go(kill=True)

    def _let_go(self, *, kill: bool, is_empty: bool = False) -> None:
        directory, self._directory = self._directory, None
        if directory is None:
            return
        if self._timer is not None:
            self._sandbox.freezer.forget(self._timer)
        if kill:
            self._sandbox.kill_directory(directory)
        self._sandbox.give_back_directory(directory, is_empty=is_empty)


class SandboxCommands:
    """Running commands in a sandbox, and taking over those that run."""

    init: InitClient
    cgroup: Cgroup
    freezer: Freezer
    pidfd: int
    oom_notices: int
    oom_victims: VictimLog

    def _begin_commands(self, *, adopted: bool) -> None:
        self._idle: list[_CommandDirectory] = []
        self._returned: list[_CommandDirectory] = []
        self._occupied: deque[_CommandDirectory] = deque()  # without descriptors
        self._next_directory = 0
        self._running = 0
        if adopted:
            self._take_over_directories()

    def _end_commands(self) -> None:
        for directory in (*self._idle, *self._returned):
            directory.close()
        self._idle.clear()
        self._returned.clear()

    def prepare_directory(self) -> None:
        """Make the first command's cgroup ahead of need."""
        self._idle.append(self._make_directory())

    def begin(
        self,
        spec: CommandSpec,
        on_output: Callable[[Stream, bytes], None] | None,
        read_ooms: Callable[[], None],
        keeper: OutputKeeper | None = None,
    ) -> asyncio.Future[CommandResult]:
        """Start a command; see ``Kernel.begin``."""
        directory = self._take_directory()
        one = _OneShot(self, directory, read_ooms)
        try:
            run = self.init.start_command(
                spec,
                directory.descriptor,
                int(directory.name),
                on_output,
                keeper=keeper,
                settlement=one,
            )
        except DsecError:
            self.give_back_directory(directory)
            raise
        one.arm(run)
        run.done.add_done_callback(one.abandon)
        return run.done

    def launch(
        self,
        spec: CommandSpec,
        read_ooms: Callable[[], None],
        spool_fd: int,
        before: Callable[[int], None],
    ) -> Process:
        """Start a process; see ``Kernel.launch``."""
        directory = self._take_directory()
        control = _Control(self, directory, read_ooms)
        number = int(directory.name)
        try:
            return self.init.start_process(
                spec, directory.descriptor, number, control, spool_fd=spool_fd, before=before
            )
        except BaseException:
            self.give_back_directory(directory)
            raise

    async def processes(self, read_ooms: Callable[[], None]) -> list[Process]:
        """Take over what an earlier daemon started; see ``Kernel.processes``."""
        return [self._take_over(listed, read_ooms) for listed in await self.init.list_commands()]

    def _take_over(self, listed: ListedCommand, read_ooms: Callable[[], None]) -> Process:
        reply, flags, descriptors = listed.reply, listed.flags, list(listed.descriptors)
        spool = descriptors.pop() if flags & ListedFlag.WITH_SPOOL and descriptors else -1
        with_input = bool(flags & ListedFlag.WITH_STDIN)
        spec = CommandSpec(
            argv=("",),
            terminal=(0, 0) if flags & ListedFlag.TERMINAL else None,
            with_input=with_input,
            merge_stderr=len(descriptors) < 2 + with_input,
        )
        name = str(listed.directory)
        directory = _CommandDirectory(name, self.cgroup.open_exec(name))
        control = _Control(self, directory, read_ooms, adopted=True)
        process = Process(reply.request_id, spec, control)
        process.spool = spool
        process.is_unread = bool(flags & ListedFlag.HELD)
        if flags & ListedFlag.WITH_STREAMS and process.take_streams(descriptors):
            process.is_started()
        if reply.error:
            process.has_failed(command_error(spec, reply))
        elif flags & ListedFlag.EXITED:
            process.is_over(reply.status)
        else:
            self.init.expect(process)
        return process

    def is_free_directory(self, name: str) -> bool:
        """Return whether no command is in a directory, or about to be: another one may be."""
        free = (*self._idle, *self._returned, *self._occupied)
        return any(directory.name == name for directory in free)

    def kill_directory(self, directory: _CommandDirectory) -> None:
        """End every process in a command's cgroup; it is not used again."""
        directory.killed = True
        if self.pidfd >= 0:  # else it is dead, or lives on without this daemon
            self.cgroup.kill_exec(directory.name)

    def _take_directory(self) -> _CommandDirectory:
        if self.pidfd < 0:
            raise ended_error()  # while its cgroups are being removed it is still listed
        check_room(self._running, self.pidfd)
        self._sweep()
        directory = self._idle.pop() if self._idle else self._make_directory()
        self._running += 1
        return directory

    def _make_directory(self) -> _CommandDirectory:
        name = str(self._next_directory)
        self._next_directory += 1
        return _CommandDirectory(name, self.cgroup.create_exec(name))

    def _take_over_directories(self) -> None:
        """Have the commands' cgroups of an earlier daemon removed once they are empty."""
        for name in self.cgroup.exec_ids():
            # Whether it was ever killed is not known.
            self._occupied.append(_CommandDirectory(name, -1, killed=True))
            if name.isdecimal():
                self._next_directory = max(self._next_directory, int(name) + 1)

    def give_back_directory(self, directory: _CommandDirectory, *, is_empty: bool = False) -> None:
        """Let another command have a cgroup, once it is empty; or at once, if it is known to be."""
        self._running -= 1
        if self.pidfd < 0:
            directory.close()
        elif is_empty and self._may_keep(directory):
            self._idle.append(directory)
        else:
            self._returned.append(directory)

    def _may_keep(self, directory: _CommandDirectory) -> bool:
        spare = directory.descriptor < _DESCRIPTORS_TO_SPARE
        limit = _IDLE_DIRECTORIES_SPARE_MAX if spare else _IDLE_DIRECTORIES_MAX
        return directory.reusable and len(self._idle) < limit

    def _sweep(self) -> None:
        """Reuse the cgroups of ended commands; those with daemons left in them wait.

        Every command may leave daemons: no more than a few of their cgroups are looked at again in
        one turn, and none keeps a descriptor, of which the node has few.
        """
        again = [self._occupied.popleft() for _ in range(min(len(self._occupied), _SWEPT_AT_ONCE))]
        for directory in (*self._returned, *again):
            if self.cgroup.exec_populated(directory.name):
                directory.close()
                self._occupied.append(directory)
            elif self._may_keep(directory):
                self._idle.append(directory)
            else:
                directory.close()
                self.cgroup.remove_exec(directory.name)
        self._returned.clear()
