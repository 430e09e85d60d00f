"""A node's daemon is killed: policies hold while it is away, and its successor takes them over."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from dsec import DsecError, Sandbox, sync
from dsec.stack.layout import Layout
from network_world import ALLOWED, ALLOWED6, OTHER, OTHER6, TCP_PORT, Host
from stack import Stack

#: Tries both hosts for as long as it is left to, and counts what came of it.
WATCHER = f"""
import collections, json, os, socket, time
seen = collections.Counter()
while not os.path.exists('/tmp/stop'):
    for host in ({ALLOWED!r}, {OTHER!r}):
        try:
            socket.create_connection((host, {TCP_PORT}), 1).close()
            seen[host + ' reached'] += 1
        except OSError:
            seen[host + ' refused'] += 1
    with open('/tmp/seen.new', 'w') as file:
        json.dump(seen, file)
    os.rename('/tmp/seen.new', '/tmp/seen')
    time.sleep(0.01)
"""


@pytest.fixture(scope="module", autouse=True)
def _router(stack: Stack, base: str) -> None:
    """Have the node's router made before the test: it stays, mounted, as long as the daemon."""
    with (
        sync.DSecClient(stack.context.nats_servers, stack.context.credentials) as client,
        client.create_sandbox(base, network={"allow": ["10.0.0.0/8"]}),
    ):
        pass


def _pid_of(stack: Stack, part: str) -> int:
    """Return the process that is the part now, or 0 while it is started again."""
    record = json.loads((stack.directory / "supervisor.json").read_text())
    process = next(found["process"] for found in record["parts"] if found["name"] == part)
    return int(process["pid"]) if process else 0


async def _reaches(sandbox: Sandbox, host: str) -> bool:
    code = f"import socket; socket.create_connection(({host!r}, {TCP_PORT}), 1)"
    return (await sandbox.exec(["python3", "-c", code])).exit_code == 0


async def _answering(sandbox: Sandbox) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                await sandbox.exec("true", timeout_s=5)
            except DsecError:
                await asyncio.sleep(0.1)
            else:
                return


async def test_a_killed_daemon_leaves_the_policies_in_force_and_its_successor_changes_them(
    stack: Stack, base: str
) -> None:
    (node,) = stack.node_names
    part = f"sandboxd-{node}"
    hosts = [Host(0, ALLOWED, ALLOWED6), Host(1, OTHER, OTHER6)]
    router = Path(Layout(stack.directory).run) / node / "network" / "router"
    async with stack.client() as client:
        try:
            for host in hosts:
                host.connect_to(router)
                await host.serve()
            async with await client.create_sandbox(base, network={"allow": [ALLOWED]}) as sandbox:
                await sandbox.write_file("/tmp/watch.py", WATCHER)
                await sandbox.exec("python3 /tmp/watch.py >/dev/null 2>&1 &")
                assert await _reaches(sandbox, ALLOWED)
                assert not await _reaches(sandbox, OTHER)
                pid = _pid_of(stack, part)
                os.kill(pid, signal.SIGKILL)
                async with asyncio.timeout(30):
                    while _pid_of(stack, part) in {0, pid}:
                        await asyncio.sleep(0.02)
                await _answering(sandbox)
                await sandbox.exec("touch /tmp/stop")
                assert (await sandbox.network.inspect()).policy.allow[0].cidr == ALLOWED
                assert await _reaches(sandbox, ALLOWED)
                assert not await _reaches(sandbox, OTHER)
                await sandbox.network.set({"allow": [OTHER]})
                assert not await _reaches(sandbox, ALLOWED)
                assert await _reaches(sandbox, OTHER)
                seen = json.loads(await sandbox.read_text("/tmp/seen"))
                assert seen[f"{ALLOWED} reached"] > 0
                assert f"{OTHER} reached" not in seen
                assert seen.get(f"{ALLOWED} refused", 0) == 0
        finally:
            for host in hosts:
                await host.close()
