"""Telling of a sandbox's life: events for who listens, steps in the behaviour log."""

from __future__ import annotations

import math
from typing import Protocol

from dsec_common import subjects
from dsec_common.wire.elastic import SandboxResized
from dsec_common.wire.life import SandboxPaused, SandboxResumed
from dsec_common.wire.sandbox import EndCause, SandboxRunning
from dsec_sandboxd import metrics
from dsec_sandboxd.event_publisher import EventPublisher
from dsec_sandboxd.metering import Meters
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.state import NodeState
from dsec_sandboxd.step_log import StepLog


class Lives(Protocol):
    """Is told of the instances of agents, as soon as it is so."""

    def began(self, record: SandboxRecord) -> None:
        """Note that an instance runs."""
        ...

    def failed(self, local: str) -> None:
        """Note that an instance's first command failed."""
        ...

    def ended(self, record: SandboxRecord) -> None:
        """Note that an instance is over."""
        ...


class Announcer:
    """Publishes the events of this node's sandboxes and writes their steps. Nothing here waits.

    Of sandboxes that one request makes in number it can be told to tell later, so that who waits
    for the answer does not wait for that, too. Whatever else there is to tell of one of them comes
    after its beginning all the same.
    """

    def __init__(
        self, state: NodeState, events: EventPublisher, steps: StepLog, meters: Meters | None
    ) -> None:
        self._state = state
        self._meters = meters
        self._node = state.rules.node
        self._events = events
        self._steps = steps
        self._held_back: dict[str, list[str]] = {}  # by request: who is not told of yet
        self._untold: dict[str, SandboxRecord] = {}
        steps.before_step = self.tell
        self.lives: Lives | None = None

    def hold_back(self, request_id: str) -> None:
        """Tell of no sandbox that the request makes before :meth:`tell` is called with its id."""
        self._held_back.setdefault(request_id, [])

    def held_back(self, request_id: str) -> list[str]:
        """Return who is to be told of, the oldest first; what comes later is told at once."""
        return self._held_back.pop(request_id, [])

    def tell(self, local: str) -> None:
        """Tell that a sandbox of which nothing was told yet came to life. Idempotent."""
        if self._untold:
            record = self._untold.pop(local, None)
            if record is not None:
                self._tell_running(record)

    def tell_all(self) -> None:
        """Tell of everyone of whom nothing was told yet."""
        for local in list(self._untold):
            self.tell(local)

    def running(self, record: SandboxRecord) -> None:
        """Tell that a sandbox came to life."""
        metrics.SANDBOXES_ALIVE.set(self._state.living_count)
        if self._meters is not None:
            self._meters.began(record)
        if self.lives is not None and record.agent_version:
            self.lives.began(record)
        held_back = self._held_back.get(record.request_id)
        if held_back is None:
            self._tell_running(record)
        else:
            held_back.append(record.local)
            self._untold[record.local] = record

    def _tell_running(self, record: SandboxRecord) -> None:
        created = record.created(self._node)
        self._events.publish(
            subjects.sandbox_event(record.project, record.scoped_id(self._node), "running"),
            SandboxRunning(
                cause_id=record.request_id,
                sandbox_id=created.sandbox_id,
                request_id=record.request_id,
                created=created,
            ),
        )
        self._steps.step(
            record,
            "create",
            latency_ms=record.create_ms,
            attributes={"layers": " ".join(record.layer_references)},
            cause_id=record.request_id,
        )

    def paused(self, record: SandboxRecord) -> None:
        """Tell that a sandbox stands still."""
        self.tell(record.local)
        self._events.publish(
            subjects.sandbox_event(record.project, record.scoped_id(self._node), "paused"),
            SandboxPaused(
                cause_id=record.request_id,
                sandbox_id=f"{self._node}.{record.local}",
                reason=record.pause_reason,
            ),
        )
        self._steps.step(
            record,
            "pause",
            attributes={"reason": record.pause_reason},
            cause_id=record.request_id,
        )

    def resumed(self, record: SandboxRecord) -> None:
        """Tell that a paused sandbox runs again."""
        self.tell(record.local)
        self._events.publish(
            subjects.sandbox_event(record.project, record.scoped_id(self._node), "resumed"),
            SandboxResumed(cause_id=record.request_id, sandbox_id=f"{self._node}.{record.local}"),
        )
        self._steps.step(record, "resume", cause_id=record.request_id)

    def resized(self, record: SandboxRecord, cu_before: float, reason: str) -> None:
        """Tell that a sandbox has another share of its GPUs."""
        self.tell(record.local)
        cu = math.fsum(slice_.cu for slice_ in record.slices)
        self._events.publish(
            subjects.sandbox_event(record.project, record.scoped_id(self._node), "resized"),
            SandboxResized(
                cause_id=record.request_id,
                sandbox_id=f"{self._node}.{record.local}",
                lease_id=record.lease_id,
                cu=cu,
                cu_before=cu_before,
                reason=reason,
            ),
        )
        self._steps.step(
            record,
            "resize",
            attributes={"cu": f"{cu:g}", "cu_before": f"{cu_before:g}", "reason": reason},
            cause_id=record.request_id,
        )

    def ended(self, record: SandboxRecord) -> None:
        """Tell that a sandbox is over, and why."""
        self.tell(record.local)
        metrics.SANDBOXES_ALIVE.set(self._state.living_count)
        if self._meters is not None:
            self._meters.ended(record)
        if self.lives is not None and record.agent_version:
            self.lives.ended(record)
        cause = record.end_cause or EndCause.EXITED
        metrics.ENDS.labels(cause.value).inc()
        if cause is EndCause.CREATE_FAILED:
            # Nobody was given its id, so only the log tells of it.
            self._steps.step(
                record,
                "create",
                status="failed",
                attributes={"reason": record.end_detail},
                cause_id=record.request_id,
            )
        else:
            ended = record.ended(self._node)
            self._events.publish(
                subjects.sandbox_event(record.project, record.scoped_id(self._node), "ended"), ended
            )
            self._steps.step(
                record,
                "delete" if cause is EndCause.DELETED else "end",
                status="ok" if cause is EndCause.DELETED else cause.value,
                attributes={"reason": record.end_detail},
                cause_id=record.request_id,
            )
        self._steps.end(record.local)
