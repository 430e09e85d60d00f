"""One suite for the agent protocol's clients in all languages, against the node's own sockets.

What is asked is the same for each, and so is what has to come of it: results, errors with their
codes, and steps of the behaviour log.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent_clients import (
    LANGUAGES,
    Client,
    client_in,
    client_process,
    documented,
    need_toolchain,
)
from agent_world import NODE, sandbox_record
from chronus_parties import chronus_service
from documents import ROOT
from dsec.channel import Channel
from dsec.rollouts import Rollout, Rollouts
from dsec_common.behavior import BehaviorLog
from dsec_common.clock import SystemClock
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_common.wire.network import NetworkMode, NetworkPolicy
from dsec_common.wire.tools import NodeTools, Rate, ToolTerms
from dsec_sandboxd.agent_gateway import ChronusGateway
from dsec_sandboxd.agent_protocol import FRAME_MAX_BYTES, PAYLOAD_MAX_BYTES
from dsec_sandboxd.agent_socket import SOCKET_NAME, AgentSocketServer
from dsec_sandboxd.state_database import StateDatabase
from dsec_sandboxd.step_log import StepLog
from dsec_sandboxd.tools.desk import ToolDesk
from dsec_sandboxd.tools.models import ModelServer
from dsec_sandboxd.tools.rates import CallRates
from outside_web import Answer, Asked, Web, completion, web
from tool_names import Loopback

pytestmark = pytest.mark.timeout(400)  # a first build may have to compile its dependencies

WITHIN_S = 60
#: More than one part of an answer holds, of all bytes.
LARGE = bytes(range(256)) * 1024


@dataclass
class Node:
    """A node with one sandbox that serves a rollout, and the rollout's trainer."""

    rollout: Rollout
    gateway: ChronusGateway
    server: AgentSocketServer
    directory: Path
    records: list[BehaviorLog] = field(default_factory=list)

    @property
    def socket(self) -> Path:
        return self.directory / SOCKET_NAME

    async def restart(self) -> None:
        """End all connections and listen again, as a daemon that is started again does."""
        record = sandbox_record(rollout_id=self.rollout.id)
        await self.server.close(record.local)
        self.socket.unlink()
        await self.server.open(record, self.directory)


@pytest.fixture(params=list(LANGUAGES))
def language(request: pytest.FixtureRequest) -> str:
    """Each language whose toolchain is here; its client is built by now."""
    name = str(request.param)
    client_in(name)
    return name


@pytest.fixture
async def nats() -> AsyncIterator[NatsForTests]:
    async with nats_for_tests() as running:
        yield running


@pytest.fixture
async def node(language: str, nats: NatsForTests, tmp_path: Path) -> AsyncIterator[Node]:
    async with (
        chronus_service(nats),
        nats.project() as trainer_bus,
        nats.service("sandboxd", NODE) as node_bus,
    ):
        rollout = await Rollouts(Channel(trainer_bus, "default")).open()
        records: list[BehaviorLog] = []
        gateway = ChronusGateway(node_bus, StepLog(NODE, records), NODE, SystemClock())
        server = AgentSocketServer(gateway, NODE)
        await server.open(sandbox_record(rollout_id=rollout.id), tmp_path)
        yield Node(rollout, gateway, server, tmp_path, records)
        await server.aclose()


@contextlib.asynccontextmanager
async def client_of(language: str, node: Node) -> AsyncIterator[Client]:
    async with client_process(language, node.socket) as process, asyncio.timeout(WITHIN_S):
        yield Client(process)


def refusal(answer: Any) -> tuple[str, bool, Any]:
    error = answer["error"]
    return error["code"], error["retryable"], error["details"]


async def test_a_client_reports_waits_and_is_refused(node: Node, language: str) -> None:
    async with client_of(language, node) as client:
        assert await client.ask("hello") == {
            "result": {
                "protocol": 1,
                "sandbox_id": f"{NODE}.01sandbox",
                "rollout_id": node.rollout.id,
                "last_seq": 0,
                "tools": [],
                "payload_max_bytes": PAYLOAD_MAX_BYTES,
                "frame_max_bytes": FRAME_MAX_BYTES,
            }
        }
        payload = {"text": "ä\u2028<&>", "deep": [{"n": None, "f": 0.5, "i": -3}]}
        assert await client.ask("report", stage="one", payload=payload) == {"result": 1}
        again = await client.ask("report", seq=1, stage="one", payload=payload)
        assert again == {"result": 1}
        other = await client.ask("report", seq=1, stage="one", payload="other")
        assert refusal(other)[:2] == ("conflict", False)
        gap = refusal(await client.ask("report", seq=9, stage="one", payload=None))
        assert (gap[0], gap[2]["expected_seq"]) == ("invalid", 2)
        assert refusal(await client.ask("report", stage="", payload=None))[0] == "invalid"
        large = await client.ask("report", stage="one", payload="x" * (PAYLOAD_MAX_BYTES + 1))
        assert refusal(large)[0] == "invalid"
        larger = await client.ask("report", stage="one", payload="x" * (FRAME_MAX_BYTES + 1))
        assert refusal(larger)[0] == "invalid"

        assert await client.ask("await", seq=1, wait_s=0.01) == {"result": None}
        stages = node.rollout.stages()
        first = await anext(stages)
        assert (first.name, first.payload) == ("one", payload)
        await first.reply({"do": "ä\u2028"}, reward=0.5)
        feedback = {"seq": 1, "payload": {"do": "ä\u2028"}, "reward": 0.5, "done": False}
        assert await client.ask("await", seq=1, wait_s=30) == {"result": feedback}

        stepping = asyncio.create_task(client.ask("step", stage="two", payload=[]))
        await (await anext(stages)).reply(done=True)
        told = {"seq": 2, "payload": None, "reward": None, "done": True}
        assert await stepping == {"result": told}
        await node.rollout.close()
        assert refusal(await client.ask("step", stage="three", payload=1))[0] == "expired"


async def test_a_step_counts_once_though_the_daemon_is_started_again(
    node: Node, language: str
) -> None:
    async with client_of(language, node) as client:
        stepping = asyncio.create_task(client.ask("step", stage="one", payload={"n": 1}))
        stages = node.rollout.stages()
        first = await anext(stages)
        await node.restart()
        await first.reply("go")
        assert (await stepping)["result"]["payload"] == "go"
        # An idle connection that broke is made again, too.
        await node.restart()
        assert await client.ask("report", stage="two", payload=None) == {"result": 2}
        assert (await node.rollout.inspect()).last_seq == 2


async def test_a_platform_that_stays_away_is_told_when_patience_is_over(
    node: Node, language: str
) -> None:
    async with client_of(language, node) as client:
        assert await client.ask("hello")
        await client.ask("patience", wait_s=0.1)
        await node.server.aclose()
        refused = refusal(await client.ask("report", stage="one", payload=None))
        assert refused == ("unavailable", True, {})


async def test_what_a_client_did_is_in_the_behaviour_log(node: Node, language: str) -> None:
    attributes = {"url": "http://x/<&>", "ä": "ö"}
    async with client_of(language, node) as client:
        logged = {"action": "fetch", "status": "200", "latency_ms": 12.5, "attributes": attributes}
        assert await client.ask("log", **logged, tokens_in=5, tokens_out=6) == {"result": None}
        assert refusal(await client.ask("log", action="exec"))[:2] == ("denied", False)
        arguments = {"url": "http://x/?a=1&b=<2>", "n": 3}
        for changed in ({"status": "200", "tokens_out": 4, "attributes": {"n": "1"}}, {}):
            call = {"tool": "http", "method": "get", "arguments": arguments, "status": ""}
            assert await client.ask("call", **(call | changed)) == {"result": None}
        failed = await client.ask(
            "call",
            tool="http",
            method="get",
            arguments={"é": ["\u2028\b", {"b": 1, "a": ""}]},
            fails="timeout",
        )
        assert refusal(failed)[0] == "timeout"
    one, called, plain, late = node.records
    assert (one.action, one.status, one.latency_ms) == ("fetch", "200", 12.5)
    assert (one.tokens_in, one.tokens_out, one.attributes) == (5, 6, attributes)
    digest = "f809073ca9f1f06e2de2154de97974e5beb3fe0ffaf4146ef0e1c3bf11d31aa6"
    assert (called.action, called.status, called.tokens_out) == ("http.get", "200", 4)
    assert called.attributes == {"arguments_sha256": digest, "n": "1"}
    assert (plain.status, plain.attributes) == ("ok", {"arguments_sha256": digest})
    assert (late.status, late.attributes) == (
        "timeout",
        {
            "arguments_sha256": "a69267db9dc61da1fa25055f3029042e4ad108e09926662af5525549eb65dcaa",
            "error": "as it was told",
        },
    )


def outside(asked: Asked) -> Answer:
    if asked.path.endswith("/chat/completions"):
        return completion("hellö")
    if asked.path == "/cut":
        return Answer(body="half", cut=True)
    status = 404 if asked.path == "/none" else 200
    return Answer(status=status, body=LARGE, headers={"X-Site": asked.method})


@contextlib.asynccontextmanager
async def tools_of(node: Node, site: Web) -> AsyncIterator[None]:
    """Have the node make calls for its sandbox, of a contract with a client and a model."""
    terms = {
        "http_client": ToolTerms(permissions=("network_access",)),
        "llm": ToolTerms(model="m", max_tokens=50, rate_limit=Rate(count=1, window_s=3600)),
    }
    network = NetworkPolicy(mode=NetworkMode.OPEN)
    record = msgspec.structs.replace(
        sandbox_record(rollout_id=node.rollout.id), tools=NodeTools(terms=terms, network=network)
    )
    with contextlib.closing(StateDatabase(node.directory / "rates")) as database:
        desk = ToolDesk(
            Loopback(),
            ModelServer(f"{site.url}/v1", ""),
            CallRates(database, SystemClock().monotonic),
            SystemClock(),
            network_of=lambda _: network,
            log=node.gateway.log,
        )
        node.server.run_tools(desk)
        await node.server.open(record, node.directory)
        yield


async def test_a_node_calls_the_tools_that_a_client_asks_for(node: Node, language: str) -> None:
    with web(outside) as site:
        async with tools_of(node, site), client_of(language, node) as client:
            assert (await client.ask("hello"))["result"]["tools"] == ["http_client", "llm"]
            posted = {"method": "POST", "headers": {"X-Mine": "a"}, "body": "ö\u2028<&>"}
            for path, status in (("/there?a=1&b=<2>", 200), ("/none", 404)):
                url = f"{site.url}{path}"
                told = (await client.ask("http", url=url, **posted))["result"]
                assert told.pop("url").startswith(site.url)
                assert told == {
                    "status": status,
                    "x_site": ["POST"],
                    "bytes": len(LARGE),
                    "sha256": hashlib.sha256(LARGE).hexdigest(),
                }
            assert site.asked[0].headers["x-mine"] == "a"
            assert site.asked[0].body.decode() == posted["body"]
            for url, code in (
                ("http://192.0.2.1/", "denied"),
                ("ftp://x/", "invalid"),
                (f"{site.url}/cut", "unavailable"),
            ):
                assert refusal(await client.ask("http", url=url, method="GET"))[0] == code, url
            question = {"messages": [{"role": "user", "content": "hi"}], "options": {"seed": 7}}
            greedy = await client.ask("complete", tool="llm", max_tokens=51, **question)
            assert refusal(greedy)[:2] == ("denied", False)
            written = (await client.ask("complete", tool="llm", max_tokens=9, **question))["result"]
            assert written["model"] == "deepseek-v2-7b"  # the server's own word
            assert (written["tokens_in"], written["tokens_out"]) == (11, 7)
            assert written["body"]["choices"][0]["message"]["content"] == "hellö"
            sent = json.loads(site.asked[-1].body)
            assert (sent["max_tokens"], sent["seed"]) == (9, 7)
            # A refusal that may pass is told at once, and what is asked next is answered.
            often = await client.ask("complete", tool="llm", max_tokens=9, **question)
            assert refusal(often)[:2] == ("exhausted", True)
            other = await client.ask("tool", tool="shell", call="run", arguments={"command": "id"})
            assert refusal(other) == ("denied", False, {"tool": "shell"})
            large = "x" * (FRAME_MAX_BYTES + 1)
            assert refusal(await client.ask("http", url=large, method="GET"))[0] == "invalid"
            assert await client.ask("report", stage="one", payload=None) == {"result": 1}
    # Each is one step, of the node's own; what was never sent is none.
    steps = [(it.attributes["tool"], it.status) for it in node.records if it.action == "tool_call"]
    assert steps == [
        *(("http_client", status) for status in ("200", "404", "denied", "invalid", "unavailable")),
        *(("llm", status) for status in ("denied", "ok", "exhausted")),
        ("shell", "denied"),
    ]


async def test_an_agent_serves_a_rollout_over_its_own_death(node: Node, language: str) -> None:
    stages = node.rollout.stages()
    async with asyncio.timeout(WITHIN_S):
        async with client_process(language, node.socket, "serve") as first:
            ready = await anext(stages)
            assert (ready.name, ready.payload) == (
                "ready",
                {"agent": "adder", "version": "2", "arguments": ["a", "b"]},
            )
            await ready.reply({"a": 1, "b": 2})
            result = await anext(stages)
            assert (result.name, result.payload) == ("result", {"output": 3})
            first.kill()
            await first.wait()
        async with client_process(language, node.socket, "serve") as second:
            again = await anext(stages)
            assert (again.name, again.payload["last_seq"]) == ("restarted", 2)
            for given, code in (
                ({"b": 1}, "invalid"),
                ({"a": 7}, "invalid"),
                ({"a": 8}, "internal"),
            ):
                await again.reply(given)
                again = await anext(stages)
                assert again.name == "failed", given
                error = again.payload["error"]
                assert (error["code"], error["retryable"]) == (code, False), given
                assert error.keys() == {
                    "code", "message", "retryable", "retry_after_s", "details",
                }  # fmt: skip
            await again.reply(done=True)
            assert await second.wait() == 0


async def test_without_a_rollout_an_agent_is_a_step_of_a_dag(tmp_path: Path, language: str) -> None:
    async with client_process(language, tmp_path / "none", "serve") as process:
        out, _ = await process.communicate(b'{"a": 40, "b": 2}')
        assert (process.returncode, json.loads(out)) == (0, 42)
    async with client_process(language, tmp_path / "none", "serve") as process:
        out, _ = await process.communicate(b"nonsense")
        assert (process.returncode, out) == (1, b"")


@pytest.mark.parametrize("shown", ["go", "rust"])
def test_the_agents_that_the_page_shows_run(tmp_path: Path, shown: str) -> None:
    need_toolchain(shown)
    for given, code, printed in (("21", 0, "42\n"), ('"x"', 1, "")):
        done = subprocess.run(
            documented(shown),
            check=False,
            capture_output=True,
            text=True,
            input=given,
            env=os.environ | {"DSEC_AGENT_SOCKET": str(tmp_path / "none")},
            timeout=WITHIN_S,
        )
        assert (done.returncode, done.stdout) == (code, printed), done.stderr


def test_the_client_in_go_is_formatted_and_vetted() -> None:
    need_toolchain("go")
    for command in (["gofmt", "-l", "."], ["go", "vet", "./..."]):
        assert said("go", command) == ""


@pytest.mark.parametrize(
    ("language", "command"),
    [("go", ["go", "test", "."]), ("rust", ["cargo", "test", "--quiet", "--locked", "--tests"])],
)
def test_what_only_one_language_can_get_wrong_is_right(language: str, command: list[str]) -> None:
    client_in(language)  # what it needs is compiled by now
    assert "FAIL" not in said(language, command)


def said(language: str, command: list[str]) -> str:
    """Return what a command says about a client's source; it has to end well."""
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT / "sdk" / language,
        env=os.environ | {"CARGO_TARGET_DIR": str(ROOT / ".dsec" / "clients" / "rust")},
        timeout=WITHIN_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
