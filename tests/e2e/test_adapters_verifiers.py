"""Sandboxes in verifiers' own evaluation, with a model that says what it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers", reason="verifiers is not installed: dsec[verifiers]")

import verifiers.v1 as vf
from aiohttp import web

from documents import ROOT
from dsec import DsecError, ErrorCode, Limits
from dsec.adapters.verifiers import DsecEnv, sandbox_arguments
from stack import Stack

EXAMPLES = str(ROOT / "examples" / "verifiers")
LABELS = {"test": "verifiers"}


def _answer(said: Any, number: int) -> dict[str, Any]:
    """Return a text as the last answer, a list of arguments as calls of the shell."""
    message: dict[str, Any] = {"role": "assistant", "content": said}
    if not isinstance(said, str):
        message["content"] = None
        message["tool_calls"] = [
            {
                "id": f"call_{number}_{at}",
                "type": "function",
                "function": {"name": "shell", "arguments": arguments},
            }
            for at, arguments in enumerate(said)
        ]
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 1,
        "model": "scripted",
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": "stop" if isinstance(said, str) else "tool_calls",
            }
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


@contextlib.asynccontextmanager
async def _model(*turns: Any) -> AsyncIterator[tuple[str, list[Any]]]:
    """Yield the address of a model that takes these turns, and what it is told with each."""
    told: list[Any] = []

    async def handle(request: web.Request) -> web.Response:
        told.append((await request.json())["messages"])
        return web.json_response(_answer(turns[len(told) - 1], len(told)))

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", told
    finally:
        await runner.cleanup()


async def _evaluated(stack: Stack, base: str, directory: Path, url: str) -> dict[str, Any]:
    """Return the episode of the example's first task, as the command line records it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from verifiers.v1.cli.eval.main import main; main()"),
        *("count-lines", "-n", "1", "--model", "scripted", "--client.base-url", url),
        *("--no-push", "--no-rich", "--output-dir", str(directory), "--run.name", "run"),
        *("--env.create", json.dumps({"env": {"WHERE": "here"}})),
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([EXAMPLES, os.environ.get("PYTHONPATH", "")]),
            "DSEC_BASE": base,
            "DSEC_NATS_SERVERS": ",".join(stack.context.nats_servers),
            "DSEC_NATS_CREDENTIALS": stack.context.credentials,
        },
        cwd=directory,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    (episode,) = map(json.loads, (directory / "run" / "traces.jsonl").read_text().splitlines())
    return dict(episode)


def _command(line: str) -> str:
    return json.dumps({"command": line})


async def test_an_agent_with_a_shell_is_evaluated_and_judged_apart(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    turns = (
        ["no JSON", _command("echo \0"), _command("ls; echo $WHERE; cat /verify/answer; exit 3")],
        [_command("sort -u app.log | wc -l > answer; cp /bin/true /bin/cmp")],
        "It is written.",
    )
    async with _model(*turns) as (url, told):
        (trace,) = (await _evaluated(stack, base, tmp_path, url))["traces"]
    assert (trace["ok"], trace["stop_condition"]) == (True, "agent_completed")
    assert trace["rewards"]["counted"]["score"] == 1.0
    assert trace["agent"]["runtime"]["image"] == base
    heard = [it["content"] for it in told[-1] if it["role"] == "tool"]
    assert heard[0].startswith("there is one tool")
    assert "NUL" in heard[1]
    assert heard[2].startswith("app.log\nhere\n\ncat: /verify/answer: No such file")
    assert heard[2].endswith("[exit code 3]")
    assert heard[3] == "[no output]"


@contextlib.asynccontextmanager
async def _serving(
    stack: Stack, base: str, monkeypatch: pytest.MonkeyPatch, **create: Any
) -> AsyncIterator[tuple[DsecEnv, vf.Task]]:
    """Yield the example's environment and its first task."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("DSEC_BASE", base)
    monkeypatch.setenv("DSEC_NATS_SERVERS", ",".join(stack.context.nats_servers))
    monkeypatch.setenv("DSEC_NATS_CREDENTIALS", stack.context.credentials)
    config = {"taskset": {"id": "count-lines"}, "create": {"labels": LABELS} | create}
    env = vf.load_environment(vf.resolve_env_config(config))
    assert isinstance(env, DsecEnv)
    async with env.serving():
        yield env, next(iter(env.taskset))


def _asked(url: str) -> vf.ModelContext:
    return vf.ModelContext(model="scripted", client=vf.EvalClientConfig(base_url=url))


@pytest.mark.filterwarnings("default")
async def test_a_sandbox_that_runs_out_of_memory_ends_its_episode_with_nothing(
    stack: Stack, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(memory_bytes=64 << 20, disk_bytes=8 << 20, oom_group=True)
    hoard = [_command("python3 -c 'bytearray(1 << 30)'")]
    async with (
        _model(hoard, "not asked") as (url, told),
        _serving(stack, base, monkeypatch, limits=limits, memory_bytes=None) as (env, task),
    ):
        episode = await env.run_episode(task, _asked(url))
    (trace,) = episode.traces
    assert (episode.ok, trace.reward, trace.info, len(told)) == (True, 0.0, {"cause": "oom"}, 1)


@pytest.mark.filterwarnings("default")
async def test_what_the_platform_fails_with_is_no_reward_and_leaves_no_sandbox(
    stack: Stack, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        stack.client() as client,
        _model([_command("true")], "not asked") as (url, told),
        _serving(stack, base, monkeypatch) as (env, task),
    ):

        async def ended(_: Any, runtime: Any) -> None:
            await runtime.sandbox.delete()

        monkeypatch.setattr(type(task), "setup", ended)
        episode = await env.run_episode(task, _asked(url))
        assert await client.list_sandboxes(labels=LABELS) == []
    (trace,) = episode.traces
    assert (episode.ok, trace.reward, len(told)) == (False, 0.0, 1)
    assert trace.last_error is not None
    assert trace.last_error.type == "SandboxError"
    assert "expired" in trace.last_error.message


@pytest.mark.filterwarnings("default")
async def test_a_sandbox_is_a_runtime_as_verifiers_has_them(
    stack: Stack, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        _serving(stack, base, monkeypatch) as (env, task),
        env.placed(task) as runtime,
    ):
        view = runtime.with_env({"A": "1", "B": "2"})
        told = await view.run(["sh", "-c", "echo $A$B; pwd; echo no >&2; kill -9 $$"], {"B": "3"})
        assert told == vf.ProgramResult(137, "13\n/work\n", "no\n")
        assert (await runtime.run(["no-such-program"], {})).exit_code == 127
        await runtime.write("a/b", b"12345")
        assert await runtime.read("a/b", max_bytes=5) == await runtime.read("/work/a/b") == b"12345"
        for path in ("a/b", "/dev/zero", "missing"):
            with pytest.raises(vf.SandboxError):
                await runtime.read(path, max_bytes=4)
        user = runtime.with_user("1000", home="/tmp")
        assert (await user.run(["sh", "-c", "id -u; echo $HOME"], {})).stdout == "1000\n/tmp\n"
        assert await runtime.alive()


def test_what_a_task_asks_for_is_what_its_sandbox_is_made_of() -> None:
    data = vf.TaskData(
        image="python@1",
        resources=vf.TaskResources(cpu=2, memory=0.5, disk=1),
        network_allow=[],
    )
    asked = sandbox_arguments(data, {"cpus": 1.0, "network": "open", "ttl_s": 60})
    assert asked == {
        "base": "python@1", "cpus": 1.0, "memory_bytes": 512 << 20, "disk_bytes": 1 << 30,
        "network": None, "ttl_s": 60,
    }  # fmt: skip
    refused = (
        vf.TaskData(network_allow=["example.org"]),
        vf.TaskData(network_block=["example.org"]),
        vf.TaskData(resources=vf.TaskResources(gpu="A100")),
    )
    for it in refused:
        with pytest.raises(DsecError) as told:
            sandbox_arguments(it, {})
        assert told.value.code is ErrorCode.UNSUPPORTED
