"""What a contract allows tools, and the gates that hold them to it."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.agent.contract import agent_contract, whole_rate
from dsec.tools.allowances import Allowance, Rate, RateGate
from dsec.tools.calls import ToolCall
from dsec_common.errors import DsecError, ErrorCode


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_contract_allows_what_it_says() -> None:
    contract = agent_contract(
        {
            "name": "weather",
            "version": "1.0",
            "capabilities": [
                {
                    "tool": "http_client",
                    "permissions": ["network_access"],
                    "rate_limit": "10req/min",
                },
                {"tool": "llm_summarizer", "model": "m", "max_tokens": 512, "temperature": 0.3},
            ],
        }
    )
    assert (contract.name, contract.version) == ("weather", "1.0")
    assert contract.allowances == {
        "http_client": Allowance(
            tool="http_client", permissions=frozenset({"network_access"}), rate=Rate(10, 60.0)
        ),
        "llm_summarizer": Allowance(
            tool="llm_summarizer", model="m", max_tokens=512, temperature=0.3
        ),
    }
    assert agent_contract({}).allowances == {}


@pytest.mark.parametrize(
    ("count", "window_s", "rate"),
    [(10, 60, Rate(10, 60)), (0.5, 1, Rate(1, 2)), (2.5, 1, Rate(2, 0.8))],
)
def test_a_rate_is_counted_in_whole_calls(count: float, window_s: float, rate: Rate) -> None:
    assert whole_rate(count, window_s) == rate


def test_a_gate_says_when_the_next_call_is_allowed() -> None:
    time = Time()
    gate = RateGate("t", Rate(2, 60.0), time)
    gate.take()
    time.now += 15
    gate.take()
    with pytest.raises(DsecError, match="2 calls in 60 s") as refused:
        gate.take()
    assert refused.value.code is ErrorCode.EXHAUSTED
    assert refused.value.retryable
    assert refused.value.retry_after_s == 45
    time.now += 45
    gate.take()


@given(
    st.lists(st.integers(0, 30), max_size=60),
    st.integers(1, 5),
    st.sampled_from([1.0, 60.0]),
)
def test_no_window_ever_holds_more_calls_than_the_rate(
    pauses: list[int], calls: int, within_s: float
) -> None:
    time = Time()
    gate = RateGate("t", Rate(calls, within_s), time)
    passed: list[float] = []
    for pause in pauses:
        time.now += pause
        with contextlib.suppress(DsecError):
            gate.take()
            passed.append(time.now)
    for at in passed:
        assert len([it for it in passed if at <= it < at + within_s]) <= calls


def test_equal_arguments_have_equal_hashes() -> None:
    first = ToolCall("t", "m", {"a": 1, "b": {"y": "ä", "x": None}})
    second = ToolCall("t", "other", {"b": {"x": None, "y": "ä"}, "a": 1})
    assert first.arguments_sha256 == second.arguments_sha256
    assert first.arguments_sha256 != ToolCall("t", "m", {"a": 2}).arguments_sha256
    # The vector that clients in other languages are held to.
    assert ToolCall("t", "m", {"url": "http://x/?a=1&b=<2>", "n": 3}).arguments_sha256 == (
        "f809073ca9f1f06e2de2154de97974e5beb3fe0ffaf4146ef0e1c3bf11d31aa6"
    )


def test_arguments_that_are_no_json_have_hashes_too() -> None:
    data = ToolCall("t", "m", {"data": b"x"})
    assert data.arguments_sha256 == ToolCall("t", "m", {"data": b"x"}).arguments_sha256
    assert data.arguments_sha256 != ToolCall("t", "m", {"data": b"y"}).arguments_sha256
    assert ToolCall("t", "m", {"it": object()}).arguments_sha256 == (
        ToolCall("t", "m", {"it": object()}).arguments_sha256
    )
