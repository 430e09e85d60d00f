"""A sandbox that is not over, as the node's core keeps it. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dsec_common.wire.sandbox import EndCause, IdleAction, SandboxState
from dsec_sandboxd.events import DrainAsked, TouchAsked
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.states import StateFacts, facts_of

#: What its end is decided by while nobody decides.
_BY_ITSELF: Final = frozenset(
    {None, EndCause.EXITED, EndCause.KILLED, EndCause.OOM, EndCause.EXHAUSTED}
)


@dataclass(slots=True)
class Living:
    """A sandbox that is not over. Moments in ``_s`` are of a clock that never goes backwards.

    Attributes:
        record: what is kept of it.
        valid_until: Unix seconds until which whoever placed it counts on the answer.
        end_cause: set as soon as its end is decided, which may be while it is still being made.
        end_detail: what says more of it.
        gone: the kernel lost it by itself before we heard that it had been made.
        failed_ends: how often the kernel could not end it.
        deadline_s: when its time to live is over; 0 means never, or not yet known.
        ends_s: after which no touch has it live on, by its record's ``deadline_s``; 0 means never.
        used_s: when it was last in use.
        in_use: requests and calls that are in it now.
        wake: somebody waits for it to run while it is being paused.
    """

    record: SandboxRecord
    valid_until: float
    end_cause: EndCause | None = None
    end_detail: str = ""
    gone: bool = False
    failed_ends: int = 0
    deadline_s: float = 0.0
    ends_s: float = 0.0
    used_s: float = 0.0
    in_use: int = 0
    wake: bool = False

    @property
    def facts(self) -> StateFacts:
        """What its state allows."""
        return facts_of(self.record.state)

    def move_to(self, state: SandboxState, **changes: Any) -> SandboxRecord:
        """Go to another state and return the record there.

        Raises:
            AssertionError: the table of states does not know the way; nothing has changed.
        """
        if state not in self.facts.following:
            raise AssertionError(f"no sandbox goes from {self.record.state} to {state}")
        self.record = msgspec.structs.replace(self.record, state=state, **changes)
        return self.record

    def begin_anew(self, record: SandboxRecord) -> bool:
        """Become another record, before anybody was told of this one; False if its end is decided.

        That the sandbox which it was to have has died decides nothing.
        """
        if self.end_cause not in _BY_ITSELF:
            return False
        self.record = record
        self.gone, self.end_cause, self.end_detail = False, None, ""
        return True

    def retime(self, event: TouchAsked | DrainAsked) -> None:
        """Give it its times anew, or others; when they run is for the node to say."""
        record = self.record
        if isinstance(event, TouchAsked):
            ttl_s = record.ttl_s if event.ttl_s is None else event.ttl_s
            self.record = msgspec.structs.replace(
                record,
                ttl_s=ttl_s,
                idle_ttl_s=record.idle_ttl_s if event.idle_ttl_s is None else event.idle_ttl_s,
                expires_at=record.expires_with(ttl_s, event.now, record.created_at),
            )
            return
        own_end, end = record.expires_at, event.now + event.timeout_s
        ends = event.timeout_s > 0 and not 0 < own_end <= end
        ends_by_itself = record.idle_action is IdleAction.END and record.idle_ttl_s > 0
        self.record = msgspec.structs.replace(
            record,
            ttl_s=event.timeout_s if ends else record.ttl_s,
            expires_at=end if ends else own_end,
            idle_ttl_s=min(record.idle_ttl_s, event.idle_s) if ends_by_itself else event.idle_s,
            idle_action=IdleAction.END,
        )

    def due_s(self) -> float | None:
        """Return when to look at its time again, or None for never."""
        facts, moments = self.facts, []
        if self.deadline_s and facts.deadline_runs:
            moments.append(self.deadline_s)
        if self.record.idle_ttl_s and facts.idle_runs:
            moments.append(self.used_s + self.record.idle_ttl_s)
        return min(moments, default=None)

    def is_idle(self, now_s: float) -> bool:
        """Return whether nobody has used it for its idle time."""
        idle_ttl_s = self.record.idle_ttl_s
        return (
            bool(idle_ttl_s)
            and self.facts.idle_runs
            and not self.in_use
            and self.used_s + idle_ttl_s <= now_s
        )
