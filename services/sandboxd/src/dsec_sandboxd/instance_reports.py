"""Tells the registry which instances of agents began and ended here, some at a time.

Nothing is told twice as two things: a beginning is told until it is answered, an end only after
that. What this node has missed of the rules comes with the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import structlog

from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.clock import Clock
from dsec_common.errors import DsecError
from dsec_common.wire.agent_node import (
    InstanceEnded,
    InstancesReported,
    InstanceStarted,
    ReportInstances,
)
from dsec_common.wire.sandbox import EndCause
from dsec_sandboxd.governing import Governing
from dsec_sandboxd.records import SandboxRecord

_log: Final = structlog.get_logger(__name__)

_INTERVAL_S: Final = 1.0
#: So often a node with instances asks whether it has missed anything.
_ASK_S: Final = 5.0
_TIMEOUT_S: Final = 5.0
#: Beginnings and ends of one report: they fit into a message.
_AT_ONCE: Final = 4000
#: An instance that ends so has failed; all other ends were somebody's wish.
_FAILURES: Final = frozenset(
    {
        EndCause.OOM,
        EndCause.EXHAUSTED,
        EndCause.EXITED,
        EndCause.KILLED,
        EndCause.ROLLBACK_FAILED,
        EndCause.CREATE_FAILED,
    }
)


class InstanceReports:
    """Collects what is to be told, and tells it."""

    def __init__(
        self,
        node: str,
        bus: Bus,
        governing: Governing,
        clock: Clock,
        interval_s: float = _INTERVAL_S,
    ) -> None:
        self._node = node
        self._bus = bus
        self._governing = governing
        self._clock = clock
        self._interval_s = interval_s
        self._began: dict[str, InstanceStarted] = {}
        self._ended: dict[str, InstanceEnded] = {}
        self._failed: set[str] = set()
        self._complete = True
        self._wake = asyncio.Event()

    # --- What happens -------------------------------------------------------------------------

    def began(self, record: SandboxRecord) -> None:
        """Note that an instance runs."""
        self._began[record.local] = _started(record)
        self._governing.began(record)
        self._wake.set()

    def failed(self, local: str) -> None:
        """Note that an instance's first command failed, however it ends."""
        self._failed.add(local)

    def ended(self, record: SandboxRecord) -> None:
        """Note that an instance is over."""
        if record.end_cause is EndCause.CREATE_FAILED:
            self._began[record.local] = _started(record)
        self._ended[record.local] = InstanceEnded(
            project=record.project,
            local=record.local,
            failed=record.end_cause in _FAILURES or record.local in self._failed,
        )
        self._failed.discard(record.local)
        self._governing.ended(record)
        self._wake.set()

    # --- Telling ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Tell what there is to tell, until cancelled."""
        self._wake.set()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ASK_S if self._governing.instances() else None):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self.report()
            except DsecError as error:
                _log.info("instances_not_reported", error=str(error))
                self._wake.set()
            await self._clock.sleep(self._interval_s)

    async def report(self) -> None:
        """Tell it now, and take what the answer says of rules.

        Raises:
            DsecError: it was not taken; it is told again.
        """
        living = self._governing.instances()
        if self._complete:
            self._began |= {record.local: _started(record) for record in living}
        revisions: dict[str, dict[str, int]] = {}
        for record in living:
            known = self._governing.governance.revision(record.project, record.agent)
            revisions.setdefault(record.project, {})[record.agent] = known
        began = dict(list(self._began.items())[: None if self._complete else _AT_ONCE])
        ended = {
            local: one
            for local, one in list(self._ended.items())[:_AT_ONCE]
            if local not in self._began
        }
        answer = await self._bus.request(
            subjects.instance_report(self._node),
            ReportInstances(
                node=self._node,
                started=tuple(began.values()),
                ended=tuple(ended.values()),
                complete=self._complete,
                revisions=revisions,
            ),
            InstancesReported,
            timeout_s=_TIMEOUT_S,
        )
        self._complete = False
        for local in began:
            self._began.pop(local, None)
        for local in ended:
            self._ended.pop(local, None)
        if self._began or self._ended:
            self._wake.set()
        for rules in answer.rules:
            await self._governing.apply(rules)


def _started(record: SandboxRecord) -> InstanceStarted:
    return InstanceStarted(
        project=record.project,
        local=record.local,
        agent=record.agent,
        version=record.agent_version,
        started_at=record.created_at,
    )
