"""Tools that a whole node runs: its model server, its agents' policies, and what outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec.agent import Agent, Context
from dsec_common import subjects
from dsec_common.errors import DsecError
from dsec_common.wire.agent import AgentPolicy
from dsec_common.wire.agent_node import AgentRules, GovernNode, NodeGoverned
from dsec_common.wire.network import NetworkMode, NetworkPolicy
from dsec_common.wire.sandbox import CreateSandbox, SandboxCreated
from dsec_common.wire.snapshot import ForkSandbox, SandboxForked
from dsec_common.wire.tools import NodeTools, Rate, ToolTerms
from outside_web import Answer, Asked, Web, completion, web
from sandboxd_node import BASE, NODE, NodeForTests
from sandboxd_process import daemon_for_tests

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")

SECRET = "k3y-of-the-node"
OPEN = NetworkPolicy(mode=NetworkMode.OPEN)
LLM = ToolTerms(model="m", max_tokens=50, temperature=0.5)
HTTP = ToolTerms(permissions=("network_access",))
HELLO = {"op": "hello"}
#: Of a network that is for documents: no packet to it arrives anywhere.
NOWHERE = {
    "op": "tool",
    "tool": "http_client",
    "call": "get",
    "arguments": {"url": "http://192.0.2.1/", "timeout_s": 0.2},
}


def model_call(**arguments: Any) -> dict[str, Any]:
    said = {"messages": [{"role": "user", "content": "hi"}], **arguments}
    return {"op": "tool", "tool": "llm", "call": "complete", "arguments": said}


def answers(asked: Asked) -> Answer:
    told = json.loads(asked.body)
    if told["messages"][-1]["content"] == "busy":
        return Answer(status=429, headers={"Retry-After": "7"}, body='{"error": {"message": "no"}}')
    if told["messages"][-1]["content"] == "broken":
        return Answer(status=401, body=f"no such key: {asked.headers['authorization']}")
    return completion("hello", logprobs={"content": [{"token": "h", "logprob": -0.5}]})


@pytest.fixture
def model() -> Iterator[Web]:
    with web(answers) as running:
        yield running


class World:
    """A node's daemon in a process of its own, and one sandbox's socket seen from here."""

    def __init__(self, daemon: Any, node: NodeForTests) -> None:
        self.daemon = daemon
        self.node = node

    async def place(self, terms: dict[str, ToolTerms], **fields: Any) -> SandboxCreated:
        tools = NodeTools(terms=terms, network=OPEN)
        return await self.node.place(CreateSandbox(base=BASE, tools=tools, **fields))

    @contextlib.contextmanager
    def socket_of(self, sandbox_id: str) -> Iterator[str]:
        """Yield the path of a sandbox's socket, however long its directory's is."""
        directory = Path(self.node.config.run_directory) / "s" / sandbox_id.partition(".")[2]
        descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{descriptor}/agent.sock"
        finally:
            os.close(descriptor)

    async def say(self, sandbox_id: str, *requests: dict[str, Any]) -> list[dict[str, Any]]:
        """Send requests over a sandbox's socket as they are; return the answers without parts."""
        answers = []
        with self.socket_of(sandbox_id) as path:
            reader, writer = await asyncio.open_unix_connection(path)
        for request in requests:
            body = json.dumps({**request, "id": 1}).encode()
            writer.write(struct.pack(">I", len(body)) + body)
            told: dict[str, Any] = {"part": ""}
            while "part" in told:
                (length,) = struct.unpack(">I", await reader.readexactly(4))
                told = json.loads(await reader.readexactly(length))
            answers.append(told)
        writer.close()
        await writer.wait_closed()
        return answers

    async def codes(self, sandbox_id: str, *requests: dict[str, Any]) -> list[str]:
        told = await self.say(sandbox_id, *requests)
        return [one["error"]["code"] if "error" in one else "ok" for one in told]

    async def govern(self, revision: int, policy: AgentPolicy) -> None:
        rules = AgentRules(
            project="default",
            name="bot",
            revision=revision,
            policies={revision: policy},
            versions={"1": revision},
        )
        await self.node.scheduler.request(
            subjects.node_request(NODE, "govern"),
            GovernNode(rules=rules),
            NodeGoverned,
            timeout_s=20,
        )


@pytest.fixture
async def world(tmp_path: Path, layers: Path, model: Web) -> AsyncIterator[World]:
    settings = {"model_server": f"{model.url}/v1", "model_server_secret": SECRET}
    async with daemon_for_tests(tmp_path, layers, flags=settings) as (daemon, node):
        yield World(daemon, node)


class Worker(Agent):
    def execute(self) -> None:
        return None


def at_work(socket_path: str) -> tuple[Any, ...]:
    """Use the SDK as an agent does, in a sandbox that has no model's address."""
    capability = {"tool": "llm", "model": "m", "max_tokens": 80, "temperature": 0.5}
    contract = {"name": "worker", "capabilities": [capability]}
    context = Context("worker", socket_path=socket_path)
    with Worker(contract=contract, context=context) as worker:
        llm = worker.get_tool("llm")
        text = llm.invoke("hi", max_tokens=9, system="be brief")
        whole = llm.complete("hi", max_tokens=50, logprobs=True, options={"seed": 7})
        pieces = list(llm.stream("hi", max_tokens=50))
        with pytest.raises(DsecError) as refused:
            llm.invoke("hi", max_tokens=80)  # what its own copy of the contract says
        return text, whole, pieces, refused.value.code, [it.by_node for it in worker.calls]


async def test_an_agents_model_calls_are_made_by_its_node_within_the_contract(
    world: World, model: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    created = await world.place({"llm": LLM})
    with world.socket_of(created.sandbox_id) as path:
        text, whole, pieces, refused, by_node = await asyncio.to_thread(at_work, path)
    assert (text, whole.text, pieces) == ("hello", "hello", ["hello"])
    assert (whole.tokens_in, whole.tokens_out, whole.logprobs[0].token) == (11, 7, "h")
    assert refused == "denied"
    assert by_node == [True] * 4
    first, second, _ = (json.loads(it.body) for it in model.asked)
    assert (first["model"], first["max_tokens"], first["temperature"]) == ("m", 9, 0.5)
    assert first["messages"][0] == {"role": "system", "content": "be brief"}
    assert (second["max_tokens"], second["seed"], second["logprobs"]) == (50, 7, True)
    assert {it.headers["authorization"] for it in model.asked} == {f"Bearer {SECRET}"}


async def test_a_sandbox_that_passes_the_sdk_by_is_held_to_its_contract_all_the_same(
    world: World, model: Web
) -> None:
    sandbox_id = (await world.place({"llm": LLM})).sandbox_id
    codes = await world.codes(
        sandbox_id,
        model_call(max_tokens=51),
        model_call(model="larger"),
        model_call(max_tokens=0),
        model_call(options={"n": 100}),
        model_call(options={"max_completion_tokens": 10_000}),
        model_call(options={"model": "larger"}),
        model_call(base_url="http://evil.example"),
        model_call(messages=[]),
        {**model_call(), "tool": "llm_summarizer"},
        NOWHERE,
    )
    assert codes == ["denied"] * 2 + ["invalid"] * 6 + ["denied"] * 2
    assert model.asked == []
    fine, busy, broken = await world.say(
        sandbox_id,
        model_call(),
        model_call(messages=[{"role": "user", "content": "busy"}]),
        model_call(messages=[{"role": "user", "content": "broken"}]),
    )
    assert fine["result"]["tokens_out"] == 7
    assert json.loads(model.asked[0].body)["max_tokens"] == 50
    assert (busy["error"]["code"], busy["error"]["retry_after_s"]) == ("exhausted", 7.0)
    assert broken["error"]["code"] == "unavailable"
    assert SECRET not in json.dumps([fine, busy, broken])


async def test_a_rate_outlives_the_daemon_and_a_fork_has_its_parents_tools(
    world: World, model: Web
) -> None:
    twice = ToolTerms(model="m", max_tokens=50, rate_limit=Rate(count=2, window_s=3600))
    sandbox_id = (await world.place({"llm": twice})).sandbox_id
    assert await world.codes(sandbox_id, *[model_call()] * 2) == ["ok", "ok"]
    await world.daemon.kill()
    await world.daemon.start()
    hello, refused = await world.say(sandbox_id, HELLO, model_call())
    assert hello["result"]["tools"] == ["llm"]
    assert refused["error"]["code"] == "exhausted"
    assert len(model.asked) == 2
    forked = await world.node.ask(sandbox_id, "fork", ForkSandbox(count=1), SandboxForked)
    assert forked.children[0].created is not None
    child = forked.children[0].created.sandbox_id
    assert await world.codes(child, *[model_call()] * 3) == ["ok", "ok", "exhausted"]


async def test_a_policy_takes_a_tools_network_away_while_it_runs(world: World) -> None:
    sandbox_id = (
        await world.place({"http_client": HTTP}, agent="bot", agent_version="1")
    ).sandbox_id
    reached = {"unavailable", "timeout"}  # it was let through, and nobody is there
    assert set(await world.codes(sandbox_id, NOWHERE)) <= reached
    await world.govern(1, AgentPolicy(revoked=("network_access",)))
    assert await world.codes(sandbox_id, NOWHERE) == ["denied"]
    inside = NetworkPolicy(mode=NetworkMode.ALLOW)
    await world.govern(2, AgentPolicy(network=inside))
    assert await world.codes(sandbox_id, NOWHERE) == ["denied"]
    await world.govern(3, AgentPolicy())
    assert set(await world.codes(sandbox_id, NOWHERE)) <= reached


async def test_a_policy_that_takes_a_tools_network_away_ends_its_calls(world: World) -> None:
    placed = await world.place({"http_client": HTTP}, agent="bot", agent_version="1")
    slow = {**NOWHERE, "arguments": {"url": "http://192.0.2.1/", "timeout_s": 60.0}}
    asking = asyncio.create_task(world.codes(placed.sandbox_id, slow))
    # All its places are taken when one more is refused: so many are under way.
    others = [asyncio.create_task(world.codes(placed.sandbox_id, slow)) for _ in range(4)]
    done, under_way = await asyncio.wait({asking, *others}, return_when=asyncio.FIRST_COMPLETED)
    assert [one.result() for one in done] == [["exhausted"]]
    await world.govern(1, AgentPolicy(revoked=("network_access",)))
    async with asyncio.timeout(20):
        assert await asyncio.gather(*under_way) == [["denied"]] * 4


async def test_a_node_without_a_model_server_says_so(tmp_path: Path, layers: Path) -> None:
    async with daemon_for_tests(tmp_path, layers) as (daemon, node):
        world = World(daemon, node)
        sandbox_id = (await world.place({"llm": LLM, "http_client": HTTP})).sandbox_id
        hello, refused = await world.say(sandbox_id, HELLO, model_call())
        assert hello["result"]["tools"] == ["http_client"]
        assert refused["error"]["code"] == "unsupported"
        plain = (await node.place()).sandbox_id
        hello, refused = await world.say(plain, HELLO, NOWHERE)
        assert hello["result"]["tools"] == []
        assert refused["error"]["code"] == "denied"
