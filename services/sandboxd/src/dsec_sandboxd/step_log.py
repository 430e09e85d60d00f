"""The behaviour log of this node's sandboxes: what was done in each, step by step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final, Protocol

import structlog

from dsec_common.behavior import BehaviorLog
from dsec_common.bus import current_traceparent
from dsec_common.errors import DsecError
from dsec_sandboxd.records import SandboxRecord

_log: Final = structlog.get_logger(__name__)

#: What only the platform writes: a record of one of these is the node's own word. An agent's
#: request to log cannot carry it, whatever reward may hang on it.
PLATFORM_ACTIONS: Final = frozenset(
    {
        "create",
        "exec",
        "read_file",
        "write_file",
        "stage",
        "feedback",
        "delete",
        "end",
        "spool_shed",
    }
)
#: Attributes are for reading; the whole of a command or a path is in the request itself.
ATTRIBUTE_MAX: Final = 1024
_NOT_LOGGED_EVERY: Final = 1000
_ENDED_KEPT: Final = 10_000


class StepWriter(Protocol):
    """The part of the log producer that takes records; it never waits."""

    def append(self, record: BehaviorLog) -> None:
        """Accept a record."""
        ...


class StepLog:
    """Writes steps with one running number per sandbox.

    A sandbox's first step is 1 and no number is left out, so a reader sees what it lacks. Nothing
    here fails a request: a step that cannot be written is counted and logged.
    """

    def __init__(self, node: str, writer: StepWriter | None, source: str = "sandboxd") -> None:
        """Take where to write; without a writer steps are only numbered.

        Args:
            node: this node's name.
            writer: takes the records.
            source: who counts. A daemon that was started again counts anew, so it needs another
                one, or readers take its steps for repetitions of earlier ones.
        """
        self._node = node
        self._writer = writer
        self._source = source
        self._last: dict[str, int] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()
        self.lost = 0

    def step(
        self,
        record: SandboxRecord,
        action: str,
        *,
        status: str = "ok",
        latency_ms: float = 0.0,
        attributes: Mapping[str, str] | None = None,
        tokens_in: int = 0,
        tokens_out: int = 0,
        stage: str = "",
        cause_id: str = "",
        error_code: str = "",
    ) -> None:
        """Write one step of a sandbox."""
        seq = self._next(record.local)
        if self._writer is None:
            return
        sandbox_id = f"{self._node}.{record.local}"
        step = BehaviorLog(
            sandbox_id=sandbox_id,
            project=record.project,
            seq=seq,
            source=self._source,
            agent=record.agent or "sandbox",
            agent_id=sandbox_id,
            action=action,
            status=status,
            latency_ms=round(latency_ms, 3),
            tokens_in=tokens_in,
            tokens_out=tokens_out,
            attributes={
                name: shortened(value) for name, value in (attributes or {}).items() if value
            },
            rollout_id=record.rollout_id,
            stage=stage,
            cause_id=cause_id,
            traceparent=current_traceparent.get(),
            error_code=error_code,
        )
        try:
            self._writer.append(step)
        except DsecError as error:
            self.lost += 1
            if self.lost % _NOT_LOGGED_EVERY == 1:
                _log.warning("step_not_logged", lost=self.lost, error=str(error))

    def _next(self, local: str) -> int:
        if local in self._ended:  # a command that the sandbox's end cut short is told after it
            self._ended[local] += 1
            return self._ended[local]
        seq = self._last[local] = self._last.get(local, 0) + 1
        return seq

    def end(self, local: str) -> None:
        """Note that a sandbox is over; the numbering of the last 10,000 is kept for late steps."""
        self._ended[local] = self._last.pop(local, 0)
        if len(self._ended) > _ENDED_KEPT:
            self._ended.popitem(last=False)


def shortened(text: str) -> str:
    """Return ``text`` fit for an attribute: bounded, and without what UTF-8 cannot carry."""
    if len(text) > ATTRIBUTE_MAX:
        text = f"{text[: ATTRIBUTE_MAX - 1]}…"
    return text.encode("utf-8", "replace").decode("utf-8")
