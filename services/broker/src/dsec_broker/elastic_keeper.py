"""The elastic engine's shell: looks at the cluster after changes, and has done what should be.

Every broker looks; the one with the lease acts. What it does is safe to do twice: targets are
amounts and not differences, and orders to the node provider are numbers of nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import structlog

from dsec_broker import metrics
from dsec_broker.effects import Resize
from dsec_broker.elastic import Fleet, Plan, ProvidedNode, plan
from dsec_broker.elastic_config import ElasticConfig
from dsec_broker.elastic_lease import BUCKET, Balancer, ElasticLease
from dsec_broker.elastic_orders import NodeOrders
from dsec_broker.providers import NodeProvider, Order, open_provider
from dsec_broker.record import NodeRecord
from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.retry import until_available
from dsec_common.wire.base import new_id
from dsec_common.wire.elastic import LeaseResized, NodeRetired, ResizeLease, RetireNode

log = structlog.get_logger()


class Cluster(Protocol):
    """What the broker knows, and the one way to change leases."""

    def ready_records(self) -> list[NodeRecord]:
        """Return the records of the nodes that take leases."""
        ...

    def provided(self, provider: str) -> list[ProvidedNode]:
        """Return the living nodes of a node provider."""
        ...

    def resize(self, node: str, targets: dict[str, float], reason: str) -> None:
        """Have leases of a node get so many units."""
        ...


class ElasticKeeper:
    """Balances the cluster for as long as it runs; made in every broker.

    Args:
        config: constants.
        bus: talks to nodes and holds the lease.
        clock: counts silences.
        cluster: the broker.
        spawn: runs what must not keep the balance waiting.
    """

    def __init__(
        self,
        config: ElasticConfig,
        bus: Bus,
        clock: Clock,
        *,
        cluster: Cluster,
        spawn: Callable[[Coroutine[Any, Any, None], str], None],
    ) -> None:
        self._config = config
        self._bus = bus
        self._clock = clock
        self._cluster = cluster
        self._spawn = spawn
        self._woken = asyncio.Event()
        self._lease: ElasticLease | None = None
        self._provider: NodeProvider | None = None
        self._orders = NodeOrders(config)
        self._ordering = False
        self._closed = False

    async def open(self) -> None:
        """Open the provider and the lease's bucket, waiting for JetStream.

        Raises:
            DsecError: ``invalid`` for a provider that is not there or refuses its settings.
        """
        config = self._config
        if config.node_provider:
            self._provider = open_provider(config.node_provider, config.node_provider_settings)
        bucket = await until_available(
            f"the bucket {BUCKET}", lambda: self._bus.kv(BUCKET, Balancer), self._clock
        )
        self._lease = ElasticLease(bucket, new_id(), config.elastic_lease_s, self._clock)

    async def close(self) -> None:
        """Give up the lease and let go of the provider; its nodes live on."""
        self._closed = True
        if self._provider is not None:
            await self._provider.close()
        if self._lease is not None:
            with contextlib.suppress(DsecError):
                await self._lease.end()

    def wake(self) -> None:
        """Look at the cluster soon: something has changed."""
        self._woken.set()

    async def run(self) -> None:
        """Look after each change, at most once in ``elastic_interval_s``, until cancelled.

        Also when nothing changes, since time passes: nodes fall silent or stay idle, and the broker
        with the lease may have died over its work.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.elastic_lease_s):
                    await self._woken.wait()
            # What changes together is looked at together.
            await self._clock.sleep(self._config.elastic_interval_s)
            self._woken.clear()
            await self.balance()

    async def balance(self) -> None:
        """Look once, and act if there is something to do and nobody else does it."""
        if self._closed or self._lease is None:
            return
        plan_ = plan(self._cluster.ready_records(), self._config)
        wish = self._wish(plan_)
        if not plan_.targets and not wish.retire and not self._order_due(wish):
            return
        fence = await self._lease.hold()
        if not fence:
            return
        for node, targets in plan_.targets.items():
            self._cluster.resize(node, targets, self._reason(plan_))
            metrics.RESIZES.inc(len(targets))
        if self._provider is not None:
            await self._provide(self._provider, wish, fence)

    def _reason(self, plan_: Plan) -> str:
        used = plan_.allocated_cu / plan_.total_cu if plan_.total_cu else 1.0
        return f"{used:.0%} of all Compute Units were handed out"

    # --- Nodes --------------------------------------------------------------------------------

    def _wish(self, plan_: Plan) -> Fleet:
        if self._provider is None:
            return Fleet(0)
        nodes = self._cluster.provided(self._config.node_provider)
        return self._orders.wish(plan_, nodes, self._provider.may_leave, self._clock.monotonic())

    def _order_due(self, wish: Fleet) -> bool:
        if self._provider is None or self._ordering:
            return False
        nodes = self._cluster.provided(self._config.node_provider)
        return self._orders.is_due(wish, nodes, self._clock.monotonic())

    async def _provide(self, provider: NodeProvider, wish: Fleet, fence: int) -> None:
        retired = [name for name in wish.retire if await self._retire(name)]
        wanted, leaving = self._orders.order(wish, retired)
        is_new = bool(retired) or not self._orders.is_given(wanted, leaving)
        if self._ordering or not (is_new or self._order_due(wish)):
            return
        order = Order(wanted=wanted, leaving=leaving, fence=fence)
        self._ordering = True
        self._spawn(self._order(provider, order), "order nodes")

    async def _order(self, provider: NodeProvider, order: Order) -> None:
        try:
            await provider.scale(order)
        except DsecError as error:
            log.warning("the node provider failed", order=order, error=str(error))
            metrics.ORDERS.labels("failed").inc()
        else:
            log.info("ordered nodes", wanted=order.wanted, leaving=order.leaving)
            metrics.ORDERS.labels("ok").inc()
            self._orders.given(order.wanted, order.leaving, self._clock.monotonic())
        finally:
            self._ordering = False

    async def _retire(self, node: str) -> bool:
        """Return whether the node takes nothing from now on."""
        try:
            await self._bus.request(
                subjects.node_request(node, "retire"), RetireNode(), NodeRetired
            )
        except DsecError as error:
            log.info("a node is not retired", node=node, error=str(error))
            self._orders.busy(node)
            return False
        return True

    # --- Shares -------------------------------------------------------------------------------

    async def tell(self, effect: Resize) -> None:
        """Tell a node which slices a lease has now."""
        lease = effect.lease
        message = ResizeLease(
            lease_id=lease.lease_id,
            resizes=lease.resizes,
            slices=lease.slices,
            reason=lease.resize_reason,
        )
        subject = subjects.node_request(effect.node, "resize")
        try:
            await self._bus.request(subject, message, LeaseResized)
        except DsecError as error:
            # Its heartbeats show that it has not heard, and it is told again.
            level = log.info if error.code is ErrorCode.UNAVAILABLE else log.warning
            level("a node did not hear of a lease's share", node=effect.node, error=str(error))
