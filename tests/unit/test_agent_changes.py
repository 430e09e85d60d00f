from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.agent import (
    AGENT_SOCKET,
    NETWORK_ACCESS,
    AgentPolicy,
    AgentUpdate,
    RegisterAgent,
    VersionState,
    shard_of,
)
from dsec_common.wire.agent_node import AgentRules, InstanceEnded, InstanceStarted
from dsec_sandboxd.governance import merged, only_pins
from dsec_scheduler.agents import changes, shards
from dsec_scheduler.agents.records import AgentRecord, InstanceRecord, Outcome, ShardRecord

NETLESS = AgentPolicy(revoked=(NETWORK_ACCESS,))
SLOW = AgentPolicy(rate_limits={AGENT_SOCKET: 5.0})


def _agent(*versions: str) -> AgentRecord:
    record: AgentRecord | None = None
    for version in versions:
        request = RegisterAgent(name="bot", version=version)
        record = changes.registered(record, "default", request, "", 1.0)
    assert record is not None
    return record


def _update(version: str) -> AgentUpdate:
    return AgentUpdate(
        name="bot",
        version=version,
        failure_window_s=100.0,
        failure_threshold=0.2,
        failure_minimum=5,
    )


def test_the_first_version_is_active_and_later_ones_stand_by() -> None:
    record = _agent("1", "2")
    assert record.active == "1"
    assert [one.state for one in record.versions.values()] == [
        VersionState.ACTIVE,
        VersionState.STANDBY,
    ]


def test_a_version_is_registered_once_and_never_changes() -> None:
    record = _agent("1")
    same = changes.registered(record, "default", RegisterAgent(name="bot", version="1"), "", 9.0)
    assert same is record
    other = RegisterAgent(name="bot", version="1", base="debian@12")
    with pytest.raises(DsecError, match="never changes") as caught:
        changes.registered(record, "default", other, "", 9.0)
    assert caught.value.code is ErrorCode.CONFLICT


@pytest.mark.parametrize("name", ["", "Bot", "a.b", "a b", "*", "x" * 64, "_a"])
def test_a_name_that_cannot_stand_in_a_key_is_refused(name: str) -> None:
    with pytest.raises(DsecError, match="not an agent's name"):
        changes.registered(None, "default", RegisterAgent(name=name, version="1"), "", 1.0)


@pytest.mark.parametrize(
    "policy",
    [
        AgentPolicy(revoked=("read_file",)),
        AgentPolicy(rate_limits={"http_client": 1.0}),
    ],
)
def test_what_nothing_enforces_is_refused_with_what_can_be(policy: AgentPolicy) -> None:
    with pytest.raises(DsecError, match="nothing enforces") as caught:
        changes.pushed(_agent("1"), policy, "", single=False)
    assert caught.value.code is ErrorCode.UNSUPPORTED
    assert NETWORK_ACCESS in caught.value.message or AGENT_SOCKET in caught.value.message


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(DsecError) as caught:
        changes.pushed(_agent("1"), AgentPolicy(rate_limits={AGENT_SOCKET: rate}), "", single=False)
    assert caught.value.code is ErrorCode.INVALID


def test_a_policy_for_all_holds_for_versions_that_come_later() -> None:
    record = changes.pushed(_agent("1"), NETLESS, "", single=False)
    later = changes.registered(record, "default", RegisterAgent(name="bot", version="2"), "", 2.0)
    rules = changes.rules_of(later)
    assert rules.policies[rules.versions["2"]] == NETLESS


def test_a_policy_for_one_version_leaves_the_others_alone() -> None:
    record = changes.pushed(_agent("1", "2"), SLOW, "2", single=False)
    rules = changes.rules_of(record)
    assert set(rules.versions) == {"2"}
    later = changes.registered(record, "default", RegisterAgent(name="bot", version="3"), "", 2.0)
    assert later.versions["3"].policy == 0


def test_a_revocation_leaves_the_rest_of_each_policy_as_it_is() -> None:
    record = changes.pushed(_agent("1", "2"), SLOW, "1", single=False)
    revoked, successors = changes.revoked(record, [NETWORK_ACCESS], "", [], single=False)
    policies = {
        name: revoked.policies[version.policy] for name, version in revoked.versions.items()
    }
    assert policies["1"] == msgspec.structs.replace(SLOW, revoked=(NETWORK_ACCESS,))
    assert policies["2"] == NETLESS
    assert set(successors) == {0, record.revision}


def test_single_instances_have_policies_of_their_own_up_to_a_bound() -> None:
    record = _agent("1")
    for _ in range(changes.POLICIES_MAX):
        record = changes.pushed(record, SLOW, "", single=True)
    with pytest.raises(DsecError, match="push one to all") as caught:
        changes.pushed(record, SLOW, "", single=True)
    assert caught.value.code is ErrorCode.EXHAUSTED
    whole = changes.pushed(record, NETLESS, "", single=False)
    assert list(whole.policies.values()) == [NETLESS]


def test_an_update_sends_new_work_to_one_version_and_drains_the_other() -> None:
    record = changes.updated(_agent("1", "2"), _update("2"), Outcome(), 10.0)
    assert record.active == "2"
    assert changes.rules_of(record).draining == ("1",)
    assert changes.updated(record, _update("2"), Outcome(), 11.0) is record


def test_an_update_to_an_unknown_version_names_those_that_there_are() -> None:
    with pytest.raises(DsecError, match="1, 2") as caught:
        changes.updated(_agent("1", "2"), _update("3"), Outcome(), 10.0)
    assert caught.value.code is ErrorCode.NOT_FOUND


@pytest.mark.parametrize(
    ("finished", "failed", "now", "state"),
    [
        (4, 4, 20.0, "watching"),
        (10, 2, 20.0, "watching"),
        (10, 3, 20.0, "rolled_back"),
        (10, 10, 111.0, "settled"),
    ],
)
def test_a_new_version_is_judged_by_its_failures_within_the_window(
    finished: int, failed: int, now: float, state: str
) -> None:
    before = Outcome(100, 100)  # an earlier try of the same version does not count
    record = changes.updated(_agent("1", "2"), _update("2"), before, 10.0)
    judged = changes.judged(record, before + Outcome(finished, failed), now)
    assert judged.rollout is not None
    assert judged.rollout.state == state
    assert judged.active == ("1" if state == "rolled_back" else "2")
    if state == "rolled_back":
        assert judged.versions["2"].state is VersionState.FAILED
        assert changes.rules_of(judged).draining == ("2",)
        assert "3 of 10" in judged.rollout.reason


# --- Documents of instances -----------------------------------------------------------------------

LOCALS = st.sampled_from(["a", "b", "c"])


def _started(local: str) -> InstanceStarted:
    return InstanceStarted(project="default", local=local, agent="bot", version="1", started_at=1.0)


@given(
    st.lists(st.tuples(st.lists(LOCALS), st.lists(LOCALS), st.booleans()), max_size=8),
)
def test_a_report_that_comes_twice_counts_once(
    reports: list[tuple[list[str], list[str], bool]],
) -> None:
    once = twice = ShardRecord()
    for started, ended, failed in reports:
        began = [_started(local) for local in started]
        over = [InstanceEnded(project="default", local=one, failed=failed) for one in ended]
        once = shards.reported(once, "n", began, []) or once
        once = shards.reported(once, "n", [], over) or once
        for _ in range(2):
            twice = shards.reported(twice, "n", began, []) or twice
        for _ in range(2):
            twice = shards.reported(twice, "n", [], over) or twice
    assert (once.instances, once.outcomes) == (twice.instances, twice.outcomes)


def test_an_own_policy_is_pinned_upwards_only_and_to_the_agents_own_instances() -> None:
    shard = ShardRecord(
        instances={
            "n.a": InstanceRecord("bot", "1", 1.0, 7),
            "n.b": InstanceRecord("bot", "1", 1.0, 3),
            "n.c": InstanceRecord("other", "1", 1.0),
        }
    )
    pinned = shards.pinned(shard, "bot", dict.fromkeys(shard.instances, 5) | {"n.d": 5})
    assert pinned is not None
    assert {key: one.policy for key, one in pinned.instances.items()} == {
        "n.a": 7,
        "n.b": 5,
        "n.c": 0,
    }
    assert shards.pinned(pinned, "bot", {"n.b": 5}) is None


def test_instances_spread_over_all_documents() -> None:
    counts: dict[str, int] = {}
    for number in range(25_600):
        shard = shard_of(f"node-{number % 160}.01m8nk{number:020}")
        counts[shard] = counts.get(shard, 0) + 1
    assert len(counts) == 256
    assert max(counts.values()) < 2 * 100


# --- What nodes know ------------------------------------------------------------------------------


def _rules(revision: int, version: int, pin: int) -> AgentRules:
    policies = {
        number: AgentPolicy(rate_limits={AGENT_SOCKET: float(number)})
        for number in {version, pin}
        if number
    }
    return AgentRules(
        project="default",
        name="bot",
        revision=revision,
        policies=policies,
        versions={"1": version} if version else {},
        pinned={"a": pin} if pin else {},
        draining=("0",) * (revision % 2),
    )


@st.composite
def _told(draw: st.DrawFn) -> AgentRules:
    revision = draw(st.integers(1, 6))
    return _rules(revision, draw(st.integers(0, revision)), draw(st.integers(0, revision)))


@given(st.lists(_told(), min_size=1, max_size=6), st.randoms())
def test_nodes_agree_in_whatever_order_they_are_told(
    told: list[AgentRules], randomness: random.Random
) -> None:
    # Of one revision there is one document, so the rest of it is a function of the revision.
    shuffled = list(told)
    randomness.shuffle(shuffled)

    def all_of(rules: list[AgentRules]) -> AgentRules:
        known: AgentRules | None = None
        for one in [*rules, *rules[:2]]:
            known = merged(known, one)
        assert known is not None
        return known

    assert all_of(told) == all_of(shuffled)


def test_a_node_knows_when_single_instances_alone_are_concerned() -> None:
    before = _rules(2, 1, 0)
    assert only_pins(before, merged(before, _rules(4, 1, 3))) == frozenset({"a"})
    assert only_pins(before, merged(before, _rules(4, 3, 3))) is None
    assert only_pins(None, before) is None


def test_a_version_that_nobody_uses_can_be_removed() -> None:
    record = changes.updated(_agent("1", "2", "3"), _update("2"), Outcome(), 10.0)
    without = changes.removed(record, "3", {"1": 5}, 20.0)
    assert list(without.versions) == ["1", "2"]
    assert without.revision == record.revision + 1
    for version, instances, why in (
        ("2", {}, "new work goes to it"),
        ("1", {"1": 5}, "5 instances"),
        ("1", {}, "new work goes back to it"),
    ):
        with pytest.raises(DsecError, match=why) as kept:
            changes.removed(record, version, instances, 20.0)
        assert kept.value.code is ErrorCode.CONFLICT
    with pytest.raises(DsecError, match="no version '9'"):
        changes.removed(record, "9", {}, 20.0)
    # Once the update is settled nothing goes back by itself.
    later = changes.removed(record, "1", {}, 10.0 + 100.0)
    assert list(later.versions) == ["2", "3"]
    assert later.rollout is None


def test_an_agent_that_is_removed_and_comes_again_counts_its_revisions_on() -> None:
    record = changes.pushed(_agent("1", "2"), SLOW, "", single=False)
    with pytest.raises(DsecError, match="3 instances"):
        changes.removed(record, "", {"2": 3}, 1.0)
    gone = changes.removed(record, "", {}, 1.0)
    assert (gone.versions, gone.active, gone.policies, gone.policy) == ({}, "", {}, 0)
    assert gone.revision > record.revision
    again = changes.registered(
        gone, "default", RegisterAgent(name="bot", version="1", base="debian@12"), "", 2.0
    )
    assert (again.active, again.versions["1"].base) == ("1", "debian@12")
    assert again.revision > gone.revision
    assert changes.rules_of(again).policies == {}
