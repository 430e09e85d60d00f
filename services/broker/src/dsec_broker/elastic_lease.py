"""Which of the brokers balances the cluster: a lease in a bucket, held by one at a time.

Several that do it at once would do no harm to any record, since a compare-and-swap decides each
change; but they would undo and repeat each other's work. The revision with which a broker took the
lease grows from holder to holder, and fences its orders to the node provider.
"""

from __future__ import annotations

import math
from typing import Final

import structlog

from dsec_common.bus import KeyValue
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import Message

log = structlog.get_logger()

BUCKET: Final = "dsec-elastic"
_KEY: Final = "balancer"
_RENEW_AFTER: Final = 1 / 3
"""Of the lease's life."""
_SAFE: Final = 0.9
"""How much of it the holder relies on."""


class Balancer(Message, frozen=True, kw_only=True):
    """The lease's entry: who holds it."""

    broker: str


class ElasticLease:
    """The lease as one broker sees it.

    Args:
        bucket: where it is; its entry has a life of its own.
        broker: this broker's id.
        life_s: how long it lives unless renewed; NATS counts whole seconds.
        clock: counts it.
    """

    def __init__(
        self, bucket: KeyValue[Balancer], broker: str, life_s: float, clock: Clock
    ) -> None:
        self._bucket = bucket
        self._entry = Balancer(broker=broker)
        self._life_s = max(1, math.ceil(life_s))
        self._clock = clock
        self._revision = 0
        self._asked_at_s = -math.inf
        self._fence = 0

    @property
    def fence(self) -> int:
        """The fence of our orders while the lease is ours; else 0."""
        age_s = self._clock.monotonic() - self._asked_at_s
        return self._fence if self._revision and age_s < self._life_s * _SAFE else 0

    async def hold(self) -> int:
        """Take or renew the lease if that is possible or due, and return :attr:`fence`."""
        now_s = self._clock.monotonic()
        if self.fence and now_s - self._asked_at_s < self._life_s * _RENEW_AFTER:
            return self._fence
        try:
            if self._revision:
                self._revision = await self._bucket.update(
                    _KEY, self._entry, self._revision, ttl_s=self._life_s
                )
            else:
                self._revision = await self._bucket.create(_KEY, self._entry, ttl_s=self._life_s)
                self._fence = self._revision
                log.info("balances the cluster from now on", fence=self._fence)
        except DsecError as error:
            if error.code is ErrorCode.CONFLICT:
                self._revision = 0
            elif not error.retryable:
                raise
            return self.fence
        self._asked_at_s = now_s
        return self.fence

    async def end(self) -> None:
        """Give the lease up, so that another broker need not wait for its end."""
        revision, self._revision = self._revision, 0
        if revision:
            await self._bucket.delete(_KEY, revision=revision)
