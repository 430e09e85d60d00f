"""The scheduler's pure core: events in, effects out, no I/O.

A creation goes: draw a node, lease units if it wants any, ask the node. A node that refuses for
reasons of its own leads to the next; one that does not answer is first asked whether the sandbox
is there after all, since making a second one would be worse than waiting.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final, assert_never

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.sandbox import CreateSandbox, SandboxCreated
from dsec_scheduler import errors
from dsec_scheduler.config import SchedulerConfig
from dsec_scheduler.effects import (
    Effect,
    Place,
    Refuse,
    ReleaseLease,
    Resolve,
    Succeed,
    TakeLease,
)
from dsec_scheduler.events import (
    CreateAbandoned,
    CreateAsked,
    Event,
    ForgetDue,
    HeartbeatSeen,
    LeaseRefused,
    LeaseTaken,
    Moment,
    PlaceRefused,
    PlaceResolved,
    PlaceSucceeded,
    PlaceUnanswered,
)
from dsec_scheduler.views import NodeView, Views, largest

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

#: Nodes whose units are asked for in vain before a request is refused.
_LEASE_REFUSALS_MAX: Final = 16


@dataclass(slots=True)
class _Create:
    """One creation on its way."""

    asked: CreateAsked
    deadline: float
    node: str = ""
    lease_id: str = ""
    valid_until: float = 0.0
    attempts: int = 0
    lease_refusals: int = 0
    refused_nodes: set[str] = field(default_factory=set)
    refused_stores: set[str] = field(default_factory=set)
    last_error: DsecError | None = None
    missing_layer: DsecError | None = None

    @property
    def request(self) -> CreateSandbox:
        """The caller's request."""
        return self.asked.request

    def may_use(self, view: NodeView) -> bool:
        """Return whether this creation may go to the node, room apart."""
        return (
            view.name not in self.refused_nodes
            and view.heartbeat.store_id not in self.refused_stores
            and (self.request.limits.cu <= 0 or bool(view.heartbeat.gpus))
        )


class SchedulerState:
    """All that the scheduler knows; :meth:`handle` is its only way to change.

    It is total over :data:`~dsec_scheduler.events.Event`; for a creation that it does not know
    (any more) an event has no effect. Effects of one event all belong to that event's creation.
    """

    def __init__(self, config: SchedulerConfig, randomness: random.Random) -> None:
        self._config = config
        self._random = randomness
        self._creates: dict[int, _Create] = {}
        self.views = Views(config.node_timeout_s, config.node_forget_s)

    def handle(self, event: Event) -> list[Effect]:
        """Take in one event and return what is to be done, in order."""
        match event:
            case HeartbeatSeen():
                self.views.observe(event.heartbeat, event.at.monotonic_s)
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
        event: LeaseTaken
        | LeaseRefused
        | PlaceSucceeded
        | PlaceRefused
        | PlaceUnanswered
        | PlaceResolved
        | CreateAbandoned,
    ) -> list[Effect]:
        effects: list[Effect]
        match event:
            case LeaseTaken():
                create.lease_id = event.lease_id
                effects = self._place(create, event.at)
            case LeaseRefused():
                effects = self._on_lease_refused(create, event)
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
        limits = create.request.limits
        if create.attempts >= self._config.attempts_max:
            return self._refuse(create, self._last_word(create))
        if at.monotonic_s >= create.deadline:
            error = errors.out_of_time(create.asked.timeout_s, create.last_error)
            return self._refuse(create, error)
        node = self.views.choose(
            limits, create.may_use, self._config.choices, at.monotonic_s, self._random
        )
        if node is None:
            return self._refuse(create, self._why_none(create, at))
        create.node = node
        view = self.views.get(node)
        assert view is not None  # noqa: S101  just drawn
        view.grant(create.asked.create_id, limits)
        if limits.cu > 0:
            return [
                TakeLease(
                    create_id=create.asked.create_id,
                    node=node,
                    cu=limits.cu,
                    ttl_s=self._attempt_s(create, at) + self._config.lease_claim_s,
                )
            ]
        return self._place(create, at)

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
            )
        ]

    def _on_lease_refused(self, create: _Create, event: LeaseRefused) -> list[Effect]:
        node, create.last_error = create.node, event.error
        effects = self._leave_node(create)
        create.refused_nodes.add(node)
        create.lease_refusals += 1
        final = event.error.code not in _NODE_TROUBLE
        if final or create.lease_refusals >= _LEASE_REFUSALS_MAX:
            return effects + self._refuse(create, event.error)
        return effects + self._next(create, event.at)

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
            store = error.details.get("store_id") or (view.heartbeat.store_id if view else "")
            if store:
                create.refused_stores.add(str(store))
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
        create.lease_id = ""
        return self._leave_node(create) + self._next(create, event.at)

    def _on_unreached(self, create: _Create, at: Moment) -> list[Effect]:
        self.views.unreachable(create.node)
        create.refused_nodes.add(create.node)
        return self._leave_node(create) + self._next(create, at)

    def _settle(self, create: _Create, created: SandboxCreated) -> None:
        view = self.views.get(create.node)
        if view is not None:
            # Sent by the node right after it had counted the sandbox, by the node's own clock.
            view.settle(create.asked.create_id, created.sent_at)

    def _leave_node(self, create: _Create) -> list[Effect]:
        """Take back what was counted and leased for the attempt."""
        effects: list[Effect] = []
        if create.node:
            view = self.views.get(create.node)
            if view is not None:
                view.take_back(create.asked.create_id)
            create.node = ""
        if create.lease_id:
            effects.append(ReleaseLease(lease_id=create.lease_id))
            create.lease_id = ""
        return effects

    def _refuse(self, create: _Create, error: DsecError) -> list[Effect]:
        return self._done(create, Refuse(create_id=create.asked.create_id, error=error))

    def _done(self, create: _Create, outcome: Succeed | Refuse) -> list[Effect]:
        del self._creates[create.asked.create_id]
        return [outcome]

    # --- Saying no ----------------------------------------------------------------------------

    def _last_word(self, create: _Create) -> DsecError:
        """Return the error after nodes have refused: the most telling of theirs."""
        error = create.missing_layer or create.last_error
        assert error is not None  # noqa: S101  only called after a refusal
        if error.code in _WRAPPED and create.attempts:
            return errors.out_of_attempts(create.attempts, error, self._config.retry_after_s)
        return error

    def _why_none(self, create: _Create, at: Moment) -> DsecError:
        """Return why no node can be drawn."""
        if create.last_error is not None:
            return self._last_word(create)
        limits = create.request.limits
        open_nodes = self.views.open_nodes(at.monotonic_s)
        if not open_nodes:
            return errors.no_nodes(len(self.views), self.views.draining(at.monotonic_s))
        usable = [view for view in open_nodes if create.may_use(view)]
        if not usable:
            return errors.no_gpus(limits.cu)
        possible = [view for view in usable if view.could_ever_hold(limits)]
        if not possible:
            capacity = largest(usable).heartbeat.capacity
            name = largest(usable).name
            return errors.too_large(limits, name, capacity.cpus, capacity.memory_bytes)
        return errors.all_full(len(possible), limits, self._config.retry_after_s)

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
