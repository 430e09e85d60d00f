"""What the solver is asked and what it answers: plain values, no I/O, no numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from dsec_common.compute.model import Card, GpuDemand, ServiceClass, Slice

#: How long a sandbox is taken to hold its units when nobody has said so.
DURATION_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """One request that waits for Compute Units.

    Attributes:
        request_id: unique in a problem.
        waited_s: since it was asked for.
        duration_s: how long it will hold its units, as well as anyone can tell.
        share: what its project holds over what it is entitled to: below 1 it is owed more, above 1
            it has more than its part; 1 when nobody counts.
        nodes: the only nodes that it may go to; None for any.
        gang: requests of the same gang are placed together or not at all; empty for none.
    """

    request_id: str
    demand: GpuDemand
    project: str = ""
    service_class: ServiceClass = ServiceClass.STANDARD
    priority: int = 0
    waited_s: float = 0.0
    duration_s: float = DURATION_S
    share: float = 1.0
    nodes: frozenset[str] | None = None
    gang: str = ""


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """One node that takes sandboxes: its cards, and the slices of them that are taken."""

    node: str
    cards: tuple[Card, ...]
    held: tuple[Slice, ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """One round's question.

    Attributes:
        prices: cost of one CU for one hour, by model as in the CU table; a model without a price
            costs 1.
        previous: the last round's answer to (nearly) the same question: where it still fits, the
            search starts from it.
    """

    waiting: tuple[Waiting, ...]
    nodes: tuple[NodeCapacity, ...]
    prices: Mapping[str, float] = field(default_factory=dict)
    previous: tuple[Assignment, ...] = ()


@dataclass(frozen=True, slots=True)
class Assignment:
    """A request's place. Its slices are free together with those of all other assignments.

    Attributes:
        cost: what the objective counts for it (``docs/services/scheduler.md``).
    """

    request_id: str
    node: str
    slices: tuple[Slice, ...]
    cost: float


class Constraint(StrEnum):
    """Why a request was left waiting: the constraint that, relaxed, would change it."""

    #: Its figures cannot be meant: not a number, negative, zero, infinite.
    INVALID = "invalid"
    #: There is no card at all.
    NO_CARDS = "no_cards"
    #: None of the nodes that it may go to is there.
    NODES = "nodes"
    #: No card is of a model that it takes.
    MODEL = "model"
    #: No node has so many healthy cards of such models.
    COUNT = "count"
    #: No node has so many on one island.
    ISLAND = "island"
    #: No node has so many CU, even when empty.
    TOO_MANY_CU = "too_many_cu"
    #: No node has so much GPU memory, even when empty.
    TOO_MUCH_MEMORY = "too_much_memory"
    #: An empty node would do; what is free now does not.
    CAPACITY = "capacity"
    #: What is free is dearer than it is willing to pay yet; it waits for something cheaper.
    PRICE = "price"
    #: It would fit, but not all of its gang.
    GANG = "gang"


@dataclass(frozen=True, slots=True)
class Unplaced:
    """A request that was left waiting, and why; ``reason`` is for people."""

    request_id: str
    constraint: Constraint
    reason: str


@dataclass(frozen=True, slots=True)
class Solution:
    """The answer to a problem.

    Every request is either in ``assignments`` or in ``unplaced``, both in the problem's order.

    Attributes:
        objective: what was minimised: the costs of the assignments, and for each unplaced request
            what it costs to leave it waiting.
        complete: the search came to its own end rather than to the deadline; then the same problem
            has the same solution, always.
    """

    assignments: tuple[Assignment, ...] = ()
    unplaced: tuple[Unplaced, ...] = ()
    objective: float = 0.0
    complete: bool = True
