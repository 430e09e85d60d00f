"""Every request of a run: what nodes made for it, what its caller was told, what must not be."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from soak.chaos_run import RunModel


@dataclass(slots=True, eq=False)
class Asked:
    """One request, from its first sending to its final answer.

    Attributes:
        count: how many sandboxes it is for: one, or those of a gang.
        made: the ids of all that nodes ever made for it.
        alive: those that are there now.
        answers: what its caller was told; more than one is a contradiction.
    """

    request_id: str
    kind: str
    count: int = 1
    made: list[str] = field(default_factory=list)
    alive: set[str] = field(default_factory=set)
    answers: set[str] = field(default_factory=set)


class Model(RunModel):
    """What is known of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, Asked] = {}
        self.granted: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.again: Counter[str] = Counter()
        self.died = 0
        self._placements: set[str] = set()

    # --- What nodes say -----------------------------------------------------------------------

    def told(self, node: str, local: str, request_id: str) -> None:
        """Note that a node was told to make a sandbox; the same placement never comes twice.

        A node that refuses leads to another one, under the same local id.
        """
        placement = f"{node}.{local}"
        self.note(f"place {request_id} as {placement}")
        if placement in self._placements:
            self.violate(f"placement {placement} was sent twice", request_id)
        self._placements.add(placement)

    def made(self, sandbox_id: str, request_id: str) -> None:
        """Note that a node made a sandbox."""
        self.note(f"made {request_id} as {sandbox_id}")
        asked = self.asked[request_id]
        asked.made.append(sandbox_id)
        asked.alive.add(sandbox_id)
        if len(asked.alive) > asked.count or (asked.count == 1 and len(asked.made) > 1):
            self.violate(f"granted twice: {asked.made}", request_id)
        if any(answer.startswith("refused") for answer in asked.answers):
            self.violate(f"made after it was refused: {sandbox_id}", request_id)

    def gone(self, sandbox_id: str, request_id: str) -> None:
        """Note that a sandbox is no more."""
        self.note(f"gone {request_id} {sandbox_id}")
        self.asked[request_id].alive.discard(sandbox_id)

    # --- What callers are told ----------------------------------------------------------------

    def ask(self, request_id: str, kind: str, count: int = 1) -> Asked:
        """Note that something is about to be asked for."""
        self.note(f"ask {request_id} for {kind}")
        asked = self.asked[request_id] = Asked(request_id, kind, count)
        return asked

    def answered(self, asked: Asked, answer: str) -> None:
        """Note an answer that is final; the same one may come again."""
        self.note(f"answer {asked.request_id}: {answer}")
        asked.answers.add(answer)
        if len(asked.answers) > 1:
            self.violate(f"two answers: {sorted(asked.answers)}", asked.request_id)

    def was_granted(self, asked: Asked, *sandbox_ids: str) -> None:
        """Note that a caller has its sandboxes, which must be there."""
        self.answered(asked, f"granted {' '.join(sandbox_ids)}")
        self.granted[asked.kind] += 1
        if asked.alive != set(sandbox_ids):
            there = sorted(asked.alive)
            self.violate(f"granted {sorted(sandbox_ids)}, but there are {there}", asked.request_id)

    def was_refused(self, asked: Asked, code: str) -> None:
        """Note a refusal: nothing may be left of the request."""
        self.answered(asked, f"refused {code}")
        self.refused[f"{asked.kind}:{code}"] += 1
        if asked.alive:
            said = f"refused ({code}), but there are {sorted(asked.alive)}"
            self.violate(said, asked.request_id)

    def unanswered(self) -> list[Asked]:
        """Return the requests without a final answer."""
        return [one for one in self.asked.values() if not one.answers]
