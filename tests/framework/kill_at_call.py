"""Kill a process at its n-th system call: run as a program, so that tracing has its own thread.

    python kill_at_call.py PID NTH WHOM

WHOM is ``itself`` or ``child``: the process PID, or the first process that it clones from now on.
It prints ``ready`` when it traces, and at the end ``killed``, or ``ended`` when there were fewer
calls. A call stops twice, at its begin and its end, and is counted twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

SEIZE, INTERRUPT, SYSCALL, CONT = 0x4206, 0x4207, 24, 7
TRACE_SYSGOOD, TRACE_CLONE, TRACE_FORK, TRACE_VFORK = 1, 8, 2, 4
WALL = 0x40000000

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long


def ptrace(request: int, pid: int, data: int = 0) -> None:
    if libc.ptrace(request, pid, None, data) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class Killer:
    """Follows one process and its children, and kills the target at its n-th stop."""

    def __init__(self, traced: int, nth: int, whom: str) -> None:
        self.traced = traced
        self.nth = nth
        self.target = traced if whom == "itself" else 0
        self.calls = 0
        self.began = False

    def stopped(self, pid: int, status: int) -> bool:
        """Take one stop of a process; return whether the target was killed."""
        number, event, deliver = os.WSTOPSIG(status), status >> 16, 0
        if number == signal.SIGTRAP | 0x80:
            if self.reached(pid):
                os.kill(self.target, signal.SIGKILL)
                return True
        elif pid != self.traced and not self.target:
            self.target = pid
        elif event == 0 and number != signal.SIGTRAP:
            deliver = number
        if pid == self.traced and not self.began:
            self.began = True
            say("ready")
        with contextlib.suppress(OSError):  # it has just been killed by somebody else
            watched = pid == self.target or (pid == self.traced and not self.target)
            ptrace(SYSCALL if watched else CONT, pid, deliver)
        return False

    def reached(self, pid: int) -> bool:
        """Count a system call; return whether it is the one."""
        self.calls += pid == self.target
        return pid == self.target and self.calls == self.nth


def main() -> None:
    killer = Killer(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    ptrace(SEIZE, killer.traced, TRACE_SYSGOOD | TRACE_CLONE | TRACE_FORK | TRACE_VFORK)
    ptrace(INTERRUPT, killer.traced)
    while True:
        try:
            pid, status = os.waitpid(-1, WALL)
        except ChildProcessError:
            break
        if os.WIFSTOPPED(status):
            if killer.stopped(pid, status):
                say("killed")
                return
        elif pid in {killer.traced, killer.target}:
            break
    say("ended")


if __name__ == "__main__":
    main()
