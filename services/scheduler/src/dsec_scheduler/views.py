"""What the scheduler believes of each node, and how it draws one.

A belief is the node's last heartbeat plus what was granted since. It is at most a second old and
the node decides in the end, so it need not be right, only good.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from dsec_common.compute.conservation import BURST_FACTOR, bursts, is_other_capacity
from dsec_common.wire.node import NodeHeartbeat, Resources
from dsec_common.wire.sandbox import Limits
from dsec_scheduler.crowd import Crowd

VETO_S: Final = 0.1
"""A node that said it is full is not asked again for this long, unless it looks roomy."""

#: Silence comes without a word, so nodes are counted again so often.
_COUNT_HOLDS_S: Final = 0.25
#: Of so many heartbeats the quickest tells how a node's clock differs from ours. When its clock is
#: set back that takes as many to be known, and until then placements there lapse too late.
_LAGS_KEPT: Final = 8
_TOLERANCE: Final = 1e-9
_NOTHING: Final = Resources()


@dataclass(slots=True)
class Grant:
    """What a creation takes of a node; ``settled_at`` is when it was made, by the node's clock."""

    limits: Limits
    settled_at: float | None = None


@dataclass(slots=True)
class Sum:
    """A running total, so that a choice costs the same with one grant or a thousand."""

    cpus: float = 0.0
    memory_bytes: int = 0
    sandboxes: int = 0

    def add(self, limits: Limits) -> None:
        """Count one more sandbox."""
        self.cpus += limits.cpus
        self.memory_bytes += limits.memory_bytes
        self.sandboxes += 1

    def subtract(self, limits: Limits) -> None:
        """Count one sandbox less."""
        self.memory_bytes -= limits.memory_bytes
        self.sandboxes -= 1
        # Fractions do not add up exactly; an empty sum starts over.
        self.cpus = self.cpus - limits.cpus if self.sandboxes else 0.0


@dataclass(slots=True)
class NodeView:
    """One node as believed. ``pending`` grants are still being made, ``settled`` ones are made.

    One that ``is_other`` is not of the cluster's own capacity.
    """

    heartbeat: NodeHeartbeat
    seen_at: float
    grants: dict[int, Grant] = field(default_factory=dict)
    pending: Sum = field(default_factory=Sum)
    settled: Sum = field(default_factory=Sum)
    vetoed_until: float = 0.0
    unreachable: bool = False
    lags_s: deque[float] = field(default_factory=lambda: deque(maxlen=_LAGS_KEPT))
    is_other: bool = field(init=False)
    _most: Resources = field(init=False)

    def __post_init__(self) -> None:
        self._most = _most_of_one(self.heartbeat)
        self.is_other = is_other_capacity(self.heartbeat.labels)

    @property
    def lag_s(self) -> float:
        """How far the node's wall clock is behind ours, by the heartbeat that came quickest.

        The heartbeat's way here is part of it: it is rather more than the clocks differ, not less.
        """
        return min(self.lags_s, default=0.0)

    @property
    def name(self) -> str:
        """The node's name."""
        return self.heartbeat.node

    # --- Grants -------------------------------------------------------------------------------

    def grant(self, create_id: int, limits: Limits) -> None:
        """Count a creation that the node is about to be asked for."""
        self.grants[create_id] = Grant(limits)
        self.pending.add(limits)

    def settle(self, create_id: int, settled_at: float) -> None:
        """Count it as made, until a heartbeat sent no earlier counts it."""
        grant = self.grants.get(create_id)
        if grant is None or grant.settled_at is not None:
            return
        self.pending.subtract(grant.limits)
        if settled_at <= self.heartbeat.sent_at:
            del self.grants[create_id]
            return
        grant.settled_at = settled_at
        self.settled.add(grant.limits)

    def take_back(self, create_id: int) -> None:
        """Count it no longer."""
        grant = self.grants.pop(create_id, None)
        if grant is not None:
            (self.pending if grant.settled_at is None else self.settled).subtract(grant.limits)

    def observe(self, heartbeat: NodeHeartbeat, now: float) -> None:
        """Take over a heartbeat: what was made before it was sent is part of it."""
        if self.heartbeat.epoch != heartbeat.epoch:
            # Another life of the node: none of the earlier grants lives.
            self.grants.clear()
            self.pending, self.settled = Sum(), Sum()
            self.vetoed_until = 0.0
        self.heartbeat, self.seen_at, self.unreachable = heartbeat, now, False
        self._most = _most_of_one(heartbeat)
        self.is_other = is_other_capacity(heartbeat.labels)
        counted = [
            create_id
            for create_id, grant in self.grants.items()
            if grant.settled_at is not None and grant.settled_at <= heartbeat.sent_at
        ]
        for create_id in counted:
            self.take_back(create_id)

    # --- Room ---------------------------------------------------------------------------------

    def taken(self) -> Resources:
        """Return what is allocated or granted by all that is known."""
        allocated = self.heartbeat.allocated
        return Resources(
            cpus=allocated.cpus + self.pending.cpus + self.settled.cpus,
            memory_bytes=allocated.memory_bytes
            + self.pending.memory_bytes
            + self.settled.memory_bytes,
            sandboxes=allocated.sandboxes + self.pending.sandboxes + self.settled.sandboxes,
        )

    def most(self) -> Resources:
        """Return the most that one sandbox could have: no more than there is, oversold or not."""
        return self._most

    def could_ever_hold(self, limits: Limits) -> bool:
        """Return whether the sandbox fits into the node when it is empty."""
        return _fits(limits, _NOTHING, self._most)

    def has_room(self, limits: Limits) -> bool:
        """Return whether the sandbox fits by all that is known."""
        # Asked for each node that is drawn: no sum is made an object of.
        pending, settled = self.pending, self.settled
        allocated, capacity = self.heartbeat.allocated, self.heartbeat.capacity
        return (
            allocated.cpus + pending.cpus + settled.cpus + limits.cpus <= capacity.cpus + _TOLERANCE
            and allocated.memory_bytes
            + pending.memory_bytes
            + settled.memory_bytes
            + limits.memory_bytes
            <= capacity.memory_bytes
            and allocated.sandboxes + pending.sandboxes + settled.sandboxes < capacity.sandboxes
            and self.could_ever_hold(limits)
        )

    def may_have_room(self, limits: Limits, now: float) -> bool:
        """Return whether the sandbox may fit although it seems not to.

        Sandboxes end between heartbeats: only what is being made right now is certainly there.
        """
        return (
            now >= self.vetoed_until
            and _fits(limits, self.pending, self.heartbeat.capacity)
            and self.could_ever_hold(limits)
        )

    def load(self) -> float:
        """Return the fullest of the node's resources, 0 to 1 (and above when oversold)."""
        pending, settled = self.pending, self.settled
        allocated, capacity = self.heartbeat.allocated, self.heartbeat.capacity
        return max(
            _share(allocated.cpus + pending.cpus + settled.cpus, capacity.cpus),
            _share(
                allocated.memory_bytes + pending.memory_bytes + settled.memory_bytes,
                capacity.memory_bytes,
            ),
            _share(allocated.sandboxes + pending.sandboxes + settled.sandboxes, capacity.sandboxes),
        )


def _most_of_one(heartbeat: NodeHeartbeat) -> Resources:
    capacity, physical = heartbeat.capacity, heartbeat.physical
    return Resources(
        # A heartbeat that tells nothing of the machine speaks of what is handed out alone.
        cpus=min(capacity.cpus, physical.cpus or capacity.cpus),
        memory_bytes=min(capacity.memory_bytes, physical.memory_bytes or capacity.memory_bytes),
        sandboxes=capacity.sandboxes,
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 1.0


def _fits(limits: Limits, taken: Resources | Sum, capacity: Resources) -> bool:
    return (
        taken.cpus + limits.cpus <= capacity.cpus + _TOLERANCE
        and taken.memory_bytes + limits.memory_bytes <= capacity.memory_bytes
        and taken.sandboxes + 1 <= capacity.sandboxes
    )


class Views:
    """All nodes as believed.

    Args:
        timeout_s: a node is alive while its last heartbeat is younger.
        forget_s: a silent node is forgotten after this long.
        burst_factor: the use of the cluster's own nodes above which other capacity goes first.
    """

    def __init__(
        self, timeout_s: float, forget_s: float, burst_factor: float = BURST_FACTOR
    ) -> None:
        self._timeout_s = timeout_s
        self._forget_s = forget_s
        self._burst_factor = burst_factor
        self._views: dict[str, NodeView] = {}
        self._own, self._others = Crowd(), Crowd()
        self._open_count, self._counted_at = 0, -math.inf
        self._bursting, self._used_at = False, -math.inf

    def __len__(self) -> int:
        return len(self._views)

    def __iter__(self) -> Iterator[NodeView]:
        return iter(self._views.values())

    def get(self, node: str) -> NodeView | None:
        """Return the node's view, or None."""
        return self._views.get(node)

    def is_other(self, node: str) -> bool:
        """Return whether a node is known not to be of the cluster's own capacity."""
        view = self._views.get(node)
        return view is not None and view.is_other

    # --- What becomes known -------------------------------------------------------------------

    def observe(self, heartbeat: NodeHeartbeat, now: float, unix_s: float) -> None:
        """Take over a heartbeat, of a new node or a known one."""
        view = self._views.get(heartbeat.node)
        if view is None or view.unreachable or view.heartbeat.draining != heartbeat.draining:
            self._counted_at = -math.inf
        if view is not None:
            was_other = view.is_other
            view.observe(heartbeat, now)
            if view.is_other is not was_other:
                (self._others if was_other else self._own).remove(view.name)
                self._crowd_of(view).add(view.name)
        else:
            view = self._views[heartbeat.node] = NodeView(heartbeat, now)
            self._crowd_of(view).add(view.name)
        view.lags_s.append(unix_s - heartbeat.sent_at)
        self._crowd_of(view).freed(view.name)

    def _crowd_of(self, view: NodeView) -> Crowd:
        return self._others if view.is_other else self._own

    def lag_s(self, node: str) -> float:
        """Return how far a node's wall clock is behind ours; 0 for one that was never heard."""
        view = self._views.get(node)
        return view.lag_s if view is not None else 0.0

    def forget_silent(self, now: float) -> None:
        """Drop nodes that have been silent for very long."""
        for name, view in list(self._views.items()):
            if now - view.seen_at > self._forget_s:
                del self._views[name]
                self._crowd_of(view).remove(name)
                self._counted_at = -math.inf

    def veto(self, node: str, now: float) -> None:
        """Note that the node says it is full."""
        view = self._views.get(node)
        if view is not None:
            view.vetoed_until = now + VETO_S

    def unreachable(self, node: str) -> None:
        """Note that the node did not answer; its next heartbeat says otherwise."""
        view = self._views.get(node)
        if view is not None:
            view.unreachable = True
            self._counted_at = -math.inf

    # --- Grants -------------------------------------------------------------------------------

    def grant(self, node: str, create_id: int, limits: Limits) -> None:
        """Count a creation that the node is about to be asked for."""
        view = self._views.get(node)
        if view is not None:
            view.grant(create_id, limits)

    def settle(self, node: str, create_id: int, settled_at: float) -> None:
        """Count it as made, until a heartbeat sent no earlier counts it."""
        view = self._views.get(node)
        if view is not None:
            view.settle(create_id, settled_at)
            self._crowd_of(view).freed(node)

    def take_back(self, node: str, create_id: int) -> None:
        """Count it no longer."""
        view = self._views.get(node)
        if view is not None:
            view.take_back(create_id)
            self._crowd_of(view).freed(node)

    # --- Choosing -----------------------------------------------------------------------------

    def is_alive(self, view: NodeView, now: float) -> bool:
        """Return whether the node is heard of and answers."""
        return not view.unreachable and now - view.seen_at <= self._timeout_s

    def is_silent(self, view: NodeView, now: float) -> bool:
        """Return whether its heartbeats have stopped."""
        return now - view.seen_at > self._timeout_s

    def choose(
        self,
        limits: Limits,
        usable: Callable[[NodeView], bool],
        choices: int,
        now: float,
        randomness: random.Random,
        *,
        own_first: bool = False,
    ) -> str | None:
        """Return the node to ask, or None when none may have room.

        Of ``choices`` random nodes with room the least loaded is taken (power of k choices), so
        that schedulers which do not talk to each other do not all run to the same node. Nodes that
        only may have room come after all others.

        The cluster's own nodes come before other capacity; once those are used above the burst line
        it is the other way round, unless ``own_first``.
        """
        views = self._views
        crowds = self._crowds(now, own_first=own_first)
        size = (limits.cpus, limits.memory_bytes)

        def fits(name: str) -> bool:
            view = views[name]
            return self.is_open(view, now) and usable(view) and view.has_room(limits)

        def may_fit(name: str) -> bool:
            view = views[name]
            return self.is_open(view, now) and usable(view) and view.may_have_room(limits, now)

        for crowd in crowds:
            drawn = crowd.draw(size, fits, choices, randomness) or crowd.with_room(
                size,
                lambda name: usable(views[name]),
                lambda name: self.has_room(name, limits, now),
                choices,
                randomness,
            )
            if drawn:
                return self._least_loaded(drawn)
        for crowd in crowds:
            drawn = crowd.any_that(may_fit, choices, randomness)
            if drawn:
                return self._least_loaded(drawn)
        return None

    def _least_loaded(self, names: Iterable[str]) -> str:
        return min((self._views[name] for name in names), key=NodeView.load).name

    def _crowds(self, now: float, *, own_first: bool) -> tuple[Crowd, ...]:
        """Return the nodes in the order in which they take work."""
        if not len(self._others):
            return (self._own,)
        if own_first or not self._bursts(now):
            return self._own, self._others
        return self._others, self._own

    def _bursts(self, now: float) -> bool:
        """Return whether the cluster's own nodes are used above the burst line."""
        if now - self._used_at > _COUNT_HOLDS_S:
            own = [view for view in self.open_nodes(now) if not view.is_other]
            amounts = [(view.taken(), view.heartbeat.capacity) for view in own]
            self._bursting = any(
                bursts(
                    math.fsum(getattr(taken, what) for taken, _ in amounts),
                    math.fsum(getattr(capacity, what) for _, capacity in amounts),
                    self._burst_factor,
                )
                for what in ("cpus", "memory_bytes", "sandboxes")
            )
            self._used_at = now
        return self._bursting

    def seems_to_take(self, node: str, limits: Limits, now: float) -> bool:
        """Return whether it is worth asking this very node."""
        view = self._views.get(node)
        return (
            view is not None
            and self.is_open(view, now)
            and (view.has_room(limits) or view.may_have_room(limits, now))
        )

    def has_room(self, node: str, limits: Limits, now: float) -> bool:
        """Return whether a node takes new sandboxes and has room for one.

        After a false answer a true one takes a heartbeat, or a grant that is settled or taken back.
        """
        view = self._views.get(node)
        return view is not None and self.is_open(view, now) and view.has_room(limits)

    def is_open(self, view: NodeView, now: float) -> bool:
        """Return whether the node is alive and takes new sandboxes."""
        return self.is_alive(view, now) and not view.heartbeat.draining

    def open_nodes(self, now: float) -> list[NodeView]:
        """Return the nodes that are alive and take new sandboxes."""
        return [view for view in self if self.is_open(view, now)]

    def open_count(self, now: float) -> int:
        """Return how many those are; what fell silent a moment ago may be among them."""
        if now - self._counted_at > _COUNT_HOLDS_S:
            self._open_count, self._counted_at = len(self.open_nodes(now)), now
        return self._open_count

    def draining(self, now: float) -> int:
        """Return how many live nodes are draining."""
        return sum(view.heartbeat.draining for view in self if self.is_alive(view, now))


def largest(views: Iterable[NodeView]) -> NodeView:
    """Return the node whose sandboxes can have the most memory; of equal ones the most cpus."""
    return max(views, key=lambda view: (view.most().memory_bytes, view.most().cpus))
