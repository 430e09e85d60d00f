"""Rewards from behaviour logs: as TRL calls them, and in its own trainer where it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dsec import BehaviorLog, DsecError, ErrorCode, sync
from dsec.adapters.trl import RewardFromLogs, latency_and_tokens, reward_from_logs
from stack import Stack

LIMITS: dict[str, Any] = {"memory_bytes": 64 << 20, "disk_bytes": 8 << 20}
#: What TRL gives every reward function beside the columns.
ALWAYS: dict[str, Any] = {"completion_ids": [[1]], "trainer_state": None, "log_extra": None}


@pytest.fixture
def client(stack: Stack) -> Iterator[Any]:
    context = stack.context
    with sync.DSecClient(
        context.nats_servers, context.credentials, kafka_bootstrap=context.kafka_bootstrap
    ) as connected:
        yield connected


def _ran(client: Any, base: str, *commands: str) -> str:
    with client.create_sandbox(base, **LIMITS) as sandbox:
        for command in commands:
            sandbox.exec(command)
        return str(sandbox.id)


def _code(log: BehaviorLog) -> float:
    assert log.action == "exec"
    return float(log.status)


def test_the_formula_is_the_documented_one() -> None:
    assert latency_and_tokens(BehaviorLog(latency_ms=142, tokens_out=89)) == pytest.approx(86.69)


def test_each_completion_is_rewarded_for_what_its_own_sandbox_did(base: str, client: Any) -> None:
    with reward_from_logs(client, formula=_code, combine=sum) as reward:
        sandboxes = [
            _ran(client, base, "exit 3", "exit 4"),
            _ran(client, base),
            _ran(client, base, "true"),
        ]
        given = {"prompts": ["p"] * 3, "completions": ["c"] * 3, "sandbox_id": sandboxes, **ALWAYS}
        assert reward(**given) == [7.0, None, 0.0]
        assert reward(**given) == [7.0, None, 0.0]
    with reward_from_logs(client, formula=_code, combine=max, from_beginning=True) as late:
        assert late(**given) == [4.0, None, 0.0]


def test_a_sandbox_that_has_not_ended_and_one_that_is_not_named_are_told(
    base: str, client: Any
) -> None:
    with reward_from_logs(client, patience_s=0.1) as reward:
        with client.create_sandbox(base, **LIMITS) as sandbox, pytest.raises(DsecError) as late:
            reward(["p"], ["c"], sandbox_id=[sandbox.id], **ALWAYS)
        assert (late.value.code, late.value.details["sandbox_id"]) == (
            ErrorCode.TIMEOUT,
            sandbox.id,
        )
        with pytest.raises(DsecError, match="'sandbox_id' for each of the 2"):
            reward(["p", "p"], ["c", "c"], sandbox_id=[sandbox.id], **ALWAYS)
    with pytest.raises(DsecError, match="with block"):
        reward_from_logs(client)(["p"], ["c"], sandbox_id=[sandbox.id])


def test_a_formula_that_fails_is_told_to_who_asks_for_its_sandbox_alone(
    base: str, client: Any
) -> None:
    with reward_from_logs(client, formula=lambda log: 1 / float(log.status)) as reward:
        zero, two = _ran(client, base, "true"), _ran(client, base, "exit 2")
        assert reward(["p"], ["c"], sandbox_id=[two]) == [0.5]
        with pytest.raises(ZeroDivisionError):
            reward(["p"], ["c"], sandbox_id=[zero])


def test_without_kafka_there_is_no_reward_function(stack: Stack) -> None:
    with (
        sync.DSecClient(stack.context.nats_servers, stack.context.credentials) as client,
        pytest.raises(DsecError, match="DSEC_KAFKA_BOOTSTRAP"),
    ):
        reward_from_logs(client)


@pytest.mark.filterwarnings("default")
def test_trls_own_trainer_takes_it(
    base: str, client: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl", reason="TRL and PyTorch are not installed: dsec[trl]")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from trl_training import train  # noqa: PLC0415

    def run(prompts: list[str]) -> list[str]:
        return [_ran(client, base, "exit 5") for _ in prompts]

    with reward_from_logs(client, formula=_code, combine=sum) as reward:
        history = train(reward, run, tmp_path)
    assert [step["rewards/reward_from_logs/mean"] for step in history] == [5.0, 5.0]


def test_it_is_a_function_with_a_name_as_trl_wants_it(client: Any) -> None:
    reward: RewardFromLogs = reward_from_logs(client)
    assert (callable(reward), reward.__name__) == (True, "reward_from_logs")
