"""Clients of model APIs, unchanged, are trained in sandboxes without a network."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import zipfile
from collections.abc import AsyncIterator
from importlib.metadata import Distribution, PackagePath, distribution
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dsec import CommandFailed, DsecError, Sandbox
from dsec.client import DSecClient
from dsec.model_relay import HttpEngine, ModelRelay
from dsec.rollouts import Rollout
from model_engine import ScriptedServer, scripted_server
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
ONE_CALL = """
import json, os, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    data=json.dumps({"model": "m", "messages": [{"role": "user", "content": "bare"}]}).encode(),
)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


def _installed(*names: str) -> list[Distribution]:
    """Return distributions, and all that they need."""
    found: dict[str, Distribution] = {}
    wanted = list(names)
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name not in found:
            found[name] = distribution(name)
            needs = map(Requirement, found[name].requires or ())
            wanted += [
                it.name for it in needs if not it.marker or it.marker.evaluate({"extra": ""})
            ]
    return list(found.values())


def _add(pure: zipfile.ZipFile, files: list[PackagePath]) -> None:
    """Add a distribution to an archive that Python imports from, compiled where it is here."""
    known = set(pure.namelist())
    for file in files:
        for parent in list(file.parents)[-2::-1]:
            if f"{parent}/" not in known:  # a name space of packages is found by its directory
                pure.mkdir(str(parent))
                known.add(f"{parent}/")
        source = Path(str(file.locate()))
        compiled = Path(cache_from_source(source)) if file.suffix == ".py" else source
        if compiled == source or not compiled.exists():
            pure.write(source, str(file))
        else:
            pure.write(compiled, str(file.with_suffix(".pyc")))


@pytest.fixture(scope="session")
def clients(stack: Stack, base: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A toolkit with the clients, as they are installed here."""
    place = tmp_path_factory.mktemp("clients") / "opt" / "clients"
    place.mkdir(parents=True)
    with zipfile.ZipFile(place / "pure.zip", "w") as pure:
        for found in _installed("openai", "anthropic"):
            files = [it for it in found.files or () if it.suffix != ".pyc" and ".." not in it.parts]
            if any(file.suffix == ".so" for file in files):
                for file in files:
                    (place / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(file.locate(), place / file)
            else:
                _add(pure, files)
    root = place.parent.parent
    stack.dsec(
        *("layer", "import", str(root), "--kind", "toolkit"),
        *("--name", "model-clients", "--version", "1"),
    )
    shutil.rmtree(root)
    return "model-clients@1"


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
    stack: Stack, base: str, clients: str, tmp_path: Path
) -> None:
    async with (
        stack.client() as client,
        _training(client, tmp_path / "calls", "a", "b", "c", "d") as (rollout, relay, server),
        await client.create_sandbox(
            base, toolkits=[clients], model_rollout_id=rollout.id, memory_bytes=512 << 20
        ) as sandbox,
    ):
        done = await sandbox.exec(
            ["python3", "-c", HARNESS],
            env={
                "PYTHONPATH": "/opt/clients/pure.zip:/opt/clients",
            },
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
