"""The behaviour log of this node's sandboxes: what was done in each, step by step."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
        "pause",
        "resume",
        "synchronise",
        "resize",
        "snapshot",
        "fork",
        "rollback",
        "adopt",
        "exec",
        "read_file",
        "write_file",
        "stage",
        "feedback",
        "model_call",
        "tool_call",
        "delete",
        "end",
        "set_network",
        "enter_agent_phase",
        "network_denied",
        "open_port",
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


class SequenceKeeper(Protocol):
    """Remembers, for the next daemon, how far the numbering of each living sandbox has come."""

    def keep_sequence(self, local: str, source: str, seq: int) -> None:
        """Remember the last number used. Never raises."""
        ...


@dataclass(slots=True)
class _Numbering:
    source: str
    seq: int = 0
    kept: int = 0


class StepLog:
    """Writes steps with one running number per sandbox.

    A sandbox's first step is 1 and no number is left out, so a reader sees what it lacks. A number
    is kept before its step is written: when the daemon is killed, the next one goes on with the
    next number, and what was not yet in the spool shows as a gap. Nothing here fails a request: a
    step that cannot be written is counted and logged.

    Attributes:
        before_step: called with the sandbox's id before each of its steps; what it writes itself
            of that sandbox comes first.
    """

    def __init__(
        self,
        node: str,
        writer: StepWriter | None,
        source: str = "sandboxd",
        keeper: SequenceKeeper | None = None,
    ) -> None:
        """Take where to write; without a writer steps are only numbered.

        Args:
            node: this node's name.
            writer: takes the records.
            source: who counts, in sandboxes that are new. A daemon that was started again needs
                another one, or readers take its steps for repetitions of earlier ones.
            keeper: remembers the numbers over the daemon's end.
        """
        self._node = node
        self._writer = writer
        self._source = source
        self._keeper = keeper
        self._numbering: dict[str, _Numbering] = {}
        self._ended: OrderedDict[str, _Numbering] = OrderedDict()
        self.before_step: Callable[[str], None] | None = None
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
        if self.before_step is not None:
            self.before_step(record.local)
        numbering = self._next(record.local)
        if self._writer is None:
            return
        sandbox_id = f"{self._node}.{record.local}"
        step = BehaviorLog(
            sandbox_id=sandbox_id,
            project=record.project,
            seq=numbering.seq,
            source=numbering.source,
            time_us=time.time_ns() // 1000,
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

    def resume(self, local: str, source: str, seq: int) -> None:
        """Go on with the numbering of an earlier daemon, after ``seq``."""
        self._numbering[local] = _Numbering(source, seq, seq)

    def reserve(self, local: str, count: int) -> None:
        """Keep the numbers of the next ``count`` steps, which follow before anything is awaited.

        If the daemon is killed before they are written, they show as a gap.
        """
        numbering = self._of(local)
        self._keep(local, numbering, numbering.seq + count)

    def _next(self, local: str) -> _Numbering:
        numbering = self._of(local)
        numbering.seq += 1
        self._keep(local, numbering, numbering.seq)
        return numbering

    def _of(self, local: str) -> _Numbering:
        # A command that the sandbox's end cut short is told after it.
        numbering = self._ended.get(local) or self._numbering.get(local)
        if numbering is None:
            numbering = self._numbering[local] = _Numbering(self._source)
        return numbering

    def _keep(self, local: str, numbering: _Numbering, seq: int) -> None:
        if self._keeper is not None and seq > numbering.kept and local in self._numbering:
            numbering.kept = seq
            self._keeper.keep_sequence(local, numbering.source, seq)

    def end(self, local: str) -> None:
        """Note that a sandbox is over; the numbering of the last 10,000 is kept for late steps."""
        numbering = self._numbering.pop(local, None)
        self._ended[local] = numbering or _Numbering(self._source)
        if len(self._ended) > _ENDED_KEPT:
            self._ended.popitem(last=False)


def shown(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command line fit for listings: each argument shortened, and the first ones only."""
    kept: list[str] = []
    left = ATTRIBUTE_MAX
    for argument in argv:
        kept.append(shortened(argument))
        left -= len(kept[-1])
        if left <= 0:
            break
    return tuple(kept)


def shortened(text: str) -> str:
    """Return ``text`` fit for an attribute: bounded, and without what UTF-8 cannot carry."""
    if len(text) > ATTRIBUTE_MAX:
        text = f"{text[: ATTRIBUTE_MAX - 1]}…"
    return text.encode("utf-8", "replace").decode("utf-8")
