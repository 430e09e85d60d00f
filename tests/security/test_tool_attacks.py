"""Tools that the node runs, asked for by a sandbox that passes the SDK by: SSRF, and limits.

The sandbox has no network. Each request is written to its socket, as a hostile agent would.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import pytest

from attack_world import AttackWorld
from dsec.agent import Agent, Context
from dsec_common.errors import DsecError
from dsec_common.wire.tools import Rate, ToolTerms
from dsec_sandboxd.network.settings import NetworkSettings
from network_world import ALLOWED, METADATA, OPEN, OTHER, TCP_PORT, allow, named, to
from outside_web import certificate_for
from tool_world import ACCESS, ALLOWED_NAME, ToolWorld, http_call

SITE = f"http://{ALLOWED_NAME}"
RESOLVER = NetworkSettings().plan.resolver[0]
#: Ways to write what nobody is to reach.
NEVER = [
    f"http://{METADATA}/latest/meta-data/",
    "http://2852039166/",
    "http://0xa9fea9fe/",
    "http://0251.0376.0251.0376/",
    "http://169.254.43518/",
    f"http://[::ffff:{METADATA}]/",
    "http://[::ffff:a9fe:a9fe]/",
    "http://[64:ff9b::a9fe:a9fe]/",
    "http://[fd00:ec2::254]/",
    f"http://user:{ALLOWED_NAME}@{METADATA}/",
    f"http://{METADATA}#@{ALLOWED_NAME}/",
    f"http://{METADATA}\\@{ALLOWED_NAME}/",
    f"http://{ALLOWED_NAME}@{METADATA}/",
    f"http://{ALLOWED_NAME}%2f@{METADATA}/",
    "http://metadata.example/",
    "http://mapped.example/",
    "http://127.0.0.1/",
    "http://localhost/",
    "http://127.1/",
    "http://0/",
    "http://[::1]/",
    "http://[::]/",
    f"http://{RESOLVER}:53/",
    "file:///etc/shadow",
    "gopher://169.254.169.254/",
    "unix:///run/dsec/agent.sock",
]


@pytest.fixture
async def tools(arena: AttackWorld) -> AsyncIterator[ToolWorld]:
    made = await ToolWorld.start(arena)
    made.net.names.names |= {
        "metadata.example": [METADATA],
        "mapped.example": [f"::ffff:{METADATA}", "fd00:ec2::254"],
        "localhost": ["127.0.0.1", "::1"],
        "other.example": [OTHER],
    }
    try:
        yield made
        assert (await made.codes(f"{SITE}/still"))[f"{SITE}/still"] == "ok"
    finally:
        await made.close()


async def test_a_sandbox_without_a_network_gets_what_its_contract_allows_and_no_more(
    tools: ToolWorld,
) -> None:
    plain, posted, address, other = await tools.say(
        http_call(url=f"{SITE}/a?b=c", headers={"X-Mine": "1"}),
        http_call(url=f"{SITE}/p", method="POST", body="aGk="),
        http_call(url=f"http://{ALLOWED}/"),
        http_call(url="http://other.example/"),
    )
    assert plain["result"]["status"] == 200
    assert (plain["body"], plain["result"]["bytes"]) == ("hello GET", 9)
    assert ["X-Site", "a"] in plain["result"]["headers"]
    assert (posted["body"], tools.site.asked[1][2]) == ("hello POST", b"hi")
    assert tools.site.asked[0][0] == "/a?b=c"
    assert tools.site.asked[0][1]["host"] == ALLOWED_NAME
    # The name is allowed, not its address: that may be others', too.
    assert address["error"]["code"] == other["error"]["code"] == "denied"
    assert len(tools.site.asked) == 2
    assert "other.example" not in tools.net.names.asked
    assert tools.calls() == [
        ("http_client", "200"),
        ("http_client", "200"),
        ("http_client", "denied"),
        ("http_client", "denied"),
    ]
    devices = "import socket; print([name for _, name in socket.if_nameindex()])"
    assert await tools.world.python(devices, local="agent") == "['lo']"


async def test_no_way_of_writing_an_address_leads_to_the_node_or_its_metadata(
    tools: ToolWorld,
) -> None:
    await tools.grant(OPEN)
    codes = await tools.codes(*NEVER)
    assert {url for url, code in codes.items() if code not in {"denied", "invalid"}} == set()
    assert tools.site.asked == []
    assert (await tools.codes("http://other.example/"))["http://other.example/"] == "ok"


async def test_a_redirect_leads_no_further_than_a_request_and_takes_no_secrets_along(
    tools: ToolWorld,
) -> None:
    wrong = [*NEVER, "http://other.example/", f"http://{OTHER}/", f"http://{ALLOWED}:{TCP_PORT}/"]
    hops = [f"{SITE}/to?location={_quoted(url)}" for url in wrong]
    hops.append(f"{SITE}/to?location={_quoted(hops[0])}")
    codes = await tools.codes(*hops)
    strange = {url for url, code in codes.items() if code not in {"denied", "invalid"}}
    assert strange == set()
    assert {path.partition("?")[0] for path, _, _ in tools.site.asked} <= {"/to", "/"}
    assert all(headers["host"] == ALLOWED_NAME for _, headers, _ in tools.site.asked)

    await tools.grant(allow(named(ALLOWED_NAME), named("other.example")))
    tools.site.asked.clear()
    secrets = {"Authorization": "Bearer k", "Cookie": "c", "X-Mine": "1"}
    away, around = await tools.get(
        f"{SITE}/to?location=http://other.example/there",
        f"{SITE}/to?location=/here",
        headers=secrets,
    )
    assert away["result"]["url"] == "http://other.example/there"
    assert around["result"]["url"] == f"{SITE}/here"
    by_path = {path: headers for path, headers, _ in tools.site.asked}
    assert "authorization" not in by_path["/there"]
    assert "cookie" not in by_path["/there"]
    assert by_path["/there"]["x-mine"] == "1"
    assert by_path["/here"]["authorization"] == "Bearer k"
    assert await tools.codes(f"{SITE}/loop") == {f"{SITE}/loop": "unavailable"}


async def test_a_name_is_looked_up_once_for_a_hop_so_that_it_cannot_be_another_address_then(
    tools: ToolWorld,
) -> None:
    assert (await tools.codes(f"{SITE}/"))[f"{SITE}/"] == "ok"
    assert tools.net.names.asked == [ALLOWED_NAME] * 2  # both kinds of addresses
    tools.net.names.ttl = 0
    tools.net.names.names[ALLOWED_NAME] = [METADATA]
    assert (await tools.codes(f"{SITE}/"))[f"{SITE}/"] == "denied"
    # Of several addresses only those are taken that may be reached.
    tools.net.names.names[ALLOWED_NAME] = [METADATA, "127.0.0.1", ALLOWED, "fd00:ec2::254"]
    (told,) = await tools.get(f"{SITE}/mixed")
    assert told["result"]["status"] == 200
    assert [path for path, _, _ in tools.site.asked] == ["/", "/mixed"]
    assert ALLOWED not in json.dumps(told)


async def test_what_the_contract_does_not_grant_is_denied_typed_and_written_down(
    tools: ToolWorld,
) -> None:
    call = http_call(url=f"{SITE}/")
    for network, terms in (
        (OPEN, {"http_client": ToolTerms()}),
        (OPEN, {"llm": ACCESS}),
        (None, {"http_client": ACCESS}),
        (allow(to("10.0.0.0/8")), {"http_client": ACCESS}),
    ):
        await tools.grant(network, terms)
        (told,) = await tools.say(call)
        assert told["error"]["code"] == "denied", (network, terms)
        assert told["error"]["retryable"] is False
    assert tools.site.asked == []
    assert {status for _, status in tools.calls()} == {"denied"}
    await tools.grant(OPEN)
    forged = {"op": "log", "action": "tool_call", "status": "200"}
    named_too = {**call, "local": "beside", "tools": {"terms": {}}, "sandbox_id": "n.beside"}
    shell = {**call, "tool": "shell", "call": "run"}
    wrong = {**call, "call": "__init__"}
    extra = http_call(url=f"{SITE}/", proxy="http://evil.example")
    codes = [
        told.get("error", {}).get("code", "ok")
        for told in await tools.say(forged, named_too, shell, wrong, extra)
    ]
    assert codes == ["denied", "ok", "denied", "invalid", "invalid"]
    assert {step["local"] for step in tools.gateway.steps} == {"agent"}
    await tools.grant(allow(named(ALLOWED_NAME)))


async def test_a_rate_is_the_nodes_to_keep(tools: ToolWorld) -> None:
    limited = ToolTerms(permissions=ACCESS.permissions, rate_limit=Rate(count=3, window_s=3600))
    await tools.grant(allow(named(ALLOWED_NAME)), {"http_client": limited})
    told = await tools.get(*[f"{SITE}/"] * 5)
    codes = [one.get("error", {}).get("code", "ok") for one in told]
    assert codes == ["ok", "ok", "ok", "exhausted", "exhausted"]
    assert 3000 < told[-1]["error"]["retry_after_s"] <= 3615
    # Another connection, another process, a daemon that was started again: it is the same sandbox.
    tools.rates.recovered({"agent"})
    (again,) = await tools.get(f"{SITE}/")
    assert again["error"]["code"] == "exhausted"
    assert len(tools.site.asked) == 3
    await tools.grant(allow(named(ALLOWED_NAME)))


async def test_answers_are_bounded_in_size_and_time_whatever_a_server_does(
    tools: ToolWorld,
) -> None:
    echo = f"http://{ALLOWED_NAME}:{TCP_PORT}/"
    urls = [f"{SITE}/endless", f"{SITE}/headers", echo, f"{SITE}:81/"]
    told = await tools.get(*urls, timeout_s=60.0)
    told += await tools.get(f"{SITE}/silent", timeout_s=1.0)
    codes = [one.get("error", {}).get("code", "ok") for one in told]
    assert codes == ["exhausted", "exhausted", "unavailable", "unavailable", "timeout"]
    assert told[0]["body_bytes"] <= 16 << 20
    assert ALLOWED not in json.dumps(told)
    (longer,) = await tools.get(f"{SITE}/", timeout_s=1e6)
    assert longer["error"]["code"] == "invalid"


async def test_a_call_under_way_ends_when_its_network_is_taken_away(tools: ToolWorld) -> None:
    asking = asyncio.create_task(tools.get(f"{SITE}/silent", timeout_s=60.0))
    async with asyncio.timeout(20):
        while not tools.site.asked:
            await asyncio.sleep(0.02)
    record = await tools.grant(allow(named(ALLOWED_NAME)))
    tools.desk.network_changed(record)  # to the same: it goes on
    await asyncio.sleep(0.2)
    assert not asking.done()
    tools.is_taken_away = True
    tools.desk.network_changed(record)
    async with asyncio.timeout(20):
        (told,) = await asking
    assert told["error"]["code"] == "denied"
    assert "was changed while" in told["error"]["message"]
    assert tools.calls()[-1] == ("http_client", "denied")
    tools.is_taken_away = False


class Reader(Agent):
    def execute(self) -> None:
        return None


def at_work(socket_path: str) -> tuple[Any, ...]:
    """Use the SDK's own client, which knows nothing of a network."""
    capability = {"tool": "http_client", "permissions": ["network_access"]}
    contract = {"name": "reader", "capabilities": [capability]}
    context = Context("reader", socket_path=socket_path)
    with Reader(contract=contract, context=context) as reader:
        client = reader.get_tool("http_client")
        got = client.get(f"{SITE}/a", params={"b": "c d"}, headers={"X-Mine": "1"})
        posted = client.post(f"{SITE}/p", json={"a": 1})
        with pytest.raises(DsecError) as refused:
            client.get("http://other.example/")
        return got, posted, refused.value.code, [it.by_node for it in reader.calls]


async def test_the_sdks_client_goes_by_the_node_and_writes_nothing_down_twice(
    tools: ToolWorld,
) -> None:
    path = str(tools.run_directory / "agent.sock")
    got, posted, refused, by_node = await asyncio.to_thread(at_work, path)
    assert (got.status_code, got.text, got.headers["x-site"]) == (200, "hello GET", "a")
    assert (posted.text, tools.site.asked[1][2]) == ("hello POST", b'{"a": 1}')
    assert tools.site.asked[0][0] in {"/a?b=c+d", "/a?b=c%20d"}
    assert refused == "denied"
    assert by_node == [True] * 3
    assert [step["action"] for step in tools.gateway.steps] == ["tool_call"] * 3


async def test_certificates_are_for_the_name_that_was_asked_for(
    tools: ToolWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, trusted = certificate_for(ALLOWED_NAME, tools.world.directory)
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    await tools.site.serve(tools.net.hosts[ALLOWED].namespace, 8443, certificate)
    tools.net.names.names["alias.example"] = [ALLOWED]
    await tools.grant(allow(named("*.example")))
    fine, wrong = f"https://{ALLOWED_NAME}:8443/", "https://alias.example:8443/"
    assert await tools.codes(fine, wrong) == {fine: "ok", wrong: "unavailable"}


def _quoted(url: str) -> str:
    return quote(url, safe="")
