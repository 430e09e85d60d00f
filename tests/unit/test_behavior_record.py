"""The behaviour log's record: protobuf both ways, and old readers with new fields."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_common.behavior import BehaviorLog
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.topics import BEHAVIOR_LOGS, behavior_logs, project_of
from dsec_common.wire import behavior_pb2

UINT64_MAX = 2**64 - 1

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
counts = st.integers(0, UINT64_MAX)
records = st.builds(
    BehaviorLog,
    sandbox_id=texts,
    project=texts,
    seq=counts,
    source=texts,
    time_us=st.integers(-(2**63), 2**63 - 1),
    agent=texts,
    agent_id=texts,
    action=texts,
    status=texts,
    latency_ms=st.floats(allow_nan=False),
    tokens_in=counts,
    tokens_out=counts,
    attributes=st.dictionaries(texts, texts, max_size=4),
    rollout_id=texts,
    stage=texts,
    message_id=texts,
    cause_id=texts,
    traceparent=texts,
    input_prompt=texts,
    output_text=texts,
    reward=st.none() | st.floats(allow_nan=False),
    error_code=texts,
    detail_shed=st.booleans(),
)


@given(records)
def test_a_record_survives_protobuf(record: BehaviorLog) -> None:
    assert BehaviorLog.parse(record.serialize()) == record


def test_every_field_of_the_schema_has_its_place_in_the_record() -> None:
    schema = [field.name for field in behavior_pb2.BehaviorLog.DESCRIPTOR.fields]
    assert schema == list(BehaviorLog.__struct_fields__)


def test_a_reward_of_zero_is_not_an_unknown_reward() -> None:
    assert BehaviorLog.parse(BehaviorLog(reward=0.0).serialize()).reward == 0.0
    assert BehaviorLog.parse(BehaviorLog().serialize()).reward is None


def test_fields_of_a_later_version_are_ignored() -> None:
    later = BehaviorLog(action="step").serialize() + b"\xf2\x3f\x03new"
    assert BehaviorLog.parse(later) == BehaviorLog(action="step")


@pytest.mark.parametrize("value", [b"\xff\xff", b"\x0a\x05ab", b'{"action": "step"}'])
def test_bytes_that_are_no_record_are_refused(value: bytes) -> None:
    with pytest.raises(DsecError, match="not a BehaviorLog") as refused:
        BehaviorLog.parse(value)
    assert refused.value.code is ErrorCode.INVALID


@pytest.mark.parametrize(
    "record",
    [
        BehaviorLog(tokens_in=-1),
        BehaviorLog(seq=UINT64_MAX + 1),
        BehaviorLog(action="half a \ud800 pair"),
        BehaviorLog(attributes={"n": 1}),  # type: ignore[dict-item]  # what an untyped caller does
    ],
)
def test_a_record_that_does_not_fit_its_types_is_refused_when_written(record: BehaviorLog) -> None:
    with pytest.raises(DsecError) as refused:
        record.serialize()
    assert refused.value.code is ErrorCode.INVALID


def test_a_record_without_detail_keeps_its_facts_and_says_so() -> None:
    full = BehaviorLog(
        action="step", tokens_in=3, attributes={"a": "b"}, input_prompt="in", output_text="out"
    )
    assert full.without_detail() == BehaviorLog(action="step", tokens_in=3, detail_shed=True)


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        BehaviorLog().action = "other"  # type: ignore[misc]  # the point of the test


def test_a_record_is_a_plain_struct_for_other_encodings() -> None:
    record = BehaviorLog(action="step", reward=1.5)
    assert msgspec.json.decode(msgspec.json.encode(record), type=BehaviorLog) == record


def test_each_project_has_a_topic_of_its_own() -> None:
    assert behavior_logs() == behavior_logs("default") == BEHAVIOR_LOGS
    assert behavior_logs("acme") == "dsec-behavior-logs.acme"
    for project in ("default", "acme", "a-1"):
        assert project_of(behavior_logs(project)) == project


@pytest.mark.parametrize("project", ["", "a.b", "a*", ">", "a b", "x" * 300, "ä", "a\n"])
def test_a_name_that_is_no_projects_has_no_topic(project: str) -> None:
    with pytest.raises(DsecError) as refused:
        behavior_logs(project)
    assert refused.value.code is ErrorCode.INVALID
    with pytest.raises(DsecError):
        project_of(f"{BEHAVIOR_LOGS}.{project}")


def test_a_topic_of_something_else_has_no_project() -> None:
    for topic in ("dsec-metering", "", "dsec-behavior-logs-2"):
        with pytest.raises(DsecError):
            project_of(topic)
