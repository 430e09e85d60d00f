"""When a sandbox's time has to be looked at: deadlines and idle times together. No I/O."""

from __future__ import annotations

from dsec_sandboxd.deadlines import Deadlines
from dsec_sandboxd.living import Living


class Times:
    """What the node's core knows of time.

    Attributes:
        now_s: the latest moment heard of; ticks tell it once a second, and when something is due.
        due: by local id, when to look at a sandbox again.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.due = Deadlines()

    def heard(self, monotonic_s: float) -> float:
        """Note that it is this late, at least, and return how late it is."""
        self.now_s = max(self.now_s, monotonic_s)
        return self.now_s

    def begin(self, living: Living, now: float, now_s: float) -> None:
        """Begin to count for a sandbox that is there as of now."""
        self.heard(now_s)
        living.used_s = now_s
        record = living.record
        if record.deadline_s and not living.ends_s:
            living.ends_s = now_s + max(record.created_at + record.deadline_s - now, 0.0)
        living.deadline_s = now_s + max(record.expires_at - now, 0.0) if record.expires_at else 0.0
        if living.ends_s:  # also if the wall clock was put back meanwhile
            living.deadline_s = min(living.deadline_s, living.ends_s)
        self.look_again(living)

    def look_again(self, living: Living) -> None:
        """Note when a sandbox has to be looked at next."""
        due_s = living.due_s()
        if due_s is None:
            self.stop(living.record.local)
        else:
            self.due.set(living.record.local, due_s)

    def stop(self, local: str) -> None:
        """Look at a sandbox no more. Idempotent."""
        self.due.discard(local)

    def take_due(self, now_s: float) -> list[str]:
        """Return which to look at now, the earliest first; each is then to be noted again."""
        return self.due.take_due(now_s)
