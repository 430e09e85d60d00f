"""The scheduler's pure core: events in, effects out, no I/O.

A creation goes: draw a node, lease units if it wants any, ask the node. A node that refuses for
reasons of its own leads to the next; one that does not answer is first asked whether the sandbox
is there after all, since making a second one would be worse than waiting.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final, assert_never

from dsec_common.compute.model import ServiceClass, Slice
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.network import needs_outside
from dsec_common.wire.node import UPLINK
from dsec_common.wire.pool import pool_key
from dsec_common.wire.sandbox import CreateSandbox, Limits, SandboxCreated
from dsec_common.wire.task import WarmUse
from dsec_scheduler import errors
from dsec_scheduler.config import SchedulerConfig
from dsec_scheduler.effects import (
    Effect,
    Place,
    Refuse,
    ReleaseLease,
    Resolve,
    Succeed,
    TakeUnits,
)
from dsec_scheduler.events import (
    CreateAbandoned,
    CreateAsked,
    Event,
    ForgetDue,
    HeartbeatSeen,
    Moment,
    PlaceRefused,
    PlaceResolved,
    PlaceSucceeded,
    PlaceUnanswered,
    UnitsRefused,
    UnitsTaken,
)
from dsec_scheduler.units import Granted
from dsec_scheduler.views import NodeView, Views, largest
from dsec_scheduler.warm_nodes import WarmNodes

#: What another node may well do better. Anything else is the request's own fault and final.
_NODE_TROUBLE: Final = frozenset(
    {
        ErrorCode.EXHAUSTED,
        ErrorCode.UNAVAILABLE,
        ErrorCode.TIMEOUT,
        ErrorCode.NOT_FOUND,
        ErrorCode.UNSUPPORTED,
        ErrorCode.INTERNAL,
    }
)

#: What the last refusal is wrapped for: it speaks of one node, the answer is about all.
_WRAPPED: Final = frozenset({ErrorCode.EXHAUSTED, ErrorCode.UNAVAILABLE, ErrorCode.TIMEOUT})


@dataclass(slots=True)
class _Create:
    """One creation on its way."""

    asked: CreateAsked
    deadline: float
    node: str = ""
    lease_id: str = ""
    slices: tuple[Slice, ...] = ()
    valid_until: float = 0.0
    attempts: int = 0
    refused_nodes: set[str] = field(default_factory=set)
    refused_stores: set[str] = field(default_factory=set)
    last_error: DsecError | None = None
    missing_layer: DsecError | None = None
    needs_outside: bool = field(init=False)
    wants_units: bool = field(init=False)

    def __post_init__(self) -> None:
        request = self.asked.request
        self.wants_units = request.gpu_demand is not None
        self.needs_outside = needs_outside(request.network) or needs_outside(request.setup_network)

    @property
    def request(self) -> CreateSandbox:
        """The caller's request."""
        return self.asked.request

    @property
    def snapshot_node(self) -> str:
        """The only node that has the snapshot to start from; empty without one."""
        return self.request.snapshot.partition(".")[0]

    def may_use(self, view: NodeView) -> bool:
        """Return whether this creation may go to the node, room apart."""
        return (
            view.name not in self.refused_nodes
            and store_of(view) not in self.refused_stores
            and (not self.wants_units or bool(view.heartbeat.gpus))
            and self.snapshot_node in {"", view.name}
            and not (self.needs_outside and UPLINK in view.heartbeat.missing)
        )


def store_of(view: NodeView) -> str:
    """Return which layer store a node has: one of its own unless it says otherwise."""
    return view.heartbeat.store_id or view.name


class SchedulerState:
    """All that the scheduler knows; :meth:`handle` is its only way to change.

    It is total over :data:`~dsec_scheduler.events.Event`; for a creation that it does not know
    (any more) an event has no effect. Effects of one event all belong to that event's creation.
    """

    def __init__(self, config: SchedulerConfig, randomness: random.Random) -> None:
        self._config = config
        self._random = randomness
        self._creates: dict[int, _Create] = {}
        self.views = Views(config.node_timeout_s, config.node_forget_s, config.burst_factor)
        self._warm = WarmNodes()

    def handle(self, event: Event) -> list[Effect]:
        """Take in one event and return what is to be done, in order."""
        match event:
            case HeartbeatSeen():
                self.views.observe(event.heartbeat, event.at.monotonic_s, event.at.unix_s)
                self._warm.observe(event.heartbeat)
                return []
            case ForgetDue():
                self.views.forget_silent(event.at.monotonic_s)
                return []
            case CreateAsked():
                deadline = event.at.monotonic_s + event.timeout_s
                create = self._creates[event.create_id] = _Create(event, deadline)
                return self._next(create, event.at)
            case _:
                known = self._creates.get(event.create_id)
                return [] if known is None else self._go_on(known, event)

    def _go_on(
        self,
        create: _Create,
        event: UnitsTaken
        | UnitsRefused
        | PlaceSucceeded
        | PlaceRefused
        | PlaceUnanswered
        | PlaceResolved
        | CreateAbandoned,
    ) -> list[Effect]:
        effects: list[Effect]
        match event:
            case UnitsTaken():
                effects = self._hold(create, event.node, event.lease_id, event.slices, event.at)
            case UnitsRefused():
                effects = self._refuse(create, event.error)
            case PlaceSucceeded():
                self._settle(create, event.created)
                effects = self._done(
                    create, Succeed(create_id=event.create_id, created=event.created, told=True)
                )
            case PlaceRefused():
                effects = self._on_refused(create, event)
            case PlaceUnanswered(maybe_made=False):
                create.last_error = event.error
                effects = self._on_unreached(create, event.at)
            case PlaceUnanswered():
                create.last_error = event.error
                effects = [
                    Resolve(
                        create_id=event.create_id,
                        node=create.node,
                        local=create.asked.local,
                        lease_id=create.lease_id,
                        valid_until=create.valid_until,
                    )
                ]
            case PlaceResolved():
                effects = self._on_resolved(create, event)
            case CreateAbandoned():
                effects = self._leave_node(create)
                del self._creates[event.create_id]
            case _:
                assert_never(event)
        return effects

    # --- The steps of a creation --------------------------------------------------------------

    def _next(self, create: _Create, at: Moment) -> list[Effect]:
        """Draw a node and begin with it, or refuse."""
        if create.attempts >= self._config.attempts_max:
            return self._refuse(create, self._last_word(create, at))
        if at.monotonic_s >= create.deadline:
            error = errors.out_of_time(create.asked.timeout_s, create.last_error)
            return self._refuse(create, error)
        if create.asked.units is not None:
            return self._place_granted(create, create.asked.units, at)
        if create.wants_units:
            return self._take_units(create, at)
        limits = create.request.limits
        node = self._warm_node(create, at) or self._cold_node(create, at)
        if node is None:
            return self._refuse(create, self._why_none(create, at))
        create.node = node
        self.views.grant(node, create.asked.create_id, limits)
        return self._place(create, at)

    def _take_units(self, create: _Create, at: Moment) -> list[Effect]:
        """Have units leased on whatever node has them first, unless no node ever could."""
        limits, open_nodes = create.request.limits, self.views.open_nodes(at.monotonic_s)
        usable = [view for view in open_nodes if create.may_use(view)]
        if not any(view.could_ever_hold(limits) for view in usable):
            return self._refuse(create, self._why_none(create, at))
        return [
            TakeUnits(
                create_id=create.asked.create_id,
                needs=(
                    limits,
                    create.snapshot_node,
                    create.needs_outside,
                    frozenset(create.refused_nodes),
                    frozenset(create.refused_stores),
                ),
                timeout_s=max(create.deadline - at.monotonic_s, 0.0),
            )
        ]

    def _place_granted(self, create: _Create, units: Granted, at: Moment) -> list[Effect]:
        """Place on the node of the units, once."""
        if create.attempts:
            return self._refuse(create, self._last_word(create, at))
        return self._hold(create, units.node, units.lease_id, units.slices, at)

    def has_room(self, node: str, limits: Limits, at: Moment) -> bool:
        """Return whether a node takes sandboxes and has room for one."""
        return self.views.has_room(node, limits, at.monotonic_s)

    def may_take(self, create_id: int, node: str, at: Moment) -> bool:
        """Return whether units on a node are of use to a creation: it has room for the rest."""
        create, view = self._creates.get(create_id), self.views.get(node)
        return (
            create is not None
            and view is not None
            and create.may_use(view)
            and self.has_room(node, create.request.limits, at)
        )

    def _hold(
        self, create: _Create, node: str, lease_id: str, slices: tuple[Slice, ...], at: Moment
    ) -> list[Effect]:
        create.node, create.lease_id, create.slices = node, lease_id, slices
        self.views.grant(node, create.asked.create_id, create.request.limits)
        return self._place(create, at)

    def _warm_node(self, create: _Create, at: Moment) -> str | None:
        """Return a node with room that holds a sandbox like this one ready, or None."""
        request = create.request
        if not self._warm or request.warm is WarmUse.BYPASS or request.snapshot:
            return None

        def usable(node: str) -> bool:
            view = self.views.get(node)
            return (
                view is not None
                and create.may_use(view)
                and self.has_room(node, request.limits, at)
            )

        key = pool_key(
            create.asked.project,
            request.base,
            request.workspace,
            request.toolkits,
            request.limits,
        )
        return self._warm.take(key, usable)

    def _cold_node(self, create: _Create, at: Moment) -> str | None:
        """Return the node of the snapshot, or one that is drawn; None when there is none to ask."""
        limits, only = create.request.limits, create.snapshot_node
        if not only:
            return self.views.choose(
                limits,
                create.may_use,
                self._config.choices,
                at.monotonic_s,
                self._random,
                own_first=create.request.service_class is ServiceClass.REALTIME,
            )
        view = self.views.get(only)
        takes = view is not None and create.may_use(view)
        return only if takes and self.views.seems_to_take(only, limits, at.monotonic_s) else None

    def _attempt_s(self, create: _Create, at: Moment) -> float:
        left_s = max(create.deadline - at.monotonic_s, 0.0)
        return min(left_s, self._config.attempt_timeout_s)

    def _place(self, create: _Create, at: Moment) -> list[Effect]:
        create.attempts += 1
        create.valid_until = at.unix_s + self._attempt_s(create, at)
        return [
            Place(
                create_id=create.asked.create_id,
                node=create.node,
                local=create.asked.local,
                lease_id=create.lease_id,
                valid_until=create.valid_until,
                slices=create.slices,
            )
        ]

    def _on_refused(self, create: _Create, event: PlaceRefused) -> list[Effect]:
        node, error = create.node, event.error
        create.last_error = error
        effects = self._leave_node(create)
        if error.code not in _NODE_TROUBLE:
            return effects + self._refuse(create, error)
        create.refused_nodes.add(node)
        if error.code is ErrorCode.EXHAUSTED:
            self.views.veto(node, event.at.monotonic_s)
        if error.code is ErrorCode.NOT_FOUND:
            create.missing_layer = error
            # Nodes with the same layer store lack the same layers.
            view = self.views.get(node)
            own = store_of(view) if view else node
            create.refused_stores |= {own, str(error.details.get("store_id") or own)}
        return effects + self._next(create, event.at)

    def _on_resolved(self, create: _Create, event: PlaceResolved) -> list[Effect]:
        if event.created is not None:
            self._settle(create, event.created)
            succeeded = Succeed(create_id=event.create_id, created=event.created, told=False)
            return self._done(create, succeeded)
        self.views.unreachable(create.node)
        create.refused_nodes.add(create.node)
        # Nobody said that the sandbox is not there. Its units are not given back: unless the node
        # names them in a heartbeat they run out soon.
        create.lease_id, create.slices = "", ()
        return self._leave_node(create) + self._next(create, event.at)

    def _on_unreached(self, create: _Create, at: Moment) -> list[Effect]:
        self.views.unreachable(create.node)
        create.refused_nodes.add(create.node)
        return self._leave_node(create) + self._next(create, at)

    def _settle(self, create: _Create, created: SandboxCreated) -> None:
        # Sent by the node right after it had counted the sandbox, by the node's own clock.
        self.views.settle(create.node, create.asked.create_id, created.sent_at)

    def _leave_node(self, create: _Create) -> list[Effect]:
        """Take back what was counted and leased for the attempt."""
        effects: list[Effect] = []
        if create.node:
            self.views.take_back(create.node, create.asked.create_id)
            create.node = ""
        if create.lease_id:
            effects.append(ReleaseLease(lease_id=create.lease_id))
            create.lease_id, create.slices = "", ()
        return effects

    def _refuse(self, create: _Create, error: DsecError) -> list[Effect]:
        return self._done(create, Refuse(create_id=create.asked.create_id, error=error))

    def _done(self, create: _Create, outcome: Succeed | Refuse) -> list[Effect]:
        del self._creates[create.asked.create_id]
        return [outcome]

    # --- Saying no ----------------------------------------------------------------------------

    def _last_word(self, create: _Create, at: Moment) -> DsecError:
        """Return the error after nodes have refused: the most telling of theirs."""
        if create.missing_layer is not None and not create.snapshot_node:
            return self._why_missing(create, create.missing_layer, at)
        error = create.missing_layer or create.last_error
        assert error is not None  # noqa: S101  only called after a refusal
        if error.code in _WRAPPED and create.attempts:
            return errors.out_of_attempts(create.attempts, error, self._config.retry_after_s)
        return error

    def _why_missing(self, create: _Create, error: DsecError, at: Moment) -> DsecError:
        """Return the error for a layer that each store looked in lacks; say which were left out."""
        others = [view for view in self.views if store_of(view) not in create.refused_stores]
        if not others:
            return error
        silent = [view.name for view in others if self.views.is_silent(view, at.monotonic_s)]
        full = [view.name for view in others if view.name not in silent]
        return errors.layer_not_looked_for(error, full, silent, self._config.retry_after_s)

    def _why_none(self, create: _Create, at: Moment) -> DsecError:
        """Return why no node can be drawn."""
        if create.last_error is not None:
            return self._last_word(create, at)
        limits = create.request.limits
        open_nodes = self.views.open_nodes(at.monotonic_s)
        if not open_nodes:
            return errors.no_nodes(len(self.views), self.views.draining(at.monotonic_s))
        usable = [view for view in open_nodes if create.may_use(view)]
        if not usable:
            return self._why_none_usable(create, open_nodes)
        possible = [view for view in usable if view.could_ever_hold(limits)]
        if not possible:
            view = largest(usable)
            return errors.too_large(limits, view.name, view.most())
        return errors.all_full(len(possible), limits, self._config.retry_after_s)

    def _why_none_usable(self, create: _Create, open_nodes: list[NodeView]) -> DsecError:
        if create.snapshot_node not in {"", *(view.name for view in open_nodes)}:
            return errors.snapshot_node_away(create.request.snapshot, create.snapshot_node)
        demand = create.request.gpu_demand
        if demand is not None and not any(view.heartbeat.gpus for view in open_nodes):
            return errors.no_gpus(demand.min_cu)
        return errors.no_uplink({view.name: view.heartbeat.missing for view in open_nodes})

    # --- Looking ------------------------------------------------------------------------------

    def is_silent(self, node: str, at: Moment) -> bool:
        """Return whether the node's heartbeats have stopped."""
        view = self.views.get(node)
        return view is None or self.views.is_silent(view, at.monotonic_s)

    def validate_state(self) -> None:
        """Raise ``AssertionError`` when an invariant is broken; tests call it after each event."""
        for view in self.views:
            limits = [grant.limits for grant in view.grants.values()]
            counted = view.pending.memory_bytes + view.settled.memory_bytes
            assert counted == sum(limit.memory_bytes for limit in limits)  # noqa: S101  invariant
            assert view.pending.sandboxes + view.settled.sandboxes == len(limits)  # noqa: S101  invariant
            for create_id, grant in view.grants.items():
                pending = grant.settled_at is None
                known = self._creates.get(create_id)
                assert not pending or (known is not None and known.node == view.name)  # noqa: S101  invariant
        for create_id, create in self._creates.items():
            assert create.asked.create_id == create_id  # noqa: S101  invariant
            assert create.attempts <= self._config.attempts_max  # noqa: S101  invariant
            assert create.node not in create.refused_nodes  # noqa: S101  invariant
            assert create.node or not create.lease_id  # noqa: S101  invariant
