"""Execs: commands that are started in a sandbox and outlive the request that started them."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from dsec_common.wire.base import Message

READ_BYTES_MAX: Final = 256 * 1024
"""The most output that one reply carries."""

STDIN_CHUNK_BYTES: Final = 128 * 1024
"""The most input that one request carries."""

ARGUMENTS_PIECE_BYTES: Final = 256 * 1024
"""The most that one piece of a long command line holds."""

WAIT_MAX_S: Final = 30.0
"""The longest that a request waits for something to happen."""


class ExecState(StrEnum):
    """Where an exec is in its life."""

    RUNNING = "running"
    EXITED = "exited"
    FAILED = "failed"


class ExecStream(StrEnum):
    """What an event is about."""

    STDOUT = "stdout"
    STDERR = "stderr"
    EXIT = "exit"


class SignalTarget(StrEnum):
    """Which of an exec's processes a signal goes to."""

    MAIN = "main"
    TREE = "tree"
    DESCENDANTS = "descendants"


class TerminalSize(msgspec.Struct, frozen=True, kw_only=True):
    """How large a terminal is, in characters: 1 to 1,000 each."""

    rows: int = 24
    columns: int = 80


class StartExec(Message, frozen=True, kw_only=True):
    """Start a command and answer at once. The same message again is the same exec.

    Attributes:
        argv: program and arguments; the program is looked up on the command's ``PATH``.
        env: variables on top of the sandbox's own.
        cwd: working directory, absolute; empty for the sandbox's own.
        user: name or ``uid[:gid]`` inside the sandbox; empty for the sandbox's own.
        stdin: its input is written piece by piece; else it is empty.
        merge_stderr: standard error goes where standard output goes.
        terminal: run it on a terminal of this size, which carries input and output.
        timeout_s: after it the whole process tree gets TERM, then KILL; 0 means never.
        labels: the caller's own, returned in listings.
        arguments_from: a list of :class:`AddArguments`, which goes behind ``argv``; empty for none.
        action: the open action that it is a command of, or empty.
    """

    argv: tuple[str, ...]
    env: dict[str, str] = msgspec.field(default_factory=dict)
    cwd: str = ""
    user: str = ""
    stdin: bool = False
    merge_stderr: bool = False
    terminal: TerminalSize | None = None
    timeout_s: float = 0.0
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    arguments_from: str = ""
    action: str = ""


class AddArguments(Message, frozen=True, kw_only=True):
    """Send a piece of a command line that is too long for one message, ahead of its start.

    Attributes:
        list_id: the caller's name for the list, fresh for each.
        first: how many arguments of it were sent before; a repeated piece changes nothing.
        arguments: at most 256 KiB together.
    """

    list_id: str
    first: int
    arguments: tuple[str, ...]


class ArgumentsAdded(Message, frozen=True, kw_only=True):
    """How many arguments of the list are there now."""

    count: int


class ExecInfo(Message, frozen=True, kw_only=True):
    """An exec as its node knows it; it is kept for a while after the end.

    Attributes:
        argv: what runs, shortened when it is long.
        last_seq: number of the last event; with the exit, when it has ended.
        exit_code: the command's own code, or None when a signal ended it.
        signal: the signal's number, or None.
        timed_out: the platform ended it at ``timeout_s``.
        cancelled: it was ended because somebody asked for it.
        oom: the kernel's out-of-memory killer ended a process of the sandbox meanwhile.
        stdout_truncated: output was dropped, oldest first, because too much of it was kept.
        error_code: why it never ran, or what is not known of its end; empty otherwise.
        error_what: which part of it was wrong: ``command``, ``user``, ``directory``.
        error_reason: what ended it instead of itself: ``rolled_back``, ``input_cut``.
    """

    exec_id: str
    state: ExecState
    argv: tuple[str, ...]
    started_at: float
    cwd: str = "/"
    user: str = "root"
    stdin: bool = False
    terminal: bool = False
    timeout_s: float = 0.0
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    last_seq: int = 0
    ended_at: float = 0.0
    duration_s: float = 0.0
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    cancelled: bool = False
    oom: bool = False
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    error_code: str = ""
    error_message: str = ""
    error_what: str = ""
    error_reason: str = ""


class ReadExec(Message, frozen=True, kw_only=True):
    """Ask for an exec's events after one of them.

    Attributes:
        after: number of the last event that the caller has; 0 for all.
        max_bytes: of output in one reply; one event always fits.
        wait_s: how long to wait for an event when there is none, at most 30 s.
    """

    exec_id: str
    after: int = 0
    max_bytes: int = READ_BYTES_MAX
    wait_s: float = 0.0


class ExecEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event. Numbers begin at 1; the exit is the last one."""

    seq: int
    stream: ExecStream
    data: bytes = b""


class ExecEvents(Message, frozen=True, kw_only=True):
    """Events in order; none means that nothing happened in time.

    Attributes:
        first_seq: the number of the oldest event that is still kept.
        truncated: events between the one asked after and the first one here were dropped.
        ended: how the exec ended, together with its exit event.
        paused_s: how long its sandbox has stood still in all, while no time limit ran.
    """

    events: tuple[ExecEvent, ...] = ()
    first_seq: int = 1
    truncated: bool = False
    ended: ExecInfo | None = None
    paused_s: float = 0.0


class WriteStdin(Message, frozen=True, kw_only=True):
    """Give an exec input. Repetitions and overlaps are harmless: each byte has its offset.

    Attributes:
        offset: of the first byte of ``data`` in all of the input.
        data: at most 128 KiB.
        end: no more comes after it; on a terminal, its end-of-file character is typed.
        wait_s: how long to wait for room when the command does not read, at most 30 s.
    """

    exec_id: str
    offset: int
    data: bytes = b""
    end: bool = False
    wait_s: float = 10.0


class StdinWritten(Message, frozen=True, kw_only=True):
    """How much input was accepted in all; go on from there.

    Attributes:
        accepted: the offset behind the last byte that was taken.
        closed: the command has closed its input, or the end was taken: nothing more is.
        paused_s: as of :class:`ExecEvents`.
    """

    accepted: int
    closed: bool = False
    paused_s: float = 0.0


class ResizeExec(Message, frozen=True, kw_only=True):
    """Give an exec's terminal another size; its foreground processes get WINCH."""

    exec_id: str
    size: TerminalSize


class SignalExec(Message, frozen=True, kw_only=True):
    """Send a signal (1 to 64) to an exec's main process, its whole tree, or all of it but that."""

    exec_id: str
    signal: int = 15
    target: SignalTarget = SignalTarget.TREE


class CancelExec(Message, frozen=True, kw_only=True):
    """End an exec: TERM to its whole tree, KILL ``grace_s`` later; answered when it is over.

    Attributes:
        exec_id: or the id of the message that a command runs for (``ExecCommand``): that one gets
            KILL at once.
    """

    exec_id: str
    grace_s: float = 2.0


class InspectExec(Message, frozen=True, kw_only=True):
    """Ask for one exec's :class:`ExecInfo`."""

    exec_id: str


class ListExecs(Message, frozen=True, kw_only=True):
    """Ask for a sandbox's execs, oldest first.

    Attributes:
        labels: only those that carry all of these.
        include_ended: also those that are kept after their end.
        after: the id of the last exec of the page before; empty for the first page.
    """

    labels: dict[str, str] = msgspec.field(default_factory=dict)
    include_ended: bool = True
    after: str = ""


class ExecList(Message, frozen=True, kw_only=True):
    """One page of a sandbox's execs; ``more`` says that a further page exists."""

    execs: tuple[ExecInfo, ...] = ()
    more: bool = False


class ExecChanged(Message, frozen=True, kw_only=True):
    """What was asked of the exec is done."""

    exec_id: str
