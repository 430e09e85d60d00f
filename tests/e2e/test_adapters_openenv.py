"""Sandboxes behind OpenEnv's own server, spoken to by its own client."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("openenv", reason="OpenEnv is not installed: dsec[openenv]")

import uvicorn
from openenv.core.generic_client import GenericEnvClient

from documents import ROOT
from dsec import DsecError, ErrorCode, Sandbox, sync
from dsec.adapters.episodes import ShellTask, Verifier
from dsec.adapters.openenv import DsecEnvironment, ShellAction, environment_app
from stack import Stack

LABELS = {"test": "openenv"}
CREATE = {"memory_bytes": 64 << 20, "disk_bytes": 8 << 20, "labels": LABELS}


@pytest.fixture
def client(stack: Stack) -> Iterator[Any]:
    context = stack.context
    with sync.DSecClient(context.nats_servers, context.credentials) as connected:
        yield connected


async def _seeded(sandbox: Sandbox, seed: int) -> None:
    await sandbox.write_file("/work/seed", str(seed))


@contextlib.contextmanager
def _serving(client: Any, task: ShellTask) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    app = environment_app(client, task, sessions_max=4)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="websockets-sansio"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def _gone(client: Any) -> bool:
    deadline = time.monotonic() + 10
    while client.list_sandboxes(labels=LABELS):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.filterwarnings("default")
def test_each_session_is_a_sandbox_that_ends_with_it(base: str, client: Any) -> None:
    verifier = Verifier(["cmp", "/work/a", "/verify/a"], files={"/verify/a": "42\n"})
    task = ShellTask({"base": base, **CREATE}, verifier, "write 42 to a", _seeded, steps_max=3)
    with _serving(client, task) as url:
        with GenericEnvClient(url).sync() as one, GenericEnvClient(url).sync() as two:
            assert one.reset(seed=7).observation["stdout"] == "write 42 to a"
            two.reset(seed=8)
            assert len(client.list_sandboxes(labels=LABELS)) == 2
            seeds = [env.step({"command": "cat seed"}).observation["stdout"] for env in (one, two)]
            assert seeds == ["7", "8"]
            told = one.step({"command": "echo 42 > a; echo no >&2; exit 3"})
            assert (told.observation["exit_code"], told.observation["stderr"]) == (3, "no\n")
            assert (told.reward, told.done) == (0.0, False)
            done = one.step({"command": "submit"})
            assert (done.reward, done.done) == (1.0, True)
            assert two.step({"command": "echo \0"}).observation["stderr"]
            last = two.step({"command": "true"})
            assert (last.done, two.state()["step_count"]) == (True, 3)
            one.reset(seed=9)
            assert one.step({"command": "ls"}).observation["stdout"] == "seed\n"
        assert _gone(client)


@pytest.mark.filterwarnings("default")
def test_a_step_takes_no_longer_than_it_may(base: str, client: Any) -> None:
    verifier = Verifier("true", create={"base": base})
    environment = DsecEnvironment(client, ShellTask({"base": base, **CREATE}, verifier))
    environment.reset()
    late = environment.step(ShellAction(command="sleep 100"), timeout_s=0.1)
    assert (late.timed_out, late.exit_code, late.done) == (True, None, False)
    environment.close()
    assert client.list_sandboxes(labels=LABELS) == []
    with pytest.raises(DsecError) as refused:
        environment.step(ShellAction(command="true"))
    assert refused.value.code is ErrorCode.CONFLICT


@pytest.mark.filterwarnings("default")
def test_the_example_serves_its_task(stack: Stack, base: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "uvicorn", "--factory", "examples.openenv.server:app"),
            *("--fd", str(listener.fileno())),
        ],
        cwd=ROOT,
        pass_fds=[listener.fileno()],
        env=os.environ
        | {
            "DSEC_BASE": base,
            "DSEC_NATS_SERVERS": ",".join(stack.context.nats_servers),
            "DSEC_NATS_CREDENTIALS": stack.context.credentials,
        },
    )
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with GenericEnvClient(url, connect_timeout_s=60).sync() as env:
            assert env.reset().observation["stdout"].startswith("Write 42")
            env.step({"command": "echo 42 > answer"})
            assert env.step({"command": "submit"}).reward == 1.0
    finally:
        server.terminate()
        server.wait()
        listener.close()
