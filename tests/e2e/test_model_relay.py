"""Clients of model APIs, unchanged, are trained in sandboxes without a network."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dsec import CommandFailed, DsecError, Sandbox, sync
from dsec.client import DSecClient
from dsec.model_relay import HttpEngine, ModelAnswer, ModelRelay, ModelRequest, Sampled
from dsec.model_relay.sync import ModelRelay as SyncModelRelay
from dsec.rollouts import Rollout
from dsec_common.errors import ErrorCode
from installed_layers import FOUND, import_installed, unpacked
from model_engine import END, ScriptedServer, scripted_server, tokens_of
from stack import Stack, pid_of

HARNESS = """
import sys
import anthropic, openai

client = openai.OpenAI()
said = [{"role": "user", "content": "look"}]
for turn in range(2):
    done = client.chat.completions.create(model="any", messages=said, tools=[{
        "type": "function", "function": {"name": "sh", "parameters": {"type": "object"}}}])
    answer = done.choices[0].message
    print(answer.content)
    said += [answer, {"role": "user", "content": "go on"}]
with client.responses.stream(model="any", input="once more") as events:
    print(events.get_final_response().output_text)
print(anthropic.Anthropic().messages.create(
    model="any", max_tokens=100, messages=[{"role": "user", "content": "and you?"}]
).content[0].text)
"""
MINI = ["python3", "-m", "minisweagent.run.mini", "--yolo", "--exit-immediately"]
#: It asks for nothing before its first task, and for no price of a model that it does not know.
MINI_ENV = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "PYTHON_DOTENV_DISABLED": "true",  # it looks for its caller's file, which is in an archive
    "LITELLM_LOCAL_MODEL_COST_MAP": "true",
}
ROOMY: Any = {"memory_bytes": 1 << 30, "disk_bytes": 512 << 20}
ONE_CALL = """
import json, os, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    data=json.dumps({"model": "m", "messages": [{"role": "user", "content": "bare"}]}).encode(),
)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


@pytest.fixture(scope="session")
def harnesses(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A toolkit with clients and an agent, but for what the agent downloads benchmarks with."""
    return import_installed(
        *(stack, tmp_path_factory.mktemp("harnesses"), "harnesses"),
        *("openai", "anthropic", "mini-swe-agent"),
        in_files=("mini-swe-agent",),
        to_unpack=("litellm",),
        without=("datasets",),
    )


@contextlib.asynccontextmanager
async def _training(
    client: DSecClient, journal: Path, *answers: str
) -> AsyncIterator[tuple[Rollout, ModelRelay, ScriptedServer]]:
    rollout = await client.rollouts.open()
    async with (
        scripted_server(*answers) as server,
        HttpEngine(server.url, api_key="secret", model_version="step-1") as engine,
        ModelRelay(rollout, engine, journal=journal) as relay,
    ):
        running = asyncio.create_task(relay.run())
        try:
            yield rollout, relay, server
            await rollout.close()
            await asyncio.wait_for(running, 30)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def _bare_call(sandbox: Sandbox) -> str:
    done = await sandbox.exec(["python3", "-c", ONE_CALL], timeout_s=60, check=True)
    return done.stdout_text.strip()


async def test_clients_as_they_are_installed_are_trained_without_a_network(
    stack: Stack, base: str, harnesses: str, tmp_path: Path
) -> None:
    async with (
        stack.client() as client,
        _training(client, tmp_path / "calls", "a", "b", "c", "d") as (rollout, relay, server),
        await client.create_sandbox(
            base, toolkits=[harnesses], model_rollout_id=rollout.id, memory_bytes=512 << 20
        ) as sandbox,
    ):
        done = await sandbox.exec(
            ["python3", "-c", HARNESS],
            env=FOUND,
            timeout_s=90,
        )
        assert done.exit_code == 0, done.stderr_text
        assert done.stdout_text.split() == ["a", "b", "c", "d"]
        assert set(server.authorizations) == {"Bearer secret"}
        inside = await sandbox.exec("env; cat /proc/*/environ 2>/dev/null || :", timeout_s=20)
        assert b"secret" not in inside.stdout
        conversation, *others = relay.trace().rewarded(1.0).sequences
    assert len(conversation.turns) == 2
    assert conversation.sampled_tokens == 4
    assert [len(it.turns) for it in others] == [1, 1]
    assert {turn.model_version for turn in conversation.turns} == {"step-1"}


@pytest.mark.timeout(120)
async def test_mini_swe_agent_as_it_is_installed_is_trained_without_a_network(
    stack: Stack, base: str, harnesses: str, tmp_path: Path
) -> None:
    answers = (
        "I read it.$ cat task.txt",
        "I do it.$ echo 42 > answer.txt",
        "$ echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    )
    async with (
        stack.client() as client,
        _training(client, tmp_path / "calls", *answers) as (rollout, relay, server),
        await client.create_sandbox(
            base, toolkits=[harnesses], model_rollout_id=rollout.id, **ROOMY
        ) as sandbox,
    ):
        await sandbox.exec(unpacked("litellm"), timeout_s=60, check=True)
        await sandbox.write_file("/work/task.txt", b"write 42 down")
        done = await sandbox.exec(
            [*MINI, "--model", "openai/policy", "--task", "Do what task.txt says"],
            env={**FOUND, **MINI_ENV},
            cwd="/work",
            timeout_s=90,
        )
        assert done.exit_code == 0, done.stderr_text
        assert (await sandbox.exec(["cat", "/work/answer.txt"])).stdout_text == "42\n"
        assert len(server.asked) == len(answers)
        assert "write 42 down" in str(server.asked[1]["messages"][-1])
        (conversation,) = relay.trace().rewarded(1.0).sequences
    assert len(conversation.turns) == len(answers)
    sampled = [conversation.token_ids[turn.start : turn.end] for turn in conversation.turns]
    assert sampled == [(*tokens_of(answer), END) for answer in answers]
    assert conversation.sampled_tokens == sum(map(len, sampled))


async def test_only_a_sandbox_that_asked_has_an_endpoint_and_each_its_own_rollout(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    async with (
        stack.client() as client,
        _training(client, tmp_path / "one", "to one") as (one, one_relay, _),
        _training(client, tmp_path / "two", "to two") as (two, two_relay, _),
        await client.create_sandbox(base, model_rollout_id=one.id) as first,
        await client.create_sandbox(base, model_rollout_id=two.id) as second,
        await client.create_sandbox(base) as third,
    ):
        assert await _bare_call(second) == "to two"
        assert await _bare_call(first) == "to one"
        assert len(one_relay.trace().sequences) == len(two_relay.trace().sequences) == 1
        env = {"OPENAI_BASE_URL": "http://127.0.0.1:9176/v1"}
        refused = await third.exec(["python3", "-c", ONE_CALL], env=env, timeout_s=20)
        assert b"Connection refused" in refused.stderr


async def test_a_sandbox_that_is_put_back_or_paused_has_its_endpoint_again(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    async with (
        stack.client() as client,
        _training(client, tmp_path / "calls", "before", "after", "awake") as (rollout, relay, _),
        await client.create_sandbox(base, model_rollout_id=rollout.id) as sandbox,
    ):
        snapshot = await sandbox.snapshot()
        assert await _bare_call(sandbox) == "before"
        await sandbox.roll_back(snapshot)
        assert await _bare_call(sandbox) == "after"
        await sandbox.pause()
        assert await _bare_call(sandbox) == "awake"
        # The same request after its answer is another sample of the same prompt.
        calls: list[Any] = [it.turns[0].number for it in relay.trace().sequences]
        assert len(calls) == 3


async def test_the_daemon_that_follows_a_killed_one_listens_again(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    async with (
        stack.client() as client,
        _training(client, tmp_path / "calls", "before", "after") as (rollout, relay, server),
        await client.create_sandbox(base, model_rollout_id=rollout.id) as sandbox,
    ):
        assert await _bare_call(sandbox) == "before"
        os.kill(pid_of(stack, f"sandboxd-{stack.node_names[0]}"), signal.SIGKILL)
        async with asyncio.timeout(60):
            while True:
                try:
                    # Nobody knows whether the one before got its answer: it is given once more.
                    assert await _bare_call(sandbox) == "before"
                except (DsecError, CommandFailed):
                    await asyncio.sleep(0.1)
                else:
                    break
        assert await _bare_call(sandbox) == "after"
        assert len(server.asked) == len(relay.trace().sequences) == 2


def test_a_training_loop_without_await_has_its_calls_answered_meanwhile(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    asked: list[ModelRequest] = []

    def sample(request: ModelRequest) -> Sampled:
        asked.append(request)
        answer = ModelAnswer(id="1", created=1, content=f"answer {len(asked)}")
        return Sampled(answer=answer, prompt_ids=(1,), completion_ids=(2, 3), logprobs=(-0.1, -0.2))

    bare = ["python3", "-c", ONE_CALL]
    credentials = stack.context.credentials
    with sync.DSecClient(stack.context.nats_servers, credentials) as client:
        rollout = client.rollouts.open()
        with (
            SyncModelRelay(rollout, sample, journal=tmp_path / "calls") as relay,
            client.create_sandbox(base, model_rollout_id=rollout.id) as sandbox,
        ):
            assert sandbox.exec(bare, check=True).stdout_text == "answer 1\n"
            relay.pause()
            waiting = sandbox.start(bare)
            assert len(asked) == 1
            relay.resume()
            assert waiting.output().stdout_text == "answer 2\n"
            rollout.close()
            relay.join()
            assert [it.sampled_tokens for it in relay.trace().sequences] == [2, 2]


def test_what_ends_a_relay_without_await_is_raised_where_it_ends(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    def sample(_: ModelRequest) -> Sampled:
        raise DsecError(ErrorCode.UNSUPPORTED, "no tokens here")

    def train(client: Any) -> None:
        rollout = client.rollouts.open()
        with (
            SyncModelRelay(rollout, sample, journal=tmp_path / "calls") as relay,
            client.create_sandbox(base, model_rollout_id=rollout.id) as sandbox,
        ):
            sandbox.start(["python3", "-c", ONE_CALL])
            with pytest.raises(DsecError, match="no tokens here"):
                relay.join()

    with (
        sync.DSecClient(stack.context.nats_servers, stack.context.credentials) as client,
        pytest.raises(DsecError, match="no tokens here"),
    ):
        train(client)
