"""A round through the queues while it is on its way. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dsec_scheduler.asks import Ask, World
from dsec_scheduler.supply import Cards, Supply


@dataclass(slots=True)
class Stage:
    """A part of a round: some asks, and the cards that they may have.

    Leases yield to the realtime asks that are left when one is over that ``makes_room``.
    """

    order: Iterator[tuple[Ask, str]]
    cards: Cards
    makes_room: bool = False
    questions: int = 0


@dataclass(slots=True)
class Round:
    """A round on its way.

    Attributes:
        world: as it was when the round began.
        supply: what is left of it.
        now: when it began.
        stages: those that are not over, each begun when the ones before it are.
        asked: what the last question was about, by the names in it.
        left_over: an ask that did not go into the last question is the first of the next.
        questions: how many there were.
        held_cu: by project: what it held when the round began, and what has found a place since,
            here or for another scheduler. A quota is for all classes together.
    """

    world: World
    supply: Supply
    now: float
    stages: list[Stage]
    asked: dict[str, Ask] = field(default_factory=dict)
    left_over: Ask | None = None
    questions: int = 0
    held_cu: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        """Begin with what is held."""
        self.held_cu = dict(self.world.held_cu)

    def note(self, ask: Ask) -> None:
        """Count what has found a place."""
        self.held_cu[ask.project] = self.held_cu.get(ask.project, 0.0) + ask.min_cu
