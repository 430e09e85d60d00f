"""Agents as their authors write them, where they run: at hand, as a step, and in a rollout."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_world import NODE, AgentWorld, agent_world, sandbox_record
from chronus_parties import chronus_service
from dsec.agent import Agent, Context, Feedback, State
from dsec.channel import Channel
from dsec.rollouts import Rollouts
from dsec_common.behavior import BehaviorLog
from dsec_common.clock import SystemClock
from dsec_common.errors import DsecError
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_sandboxd.agent_gateway import ChronusGateway
from dsec_sandboxd.agent_socket import SOCKET_NAME, AgentSocketServer
from dsec_sandboxd.step_log import StepLog
from weather_agent import WEATHER_HOST, WeatherAgent, weather_agent

QUICKLY_S = 60  # at worst, on a busy machine


class Adder(Agent):
    """Adds, slowly and with what can go wrong."""

    async def execute(self, a: int, b: int = 1) -> Any:
        if a == 0:
            raise ValueError("zero")
        if a == 7:
            return {"large": "x" * 300_000}
        if a == 8:
            return {1, 2}
        await asyncio.sleep(0)
        return a + b


def adder(**context: Any) -> Adder:
    return Adder(contract={"name": "adder", "version": "2"}, context=Context("adder", **context))


@pytest.fixture(params=[False, True], ids=["plain", "example"])
def weather(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[WeatherAgent]:
    with weather_agent(tmp_path, example=request.param) as made:
        yield made


def run(agent: WeatherAgent, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*agent.argv, *arguments],
        check=False,
        capture_output=True,
        text=True,
        input=stdin,
        env=agent.environment,
        timeout=QUICKLY_S,
    )


# --- At hand ---


def test_the_weather_agent_runs_as_it_is_written(weather: WeatherAgent) -> None:
    done = run(weather, "--location", "101010100")
    assert (done.returncode, done.stdout) == (0, "Rain, then sun.\n"), done.stderr
    (asked,) = weather.weather.asked
    assert (asked.host, asked.headers["accept"]) == (WEATHER_HOST, "application/json")
    (prompted,) = weather.model.asked
    sent = json.loads(prompted.body)
    assert (sent["model"], sent["max_tokens"], sent["temperature"]) == ("deepseek-v2-7b", 512, 0.3)
    assert "{'narrative': ['Rain', 'Sun']}" in sent["messages"][0]["content"]


def test_it_is_a_step_that_reads_and_prints_json(weather: WeatherAgent) -> None:
    done = run(weather, stdin='{"location": "101010100"}')
    assert (done.returncode, json.loads(done.stdout)) == (0, "Rain, then sun."), done.stderr
    assert json.loads(run(weather, stdin='"101010100"').stdout) == "Rain, then sun."


def test_a_failure_has_a_code_and_an_exit_status(weather: WeatherAgent) -> None:
    done = run(weather, "--location", "5")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "internal: RuntimeError: API failed: 404"
    done = run(weather, stdin='"5"')
    error = json.loads(done.stderr.splitlines()[-1])["error"]
    assert (done.returncode, error["message"]) == (1, "RuntimeError: API failed: 404")
    done = run(weather, stdin='{"place": "5"}')
    error = json.loads(done.stderr)["error"]
    assert (done.returncode, error["code"]) == (1, "invalid")
    assert error["message"] == "location is of type str, and a dict was given"
    assert weather.model.asked == []


def test_the_contract_is_kept_to(weather: WeatherAgent) -> None:
    contract = Path(weather.argv[1]).with_suffix(".yaml")
    contract.write_text(contract.read_text().replace("[network_access]", "[]"))
    done = run(weather, "--location", "101010100")
    assert (done.returncode, weather.weather.asked) == (1, [])
    assert "http_client can do nothing without it: add permissions" in done.stderr
    contract.unlink()
    assert "denied: the agent's contract names no tool" in run(weather, "--location", "5").stderr


def test_importing_an_agent_loads_the_standard_library_alone() -> None:
    code = (
        "import sys; from dsec import Agent, ToolCall; import dsec.tools.llm; "
        "outside = {name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names; "
        "print(sorted(outside - {'dsec', 'dsec_common', '__main__', '_virtualenv'}))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"],
        check=True,
        capture_output=True,
        text=True,
        timeout=QUICKLY_S,
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("given", "printed"),
    [('{"a": 2}', "3"), ('{"a": 2, "b": 5}', "7")],
)
def test_an_agent_may_be_async(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str, printed: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(given))
    adder().serve([])
    assert capsys.readouterr().out.strip() == printed


@pytest.mark.parametrize(
    "given", ["[1]", "nonsense", "", '{"a": 8}', '{"a": 1, "c": 1}', '{"a": true}', '{"a": "1"}']
)
def test_input_that_does_not_fit_and_output_that_is_no_json_are_invalid(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(given))
    with pytest.raises(SystemExit):
        adder().serve([])
    assert json.loads(capsys.readouterr().err)["error"]["code"] == "invalid"


def test_arguments_of_the_command_line_are_typed_as_they_are_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    adder().serve(["--a", "2", "--b", "40"])
    assert capsys.readouterr().out == "42\n"
    with pytest.raises(SystemExit):
        adder().serve(["--a", "two"])
    assert "'two' is no JSON" in capsys.readouterr().err


# --- In a rollout ---


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[AgentWorld]:
    async with agent_world(tmp_path) as running:
        yield running


def in_world(world: AgentWorld, tmp_path: Path) -> Adder:
    return adder(socket_path=str(world.path), state_path=str(tmp_path / "state.sqlite"))


async def test_it_works_for_the_trainer_until_that_is_done(
    world: AgentWorld, tmp_path: Path
) -> None:
    for seq, given in enumerate([{"a": 1}, {"a": 0}, {"b": 1}, {"a": 7}, {"a": 8}], 1):
        await world.gateway.give(seq, given)
    await world.gateway.give(6, None, done=True)
    await asyncio.to_thread(in_world(world, tmp_path).serve, [])
    (ready, about), (first, output), *failed = world.gateway.reports
    assert (ready, about) == (
        "ready",
        {"agent": "adder", "version": "2", "arguments": ["a", "b"]},
    )
    assert (first, output) == ("result", {"output": 2})
    assert [stage for stage, _ in failed] == ["failed"] * 4
    codes = [payload["error"]["code"] for _, payload in failed]
    assert codes == ["internal", "invalid", "invalid", "invalid"]
    assert failed[0][1]["error"]["message"] == "ValueError: zero"


async def test_work_of_a_process_that_died_is_not_begun_again_by_itself(
    world: AgentWorld, tmp_path: Path
) -> None:
    """The first process got its work and was killed; the next one asks."""
    await world.gateway.give(1, {"a": 1})
    with Context("adder", socket_path=str(world.path), state_path=str(tmp_path / "s")) as first:
        await asyncio.to_thread(first.report, "ready")
        first.state.put("half", 1)
        first.state.checkpoint("half_done")
    await world.gateway.give(2, {"a": 5})
    await world.gateway.give(3, None, done=True)
    await asyncio.to_thread(
        adder(socket_path=str(world.path), state_path=str(tmp_path / "s")).serve, []
    )
    _, (stage, payload), result = world.gateway.reports
    assert (stage, payload["last_seq"], payload["checkpoints"]) == ("restarted", 1, ["half_done"])
    assert result == ("result", {"output": 6})


class Downloader(Agent):
    """Does a thing in two steps, the first of which is never done twice."""

    def execute(self, name: str) -> str:
        if self.context.state.get("downloaded") != name:
            self.context.state.put("downloaded", name)
            self.context.checkpoint("downloaded")
        path = Path(self.context.state.get("directory", "."), "text")
        path.write_text(name)
        artefact = self.context.artefact(path, name="the text")
        verdict = self.context.stage("extracted", {"bytes": artefact.bytes})
        return f"{verdict.payload} {verdict.reward}"


async def test_stages_checkpoints_and_artefacts_reach_the_trainer(
    world: AgentWorld, tmp_path: Path
) -> None:
    agent = Downloader(
        contract={"name": "d"},
        context=Context("d", socket_path=str(world.path), state_path=str(tmp_path / "s")),
    )
    agent.context.state.put("directory", str(tmp_path))
    await world.gateway.give(1, {"name": "a"})
    await world.gateway.give(2)  # the checkpoint
    await world.gateway.give(4, "good", reward=1.0)
    await world.gateway.give(5, "a")  # again: nothing is downloaded twice
    await world.gateway.give(7, "enough", done=True)
    await asyncio.to_thread(agent.serve, [])
    stages = [stage for stage, _ in world.gateway.reports]
    assert stages == [
        "ready", "checkpoint", "artefact", "extracted", "result",
        "artefact", "extracted", "result",
    ]  # fmt: skip
    told = dict(world.gateway.reports[:4])
    assert told["checkpoint"] == {"name": "downloaded", "keys": 2}
    assert told["artefact"] == {
        "name": "the text",
        "path": str(tmp_path / "text"),
        "bytes": 1,
        "sha256": hashlib.sha256(b"a").hexdigest(),
    }
    assert world.gateway.reports[4] == ("result", {"output": "good 1.0"})


async def test_tool_calls_are_steps_of_the_behaviour_log(world: AgentWorld, tmp_path: Path) -> None:
    contract = {"capabilities": [{"tool": "files", "permissions": ["read_file"]}]}
    context = Context("x", socket_path=str(world.path))
    with Adder(contract=contract, context=context) as agent:
        files = agent.get_async_tool("files")
        (tmp_path / "a").write_text("x")
        await files.read(str(tmp_path / "a"))
        with pytest.raises(DsecError):
            await files.write(str(tmp_path / "a"), "y")
        calls = agent.calls
    assert world.gateway.actions() == ["files.read", "files.write"]
    read, written = world.gateway.steps
    assert (read["status"], written["status"]) == ("ok", "denied")
    assert read["latency_ms"] == calls[0].latency_ms
    assert read["attributes"] == {"arguments_sha256": calls[0].call.arguments_sha256}
    assert "write_file" in written["attributes"]["error"]


async def test_refusals_of_the_node_are_the_platforms_errors(
    world: AgentWorld, tmp_path: Path
) -> None:
    with Context("x", socket_path=str(world.path)) as context:
        with pytest.raises(DsecError, match="platform's own") as refused:
            await asyncio.to_thread(context.log, "exec")
        assert refused.value.code.value == "denied"
        await asyncio.to_thread(context.report, "s")
        world.gateway.reports.append(("from another process", None))
        with pytest.raises(DsecError) as refused:
            await asyncio.to_thread(context.report, "s")
        assert refused.value.code.value == "conflict"


async def test_without_a_rollout_stages_are_nobodys_and_work_comes_from_stdin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with agent_world(tmp_path, rollout_id="") as world:
        monkeypatch.setattr(sys, "stdin", io.StringIO('{"a": 4}'))
        agent = in_world(world, tmp_path)
        await asyncio.to_thread(agent.serve, [])
        with Context("x", socket_path=str(world.path)) as context:
            assert await asyncio.to_thread(context.stage, "s") == Feedback()
    assert capsys.readouterr().out == "5\n"
    assert world.gateway.reports == []


# --- With everything between the agent and the trainer ---


@pytest.fixture
async def nats() -> AsyncIterator[NatsForTests]:
    async with nats_for_tests() as running:
        yield running


@contextlib.asynccontextmanager
async def process_of(
    agent: WeatherAgent, directory: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = agent.environment | {
        "DSEC_AGENT_SOCKET": str(directory / SOCKET_NAME),
        "DSEC_AGENT_STATE": str(directory / "state.sqlite"),
    }
    process = await asyncio.create_subprocess_exec(
        *agent.argv, env=environment, stdin=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_a_weather_agent_is_trained_and_may_be_killed_in_between(
    nats: NatsForTests, tmp_path: Path, weather: WeatherAgent
) -> None:
    records: list[BehaviorLog] = []
    async with (
        asyncio.timeout(QUICKLY_S),
        chronus_service(nats),
        nats.project() as trainer_bus,
        nats.service("sandboxd", NODE) as node_bus,
    ):
        rollout = await Rollouts(Channel(trainer_bus, "default")).open()
        gateway = ChronusGateway(node_bus, StepLog(NODE, records), NODE, SystemClock())
        server = AgentSocketServer(gateway, NODE)
        await server.open(sandbox_record(rollout_id=rollout.id), tmp_path)
        stages = rollout.stages()
        async with process_of(weather, tmp_path) as first:
            ready = await anext(stages)
            assert (ready.name, ready.payload["arguments"]) == ("ready", ["location"])
            await ready.reply({"location": "101010100"})
            result = await anext(stages)
            assert (result.name, result.payload) == ("result", {"output": "Rain, then sun."})
            first.kill()
        async with process_of(weather, tmp_path) as second:
            restarted = await anext(stages)
            assert (restarted.name, restarted.payload["last_seq"]) == ("restarted", 2)
            await result.reply({"location": "101010100"}, reward=1.0)
            await restarted.reply({"location": "nowhere"})
            failed = await anext(stages)
            assert failed.payload["error"]["message"] == "RuntimeError: API failed: 404"
            # It waits for its feedback, so it leaves at once.
            second.send_signal(signal.SIGTERM)
            assert await second.wait() == 0
        async with process_of(weather, tmp_path) as third:
            await failed.reply()
            await (await anext(stages)).reply(done=True)
            assert await third.wait() == 0
        await server.aclose()
    actions = [record.action for record in records]
    assert actions.count("http_client.get") == 2
    (call, *_) = [record for record in records if record.action == "llm_summarizer.invoke"]
    assert (call.status, call.tokens_in, call.tokens_out) == ("ok", 11, 7)
    assert call.attributes["model"] == "deepseek-v2-7b"


async def test_sigterm_lets_work_be_finished_and_reported(
    world: AgentWorld, tmp_path: Path
) -> None:
    program = tmp_path / "slow.py"
    program.write_text(
        "import pathlib, sys, time\n"
        "from dsec import Agent\n"
        "class Slow(Agent):\n"
        "    def execute(self, go: str) -> str:\n"
        "        self.context.report('begun')\n"
        "        while not pathlib.Path(go).exists():\n"
        "            time.sleep(0.005)\n"
        "        return 'finished'\n"
        "Slow().serve()\n"
    )
    go = tmp_path / "go"
    await world.gateway.give(1, {"go": str(go)})
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(program), env=os.environ | {"DSEC_AGENT_SOCKET": str(world.path)}
    )
    async with asyncio.timeout(QUICKLY_S):
        await world.gateway.reported(2)
        process.send_signal(signal.SIGTERM)
        go.touch()
        assert await process.wait() == 0
    assert world.gateway.reports[-1] == ("result", {"output": "finished"})


# --- What it remembers ---


def test_what_was_put_is_there_after_a_kill_and_checkpoints_go_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state.sqlite"
    code = (
        "import os, sys; from pathlib import Path; from dsec.agent import State\n"
        "s = State(Path(sys.argv[1])); s.put_all({'a': [1], 'b': 'ä'}); s.checkpoint('one')\n"
        "s.put('a', 2); s.delete('b'); s.checkpoint('two'); s.put('c', None)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=QUICKLY_S)
    assert done.returncode == -signal.SIGKILL
    state = State(path)
    assert (state.get("a"), state.get("b"), state.keys()) == (2, None, ["a", "c"])
    assert state.checkpoints() == ["one", "two"]
    state.restore("one")
    assert (state.get("a"), state.get("b"), state.keys()) == ([1], "ä", ["a", "b"])
    state.checkpoint("one")
    assert state.checkpoints() == ["two", "one"]
    with pytest.raises(DsecError, match="values are JSON"):
        state.put("x", {1})
    with pytest.raises(DsecError, match="no checkpoint 'no'"):
        state.restore("no")
    assert state.get("a") == [1]
    state.close()


def test_a_file_that_is_no_state_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    path.write_bytes(b"something else, and long enough to be looked at" * 100)
    with pytest.raises(DsecError, match=r"state.sqlite failed") as refused:
        State(path)
    assert refused.value.code.value == "internal"
