"""The behaviour log as a line of text: the documented form, and back without loss."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dsec_common.behavior import BehaviorLog
from dsec_common.errors import DsecError, ErrorCode

LINE = (
    "[2024-06-15T14:22:03.127Z] agent=web_crawler id=abc123 action=fetch_url "
    "url=https://example.com status=200 latency=142ms tokens_in=512 tokens_out=89"
)
# The years 1 to 9999, which are what the text form can say.
TIMES_US = st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999)

UINT64_MAX = 2**64 - 1

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    [
        "",
        " ",
        "=",
        '"',
        "\\",
        "a b",
        "a=b",
        "\n",
        "\r",
        "\u2028",
        "\x85",
        "\x00",
        "[x]",
        "'",
        "latency",
    ]
)
counts = st.integers(0, UINT64_MAX)
numbers = st.floats(allow_nan=False)
records = st.builds(
    BehaviorLog,
    sandbox_id=texts,
    project=texts,
    seq=counts,
    source=texts,
    time_us=TIMES_US,
    agent=texts,
    agent_id=texts,
    action=texts,
    status=texts,
    latency_ms=numbers,
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
    reward=st.none() | numbers,
    error_code=texts,
    detail_shed=st.booleans(),
)


def test_the_documented_line_is_written_exactly() -> None:
    record = BehaviorLog(
        time_us=1_718_461_323_127_000,
        agent="web_crawler",
        agent_id="abc123",
        action="fetch_url",
        attributes={"url": "https://example.com"},
        status="200",
        latency_ms=142,
        tokens_in=512,
        tokens_out=89,
        sandbox_id="node-1.a",
        seq=7,
    )
    assert record.to_text() == LINE


def test_the_documented_line_reads_back() -> None:
    record = BehaviorLog.from_text(LINE)
    assert record.agent_id == "abc123"
    assert record.attributes == {"url": "https://example.com"}
    assert record.latency_ms == 142.0
    assert record.to_text() == LINE
    assert BehaviorLog.from_text(LINE + "\n") == record


@given(records)
@example(BehaviorLog(attributes={"status": "x", "agent": "y", "": ""}))
@example(BehaviorLog(reward=0.0, latency_ms=1e-7))
@example(BehaviorLog(latency_ms=float("inf")))
def test_the_full_text_loses_nothing_and_is_one_line(record: BehaviorLog) -> None:
    line = record.to_text(full=True)
    assert line.splitlines() == [line]
    assert line.isprintable()
    assert BehaviorLog.from_text(line) == record


@given(records)
def test_the_short_text_keeps_time_in_milliseconds_agent_action_and_counts(
    record: BehaviorLog,
) -> None:
    line = record.to_text()
    read = BehaviorLog.from_text(line)
    assert line.splitlines() == [line]
    assert read.time_us == record.time_us // 1000 * 1000
    for field in ("agent", "agent_id", "action", "status", "latency_ms", "attributes"):
        assert getattr(read, field) == getattr(record, field)
    assert (read.tokens_in, read.tokens_out) == (record.tokens_in, record.tokens_out)
    assert read.seq == 0


def test_a_value_with_a_space_a_quote_or_an_equals_sign_is_quoted() -> None:
    record = BehaviorLog(action="say", attributes={"text": 'a "b" =\n', "k": "q=1"})
    assert 'text="a \\"b\\" =\\n" k="q=1"' in record.to_text()


@pytest.mark.parametrize(
    "line",
    [
        "",
        "agent=a",
        "[2024-06-15 14:22:03.127Z] agent=a",
        "[2024-13-15T14:22:03.127Z] agent=a",
        "[2024-06-15T14:22:03.127Z]agent=a",
        "[2024-06-15T14:22:03.127Z]  agent=a",
        "[2024-06-15T14:22:03.127Z] agent",
        "[2024-06-15T14:22:03.127Z] agent=",
        "[2024-06-15T14:22:03.127Z] =a",
        "[2024-06-15T14:22:03.127Z] agent=a ",
        '[2024-06-15T14:22:03.127Z] agent="a',
        '[2024-06-15T14:22:03.127Z] agent="a"b',
        "[2024-06-15T14:22:03.127Z] agent=a agent=b",
        "[2024-06-15T14:22:03.127Z] url=a url=b",
        "[2024-06-15T14:22:03.127Z] latency=142",
        "[2024-06-15T14:22:03.127Z] latency=fastms",
        "[2024-06-15T14:22:03.127Z] tokens_in=-1",
        "[2024-06-15T14:22:03.127Z] tokens_in=1e3",
        "[2024-06-15T14:22:03.127Z] seq=" + "9" * 400,
        "[2024-06-15T14:22:03.127Z] seq=99999999999999999999",
        "[2024-06-15T14:22:03.127Z] reward=high",
        "[2024-06-15T14:22:03.127Z] detail_shed=maybe",
        "[2024-06-15T14:22:03.127Z] agent=a\nagent=b",
    ],
)
def test_a_line_that_makes_no_sense_is_refused(line: str) -> None:
    with pytest.raises(DsecError) as refused:
        BehaviorLog.from_text(line)
    assert refused.value.code is ErrorCode.INVALID


@given(st.text(max_size=60) | st.text(max_size=60).map(lambda text: LINE[:30] + text))
def test_any_text_is_read_or_refused_and_never_fails_otherwise(line: str) -> None:
    with contextlib.suppress(DsecError):
        record = BehaviorLog.from_text(line)
        assert BehaviorLog.from_text(record.to_text(full=True)) == record


@pytest.mark.parametrize("time_us", [-(2**63), 2**63 - 1, 253_402_300_800_000_000])
def test_a_time_that_text_cannot_say_is_refused(time_us: int) -> None:
    with pytest.raises(DsecError) as refused:
        BehaviorLog(time_us=time_us).to_text()
    assert refused.value.code is ErrorCode.INVALID
