"""What must be true of each sandbox that the SDK was told of, and what was seen that is not.

A *world* is what a sandbox's own files may hold. An answer that is lost leaves two worlds possible;
the next look at the files tells which of them it is, and a third is a violation.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from dsec import DsecError, ErrorCode
from dsec_common.wire.sandbox import EndCause

if TYPE_CHECKING:
    from dsec import Process, Sandbox, Snapshot

World = dict[str, str]
#: What a caller may be told while a part is away, of a request that may be asked again or not.
AWAY: Final = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.TIMEOUT})
#: Operations on a sandbox that have another one placed, by the scheduler on any node.
PLACED: Final = frozenset({"create_from_snapshot"})
#: Beyond the restart of a part: clients connect again, nodes heartbeat, sandboxes are adopted.
SETTLE_S: Final = 15.0


@dataclass(slots=True, eq=False)
class Taken:
    """A snapshot, and what its files may be.

    Attributes:
        kills: how often its node's daemon had been killed when it was taken.
    """

    snapshot: Snapshot
    worlds: list[World]
    kills: int


@dataclass(slots=True, eq=False)
class Known:
    """One sandbox that the SDK was told of.

    Attributes:
        worlds: what its files may be.
        ends: the causes with which it may have ended; empty while it must live.
        over: its end was seen.
        counter: a started command that counts aloud, and the last number that was read.
    """

    sandbox: Sandbox
    worlds: list[World] = field(default_factory=lambda: [{}])
    ends: set[EndCause] = field(default_factory=set)
    over: bool = False
    counter: Process | None = None
    counted: int = 0
    snapshots: list[Taken] = field(default_factory=list)

    def may_hold(self, path: str, token: str, *, certain: bool) -> None:
        """Note that a file was written; uncertain when no answer came."""
        written = [{**world, path: token} for world in self.worlds]
        self.worlds = written if certain else _distinct([*self.worlds, *written])

    def may_be_as(self, worlds: list[World], *, certain: bool) -> None:
        """Note that it was put back to a snapshot."""
        self.worlds = list(worlds) if certain else _distinct([*self.worlds, *worlds])


@dataclass(slots=True)
class Violation:
    """Something that must not be."""

    what: str
    operation: str
    sandbox_id: str
    after_s: float


class Model:
    """All that is known, the disturbances, and the violations."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.known: dict[str, Known] = {}
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()
        self.violations: list[Violation] = []
        self.untold = 0
        self._disturbed: dict[str, float] = {}

    # --- Disturbances -------------------------------------------------------------------------

    def killed(self, part: str, *, for_s: float = 120.0) -> None:
        """Note that a part was killed; it is away until :meth:`back`, or for so long.

        For 0 seconds: nothing that is asked may be refused for that.
        """
        self.kills[part] += 1
        if for_s:
            self._disturbed[part] = time.monotonic() + for_s

    def back(self, part: str) -> None:
        """Note that a part was started again."""
        if part in self._disturbed:
            self._disturbed[part] = time.monotonic() + SETTLE_S

    def was_disturbed(self, since: float, node: str = "") -> bool:
        """Return whether a part was away at some time after ``since`` (monotonic).

        With a node only what a request to one of its sandboxes passes: NATS and the node itself.
        """
        passed = {"nats", f"sandboxd-{node}", f"spawner of sandboxd-{node}"}
        return any(
            until >= since for part, until in self._disturbed.items() if not node or part in passed
        )

    def daemon_kills(self, node: str) -> int:
        """Return how often a node's daemon was killed: each time what is not durable is lost."""
        return self.kills[f"sandboxd-{node}"]

    # --- Findings -----------------------------------------------------------------------------

    def violate(self, what: str, operation: str, sandbox_id: str = "") -> None:
        """Note what must not be."""
        after_s = round(time.monotonic() - self.started, 1)
        self.violations.append(Violation(what, operation, sandbox_id, after_s))

    def told(self, sandbox: Sandbox, worlds: list[World] | None = None) -> Known:
        """Note a sandbox that a reply named."""
        if sandbox.id in self.known:
            self.violate("the same id was given twice", "create", sandbox.id)
        known = Known(sandbox, worlds=[dict(world) for world in worlds or [{}]])
        self.known[sandbox.id] = known
        return known

    def excuse(self, error: DsecError, operation: str, since: float, known: Known | None) -> None:
        """Note an error; one that nothing excuses is a violation."""
        self.refused[f"{operation}:{error.code}"] += 1
        node = known.sandbox.node if known is not None and operation not in PLACED else ""
        # While a node is away the others may have no room; otherwise there is room for all users.
        told = AWAY if node else {*AWAY, ErrorCode.EXHAUSTED}
        if error.code in told and self.was_disturbed(since, node):
            return
        if (
            error.details.get("reason") == "snapshot_lost"
            and known is not None
            and self.daemon_kills(known.sandbox.node)
        ):
            return
        sandbox_id = known.sandbox.id if known is not None else ""
        self.violate(f"{error.code}: {error.message} {error.details}", operation, sandbox_id)

    def living(self) -> list[Known]:
        """Return the sandboxes that must be alive, or may be."""
        return [known for known in self.known.values() if not known.over]


def _distinct(worlds: list[World]) -> list[World]:
    found: list[World] = []
    for world in worlds:
        if world not in found:
            found.append(world)
    return found
