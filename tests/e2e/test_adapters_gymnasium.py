"""Sandboxes as environments of Gymnasium: its own checks, verdicts out of reach, many at once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from dsec import DsecError, ErrorCode, Limits, Sandbox, sync
from dsec.adapters.episodes import Judgement, ShellTask, Turn, Verifier
from dsec.adapters.gymnasium import DsecEnv, DsecVectorEnv
from stack import Stack

LIMITS = {"memory_bytes": 64 << 20, "disk_bytes": 8 << 20, "labels": {"test": "gymnasium"}}


@pytest.fixture
def client(stack: Stack) -> Iterator[Any]:
    context = stack.context
    with sync.DSecClient(context.nats_servers, context.credentials) as connected:
        yield connected
        assert connected.list_sandboxes(labels={"test": "gymnasium"}) == []


async def _secret_number(sandbox: Sandbox, seed: int) -> None:
    number = random.Random(seed).randint(1, 1000)  # noqa: S311  a seeded draw
    await sandbox.write_file("/work/number", f"{number}\n")


async def _count_files(sandbox: Sandbox, turn: Turn) -> Judgement:
    files = await sandbox.list_directory("/work")
    return Judgement(reward=float(len(files)), is_over=len(files) >= 3)


def _task(base: str, **changed: Any) -> ShellTask:
    usual: dict[str, Any] = {"judge": _count_files, "prompt": "make files", "steps_max": 3}
    return ShellTask({"base": base, **LIMITS}, **(usual | changed))


@pytest.mark.parametrize("commands", [(), ("true", "cat number; false")])
def test_gymnasiums_own_checks_pass(base: str, client: Any, commands: tuple[str, ...]) -> None:
    env = DsecEnv(client, _task(base, prepare=_secret_number), commands=commands)
    env.action_space.seed(7)
    # It has no registered name, and so no specification; nothing is rendered.
    with pytest.warns(UserWarning, match=r"spec|render"):
        check_env(env)
    env.close()


def test_an_episode_is_judged_step_by_step_and_begins_anew(base: str, client: Any) -> None:
    env = DsecEnv(client, _task(base, prepare=_secret_number))
    first, about = env.reset(seed=3)
    assert first["stdout"] == "make files"
    told, reward, *_ = env.step("cat number; echo ü >&2; touch a; exit 3")
    assert (told["exit_code"], told["stderr"], reward) == (3, "ü\n", 2.0)
    assert told in env.observation_space
    *_, terminated, truncated, _ = env.step("touch b")
    assert (terminated, truncated) == (True, False)
    with pytest.raises(DsecError) as refused:
        env.step("true")
    assert refused.value.code is ErrorCode.CONFLICT
    same, again = env.reset(seed=3)
    assert (same, again["sandbox_id"] != about["sandbox_id"]) == (first, True)
    assert env.step("cat number")[0]["stdout"] == told["stdout"]
    env.close()


def test_what_a_model_writes_that_is_no_command_is_a_step_that_did_nothing(
    base: str, client: Any
) -> None:
    env = DsecEnv(client, _task(base, command_timeout_s=0.2))
    env.reset(seed=1)
    for text in ("echo \0", "\ud800"):
        told, reward, terminated, truncated, _ = env.step(text)
        assert (told["exit_code"], reward, terminated, truncated) == (-1, 0.0, False, False)
        assert told["stderr"]
    told, _, terminated, truncated, _ = env.step("sleep 100")
    assert (told["timed_out"], terminated, truncated) == (1, False, True)
    with pytest.raises(DsecError):
        DsecEnv(client, _task(base), commands=["true"]).step(1)
    env.close()


def test_a_verifier_is_out_of_the_agents_reach(base: str, client: Any) -> None:
    verifier = Verifier(
        ["cmp", "/work/answer", "/verify/expected"], files={"/verify/expected": "42\n"}
    )
    env = DsecEnv(client, _task(base, judge=verifier, prompt="write 42"))

    def judged(*commands: str) -> float:
        env.reset(seed=1)
        env.step("; ".join(commands))
        return float(env.step("submit")[1])

    assert judged("echo 42 > answer") == 1.0
    assert judged("echo 41 > answer") == 0.0
    # Nothing to judge, a look for what is expected, and programs that always succeed.
    assert judged("rm -r /work") == 0.0
    assert judged("cp /verify/expected answer") == 0.0
    forged = "cp /usr/bin/true /usr/bin/new && mv /usr/bin/new /usr/bin/cmp && cmp a b"
    assert judged(forged) == 0.0
    env.reset()
    assert env.step(forged)[0]["exit_code"] == 0
    env.close()


def test_the_end_of_a_sandbox_for_want_of_memory_is_the_agents_own(base: str, client: Any) -> None:
    limits = Limits(memory_bytes=64 << 20, disk_bytes=8 << 20, oom_group=True)
    create = {"base": base, "limits": limits, "labels": LIMITS["labels"]}
    env = DsecEnv(client, ShellTask(create, _count_files))
    env.reset(seed=1)
    _, reward, terminated, _, about = env.step("""python3 -c "b'x' * (1 << 30)" """)
    assert (reward, terminated, about) == (0.0, True, {"cause": "oom"})
    env.reset()
    assert env.step("true")[0]["exit_code"] == 0
    env.close()


def test_many_sandboxes_step_at_once_and_each_begins_anew_by_itself(base: str, client: Any) -> None:
    env = DsecVectorEnv(client, _task(base, prepare=_secret_number), 6)
    first, about = env.reset(seed=11)
    assert (first["stdout"], len(set(about["sandbox_id"]))) == (("make files",) * 6, 6)
    told, rewards, terminated, truncated, _ = env.step(
        [f"cat number; for i in $(seq {number}); do touch f$i; done" for number in range(6)]
    )
    assert told in env.observation_space
    assert rewards.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert terminated.tolist() == [False, False, True, True, True, True]
    expected = [random.Random(11 + number).randint(1, 1000) for number in range(6)]  # noqa: S311  as above
    assert [int(text) for text in told["stdout"]] == expected
    told, rewards, terminated, truncated, about = env.step(["echo on"] * 6)
    assert told["stdout"] == ("on\n", "on\n", *["make files"] * 4)
    assert about["_sandbox_id"].tolist() == [False, False, True, True, True, True]
    assert not np.any(terminated | truncated)
    assert truncated.dtype == terminated.dtype == np.bool_
    env.close()


def test_a_sandbox_that_the_platform_ends_holds_up_none_of_the_others(
    base: str, client: Any
) -> None:
    env = DsecVectorEnv(client, _task(base), 2, commands=["true", "false"])
    _, about = env.reset(seed=1)
    client.sandbox(about["sandbox_id"][0]).delete()
    told, _, terminated, truncated, about = env.step(np.array([1, 1]))
    assert (truncated.tolist(), terminated.tolist()) == ([True, False], [False, False])
    assert (about["cause"][0], told["exit_code"].tolist()) == ("expired", [-1, 1])
    told, *_ = env.step(np.array([1, 1]))
    assert told["stdout"] == ("make files", "")
    env.close()
