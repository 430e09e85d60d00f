"""What always holds for a node's core; checked by tests after each event. No I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from dsec_common.wire.node import Resources
from dsec_common.wire.sandbox import SandboxState
from dsec_sandboxd.admission import NodeRules
from dsec_sandboxd.deadlines import Deadlines
from dsec_sandboxd.living import Living
from dsec_sandboxd.records import SandboxRecord


def check_invariants(
    rules: NodeRules,
    allocated: Resources,
    living: Mapping[str, Living],
    ended: Mapping[str, SandboxRecord],
    due: Deadlines,
) -> None:
    """Return if every invariant holds.

    Raises:
        AssertionError: naming the invariant.
    """
    records = [each.record for each in living.values()]
    _check(lambda: not set(living) & set(ended), "no sandbox is alive and ended")
    _check(
        lambda: allocated.memory_bytes == sum(record.limits.memory_bytes for record in records),
        "the memory given out is what the living were given",
    )
    _check(
        lambda: math.isclose(
            allocated.cpus, sum(record.limits.cpus for record in records), abs_tol=1e-6
        ),
        "the cpus given out are what the living were given",
    )
    _check(
        lambda: (
            allocated.memory_bytes <= rules.capacity.memory_bytes
            and len(records) <= rules.capacity.sandboxes
        ),
        "no more is given out than there is",
    )
    _check(
        lambda: all(each.facts.counts_against_node for each in living.values()),
        "no living sandbox has ended",
    )
    _check(
        lambda: all(
            record.state is SandboxState.ENDED and record.end_cause is not None
            for record in ended.values()
        ),
        "every ended sandbox has a cause",
    )
    _check(
        lambda: all(
            each.end_cause is not None
            for each in living.values()
            if each.record.state is SandboxState.DELETING
        ),
        "every sandbox that is being removed has a cause",
    )
    _check(
        lambda: all(local in living and living[local].facts.deadline_runs for local in due),
        "only sandboxes whose time runs are looked at",
    )
    _check(
        lambda: all(
            (at := due.at(local)) is not None and at <= moment
            for local, each in living.items()
            if (moment := each.due_s()) is not None
        ),
        "every sandbox whose time runs is looked at no later than it is over",
    )
    _check(
        lambda: all(
            bool(each.deadline_s) == bool(each.record.expires_at)
            for each in living.values()
            if each.facts.deadline_runs
        ),
        "a sandbox has a deadline if its record says so",
    )
    _check(
        lambda: all(
            not each.wake or each.record.state is SandboxState.PAUSING for each in living.values()
        ),
        "only a sandbox that is being stopped is to be woken then",
    )
    _check(
        lambda: all(
            bool(each.record.paused_at)
            == (each.record.state in {SandboxState.PAUSED, SandboxState.RESUMING})
            for each in living.values()
            if each.facts.deadline_runs
        ),
        "a sandbox that stands still says since when, and no other",
    )
    _check(lambda: all(each.in_use >= 0 for each in living.values()), "no use ends twice")
    _check(
        lambda: len(ended) <= rules.ended_kept_max,
        "no more ended sandboxes are kept than allowed",
    )


def _check(holds: Callable[[], bool], invariant: str) -> None:
    if not holds():
        raise AssertionError(f"the node's state is broken: {invariant}")
