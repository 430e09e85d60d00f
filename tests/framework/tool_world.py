"""Tools that a node runs, in a test: a site behind the router, and sandboxes that speak for tools.

The sandboxes have no network, and nothing of the SDK: what they ask they write to their sockets.
"""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web

from agent_world import NODE, MemoryGateway, sandbox_record
from dsec_common.clock import SystemClock
from dsec_common.wire.network import NetworkPolicy
from dsec_common.wire.tools import NodeTools, ToolTerms
from dsec_sandboxd.agent_socket import AgentSocketServer
from dsec_sandboxd.network import namespaces
from dsec_sandboxd.network.outgoing import Outgoing
from dsec_sandboxd.network.settings import NetworkSettings
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.state_database import StateDatabase
from dsec_sandboxd.tools.desk import ToolDesk
from dsec_sandboxd.tools.rates import CallRates
from kernel_world import MIB, World
from network_world import ALLOWED, NetworkWorld, allow, named

ALLOWED_NAME: Final = "site.example"
LOCAL: Final = "agent"
ACCESS: Final = ToolTerms(permissions=("network_access",))
#: Speaks the agent protocol and prints what it is answered, each call's on a line.
SPEAK: Final = """
import base64, json, os, socket, struct
def exactly(of, size):
    data = b''
    while len(data) < size:
        more = of.recv(size - len(data))
        if not more: raise EOFError(len(data))
        data += more
    return data
to = socket.socket(socket.AF_UNIX); to.settimeout(30); to.connect('/run/dsec/agent.sock')
for request in json.loads(os.environ['REQUESTS']):
    body = json.dumps(dict(request, id=7)).encode()
    to.sendall(struct.pack('>I', len(body)) + body)
    parts = b''
    while True:
        told = json.loads(exactly(to, struct.unpack('>I', exactly(to, 4))[0]))
        assert told['id'] == 7, told
        if 'part' not in told: break
        parts += base64.b64decode(told['part'])
    told['body'] = parts[:200].decode('latin-1'); told['body_bytes'] = len(parts)
    print(json.dumps(told))
"""


class Site:
    """A web server with the address of a host behind the router."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str], bytes]] = []
        self._runners: list[web.ServerRunner] = []

    async def serve(
        self, namespace: int, port: int = 80, certificate: ssl.SSLContext | None = None
    ) -> None:
        """Listen in a namespace on all its addresses."""
        one = namespaces.make_in(namespace, socket.socket)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("0.0.0.0", port))  # noqa: S104  of a namespace of its own
        runner = web.ServerRunner(web.Server(self._answer), shutdown_timeout=0.1)
        self._runners.append(runner)
        await runner.setup()
        await web.SockSite(runner, one, ssl_context=certificate).start()

    async def close(self) -> None:
        for runner in self._runners:
            await runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append((request.path_qs, headers, await request.read()))
        match request.path:
            case "/to":
                location = request.query["location"]
                status = int(request.query.get("status", "302"))
                return web.Response(status=status, headers={"Location": location}, text="moved")
            case "/loop":
                return web.Response(status=302, headers={"Location": "/loop"})
            case "/endless":
                answer = web.StreamResponse()
                await answer.prepare(request)
                while True:
                    await answer.write(b"x" * 65536)
            case "/silent":
                answer = web.StreamResponse()
                await answer.prepare(request)
                await answer.write(b"x")
                while request.transport is not None:
                    await SystemClock().sleep(0.05)
                return answer
            case "/headers":
                many = {f"X-{number}": "y" * 4000 for number in range(20)}
                return web.Response(headers=many)
            case _:
                return web.Response(text=f"hello {request.method}", headers={"X-Site": "a"})


class ToolWorld:
    """A sandbox without a network, and the tools that its node runs for it."""

    def __init__(self, world: World, net: NetworkWorld, settings: NetworkSettings) -> None:
        self.world = world
        self.net = net
        self.is_taken_away = False
        self.gateway = MemoryGateway()
        self.site = Site()
        self.database = StateDatabase(world.directory / "tool-state")
        self.rates = CallRates(self.database, SystemClock().monotonic)
        self.desk = ToolDesk(
            Outgoing(net.networks, settings, net.directory / "router"),
            None,
            self.rates,
            SystemClock(),
            network_of=self._network_of,
            log=self.gateway.log,
        )
        self.server = AgentSocketServer(self.gateway, NODE)
        self.server.run_tools(self.desk)

    @classmethod
    async def start(cls, world: World) -> ToolWorld:
        """Return one with a host that is allowed, one that is not, and a metadata service."""
        net = await NetworkWorld.start(world)
        net.names.names[ALLOWED_NAME] = [ALLOWED]
        made = cls(world, net, net.settings)
        for host in net.hosts.values():
            await made.site.serve(host.namespace)
        world.directory.joinpath(LOCAL).mkdir()
        await world.create(LOCAL, memory_bytes=64 * MIB, run_directory=world.directory / LOCAL)
        await made.grant(allow(named(ALLOWED_NAME)))
        return made

    def _network_of(self, record: SandboxRecord) -> NetworkPolicy | None:
        return record.tools.network if record.tools and not self.is_taken_away else None

    @property
    def run_directory(self) -> Path:
        """Where the sandbox's socket is."""
        return self.world.directory / LOCAL

    async def grant(
        self, network: NetworkPolicy | None, terms: Mapping[str, ToolTerms] | None = None
    ) -> SandboxRecord:
        """Have the sandbox be of another contract."""
        tools = NodeTools(terms=dict(terms or {"http_client": ACCESS}), network=network)
        record = msgspec.structs.replace(sandbox_record(LOCAL, ""), tools=tools)
        await self.server.open(record, self.run_directory)
        return record

    async def say(self, *requests: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Have the sandbox send requests, one after the other; return the answers."""
        told = await self.world.python(
            SPEAK, local=LOCAL, env={"REQUESTS": json.dumps(list(requests))}
        )
        return [json.loads(line) for line in told.splitlines()]

    async def get(self, *urls: str, **more: Any) -> list[dict[str, Any]]:
        """Have the sandbox ask for addresses by ``http_client``; return the answers."""
        return await self.say(*(http_call(url=url, **more) for url in urls))

    async def codes(self, *urls: str, **more: Any) -> dict[str, str]:
        """Return ``ok``, or the code of the refusal, of each address."""
        answers = await self.get(*urls, **more)
        return {
            url: told["error"]["code"] if "error" in told else "ok"
            for url, told in zip(urls, answers, strict=True)
        }

    def calls(self) -> list[tuple[str, str]]:
        """Return the calls that the node has written down, each with its status."""
        return [
            (step["attributes"]["tool"], step["status"])
            for step in self.gateway.steps
            if step["action"] == "tool_call"
        ]

    async def close(self) -> None:
        await self.server.aclose()
        await self.site.close()
        await self.net.close()
        self.database.close()


def http_call(**arguments: Any) -> dict[str, Any]:
    """Return the request of a call."""
    return {"op": "tool", "tool": "http_client", "call": "request", "arguments": arguments}
