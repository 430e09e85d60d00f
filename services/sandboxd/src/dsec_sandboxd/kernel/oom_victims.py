"""Which process the kernel ended for want of memory: the tracepoint ``oom:mark_victim``.

The cgroups tell that a sandbox ran out of memory, not who died of it. The tracepoint does, in a
record that the kernel writes: process id, name and user. The user tells the sandbox, whose ids are
its own alone; the name is the process's own word, and is shown as such. A host without the
tracepoint still reports ``oom``, without a name.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec_sandboxd.kernel.interface import IDS_PER_SANDBOX, OomVictim
from dsec_sandboxd.kernel.tracepoints import Record, Tracepoint

#: How many a sandbox's log keeps by name.
_KEPT_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class MarkedVictim:
    """One process that the kernel chose to end."""

    name: str
    """Its own word for itself, at most 15 bytes, unprintable characters replaced."""
    host_pid: int
    host_uid: int
    pid: int = 0
    """Its id inside its innermost pid namespace; 0 when it was gone before it could be asked."""
    cgroup: str = ""
    """Its v2 cgroup on the host; empty when it was gone before it could be asked."""

    def is_of(self, base_id: int) -> bool:
        """Return whether it was a process of the sandbox whose ids begin at ``base_id``."""
        return base_id <= self.host_uid < base_id + IDS_PER_SANDBOX


class VictimLog:
    """The latest processes of one sandbox that ended for want of memory."""

    def __init__(self) -> None:
        self._latest: deque[MarkedVictim] = deque(maxlen=_KEPT_MAX)
        self._first: MarkedVictim | None = None
        self.count = 0
        """How many there were in all."""

    def note(self, victim: MarkedVictim) -> None:
        """Remember one."""
        self.count += 1
        self._first = self._first or victim
        self._latest.append(victim)

    def first_since(self, count: int, command: str) -> OomVictim | None:
        """Return the first after there were ``count``, by preference one of this command's own."""
        new = list(self._latest)[max(0, len(self._latest) - (self.count - count)) :]
        own = [victim for victim in new if victim.cgroup.endswith(f"/exec-{command}")]
        for victim in own or new:
            return OomVictim(name=victim.name, pid=victim.pid)
        return None

    def say(self, *, end_all: bool) -> str:
        """Return one sentence on how want of memory ended the sandbox.

        The kernel marks also those that were killed with the one it chose, when they want memory
        on their way out. Where the first want of memory ends all (``end_all``), the first is the
        chosen one; elsewhere others may have ended before, and it is the latest PID 1, else the
        latest.
        """
        if self._first is None:
            return "its memory limit was reached and its PID 1 was killed"
        latest = self._latest[-1]
        inits = (victim for victim in reversed(self._latest) if victim.pid == 1)
        victim = self._first if end_all else next(inits, latest)
        which = f"{victim.name!r} (process {victim.pid})" if victim.pid else repr(victim.name)
        return f"its memory limit was reached; the kernel chose {which}, and PID 1 was killed"


class OomVictims:
    """Tells of every process of the host that runs into the out-of-memory killer.

    Raises:
        OSError: a kernel without the tracepoint, or one that does not let this process listen.
    """

    def __init__(self) -> None:
        self._events = Tracepoint("oom/mark_victim", ("pid", "comm", "uid"))

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when ``read`` has news."""
        return self._events.fileno()

    def read(self) -> list[MarkedVictim]:
        """Return the victims since the last call, the earliest first. Never waits."""
        return [_describe(record) for record in self._events.read()]

    def close(self) -> None:
        """Close every descriptor. Idempotent."""
        self._events.close()


def _describe(record: Record) -> MarkedVictim:
    pid, uid = record.number("pid"), record.number("uid")
    name = record.text("comm").decode(errors="replace")
    shown = "".join(letter if letter.isprintable() else "\ufffd" for letter in name)
    inside, cgroup = _ask(pid, uid)
    return MarkedVictim(shown, pid, uid, inside, cgroup)


def _ask(pid: int, uid: int) -> tuple[int, str]:
    """Return a dying process's id inside and its v2 cgroup; nothing when another has its number."""
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
        groups = Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return 0, ""
    fields = dict(re.findall(rb"^(NSpid|Uid):\s*(.+)$", status, re.MULTILINE))
    if int(fields[b"Uid"].split()[0]) != uid:
        return 0, ""
    found = re.search(r"^0::(.+)$", groups, re.MULTILINE)
    return int(fields[b"NSpid"].split()[-1]), found.group(1) if found else ""
