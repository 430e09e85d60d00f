"""What the broker tells the world of leases: audit events and alarms."""

from __future__ import annotations

import structlog

from dsec_broker import metrics
from dsec_broker.effects import Alarm
from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.errors import DsecError
from dsec_common.wire.base import Message
from dsec_common.wire.lease import ConservationBroken, LeasesUnlocked

log = structlog.get_logger()


class LeaseEvents:
    """Publishes to the stream of events; what cannot be published is in the log all the same."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def unlocked(self, project: str, node: str, event: LeasesUnlocked) -> None:
        """Tell the project which of its leases were ended by force."""
        metrics.UNLOCKED.inc(len(event.leases))
        log.warning(
            "leases unlocked by force",
            project=project,
            node=node,
            leases=[lease.lease_id for lease in event.leases],
            reason=event.reason,
        )
        await self._publish(subjects.lease_event(project, node, "unlocked"), event)

    async def alarm(self, found: Alarm) -> None:
        """Tell operators that allocated and free units do not add up on a node."""
        metrics.BROKEN.inc()
        log.error(
            "allocated + free is not all there is", node=found.node, violations=found.violations
        )
        await self._publish(
            subjects.node_alarm(found.node, "conservation_broken"),
            ConservationBroken(node=found.node, violations=found.violations),
        )

    async def _publish(self, subject: str, event: Message) -> None:
        try:
            await self._bus.js_publish(subject, event, message_id=event.message_id)
        except DsecError as error:
            log.warning("an event was not published", subject=subject, error=str(error))
