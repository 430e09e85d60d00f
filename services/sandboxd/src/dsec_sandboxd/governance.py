"""What the agents of this node's sandboxes may do, by all that the node was told. No I/O.

Rules may come twice, late, or in another order than they were made: of two that reach a sandbox the
one with the higher revision holds, so what is known in the end does not depend on the way there.
"""

from __future__ import annotations

import msgspec

from dsec_common.wire.agent import AgentPolicy
from dsec_common.wire.agent_node import AgentRules
from dsec_sandboxd.records import SandboxRecord


def merged(known: AgentRules | None, told: AgentRules) -> AgentRules:
    """Return what holds after both; ``known`` itself when ``told`` adds nothing."""
    if known is None:
        return told
    newer = told if told.revision > known.revision else known
    versions = _highest(known.versions, told.versions)
    pinned = _highest(known.pinned, told.pinned)
    used = {*versions.values(), *pinned.values()}
    both = {**known.policies, **told.policies}
    result = msgspec.structs.replace(
        newer,
        policies={revision: policy for revision, policy in both.items() if revision in used},
        versions=versions,
        pinned=pinned,
    )
    return known if result == known else result


def _highest(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {key: max(one.get(key, 0), other.get(key, 0)) for key in one.keys() | other.keys()}


def only_pins(before: AgentRules | None, now: AgentRules) -> frozenset[str] | None:
    """Return of which single sandboxes alone the rules have changed; None if of others, too."""
    if before is None or (before.versions, before.draining) != (now.versions, now.draining):
        return None
    return frozenset(
        local for local, revision in now.pinned.items() if before.pinned.get(local) != revision
    )


class Governance:
    """The rules of every agent that this node has, or had, instances of."""

    def __init__(self) -> None:
        self._rules: dict[tuple[str, str], AgentRules] = {}

    def after(self, told: AgentRules) -> AgentRules | None:
        """Return what would hold after being told this; None if that changes nothing."""
        known = self._rules.get((told.project, told.name))
        now = merged(known, told)
        return None if now is known else now

    def put(self, rules: AgentRules) -> None:
        """Have these rules hold."""
        self._rules[rules.project, rules.name] = rules

    def rules(self, project: str, agent: str) -> AgentRules | None:
        """Return what holds for an agent, or None."""
        return self._rules.get((project, agent))

    def revision(self, project: str, agent: str) -> int:
        """Return the revision up to which an agent's rules are known; 0 for nothing."""
        rules = self._rules.get((project, agent))
        return 0 if rules is None else rules.revision

    def policy(self, record: SandboxRecord) -> AgentPolicy | None:
        """Return the policy that holds for a sandbox; None for one that is no instance."""
        if not record.agent_version:
            return None
        rules = self._rules.get((record.project, record.agent))
        if rules is None:
            return None
        revision = max(
            rules.versions.get(record.agent_version, 0), rules.pinned.get(record.local, 0)
        )
        return rules.policies.get(revision)

    def is_leaving(self, record: SandboxRecord) -> bool:
        """Return whether a sandbox is of a version whose instances finish and leave."""
        if not record.agent_version:
            return False
        rules = self._rules.get((record.project, record.agent))
        return rules is not None and record.agent_version in rules.draining

    def forget(self, record: SandboxRecord) -> None:
        """Drop what was only about a sandbox that is over."""
        rules = self._rules.get((record.project, record.agent))
        if rules is not None and record.local in rules.pinned:
            pinned = {key: value for key, value in rules.pinned.items() if key != record.local}
            self._rules[record.project, record.agent] = msgspec.structs.replace(
                rules, pinned=pinned
            )
