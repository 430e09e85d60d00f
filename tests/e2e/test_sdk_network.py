"""Network policies and tunnels through the whole platform."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket

import pytest

from dsec import DsecError, ErrorCode, NetworkMode, Sandbox, sync
from dsec_common.wire.network import NetworkPhase
from stack import Stack, environment

pytestmark = pytest.mark.usefixtures("router")

MIB = 1024 * 1024

#: Echoes what it is sent; at the end of it says so, and ends.
ECHO = """
import socket, sys, threading
server = socket.create_server((sys.argv[1], 8080))
open('/tmp/listening', 'w').close()
def serve(one):
    total = 0
    while data := one.recv(1 << 16):
        total += len(data)
        one.sendall(data)
    one.sendall(b'end %d' % total)
    one.close()
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""


async def _start_echo(sandbox: Sandbox, host: str = "127.0.0.1") -> None:
    await sandbox.write_file("/tmp/echo.py", ECHO)
    await sandbox.exec(f"python3 /tmp/echo.py {host} >/dev/null 2>&1 & :", check=True)
    await sandbox.exec("until [ -e /tmp/listening ]; do sleep 0.02; done", timeout_s=20, check=True)


async def test_a_tunnel_carries_many_connections_into_a_sandbox_without_a_network(
    stack: Stack, base: str
) -> None:
    async with stack.client() as client, await client.create_sandbox(base) as sandbox:
        await _start_echo(sandbox)
        async with await sandbox.forward(8080) as tunnel:

            async def talk(number: int) -> bytes:
                reader, writer = await asyncio.open_connection("127.0.0.1", tunnel.local_port)
                writer.write(b"hello %d" % number)
                writer.write_eof()
                said = await reader.read()
                writer.close()
                await writer.wait_closed()
                return said

            said = await asyncio.gather(*(talk(number) for number in range(20)))
        assert said == [b"hello %d" % n + b"end %d" % len(b"hello %d" % n) for n in range(20)]


async def test_forwarding_on_the_command_line_ends_with_its_sandbox(
    stack: Stack, base: str
) -> None:
    async with stack.client() as client, await client.create_sandbox(base) as sandbox:
        await _start_echo(sandbox)
        command = stack.command("--json", "network", "forward", sandbox.id, "8080")
        forwarding = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment(),
        )
        assert forwarding.stdout is not None
        local = json.loads(await forwarding.stdout.readline())["local"]
        reader, writer = await asyncio.open_connection(*local.split(":"))
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        await sandbox.delete()
        async with asyncio.timeout(30):
            _, said = await forwarding.communicate()
        writer.close()
        assert forwarding.returncode == 1
        assert json.loads(said)["error"]["code"] == "expired"
        again = stack.dsec("network", "forward", sandbox.id, "8080", check=False)
        assert again.returncode == 1
        assert "has ended (deleted)" in again.stderr


async def test_a_stream_carries_megabytes_both_ways_at_once(stack: Stack, base: str) -> None:
    data = os.urandom(8 * MIB + 17)
    async with stack.client() as client, await client.create_sandbox(base) as sandbox:
        await _start_echo(sandbox, "0.0.0.0")  # noqa: S104  inside the sandbox
        async with await sandbox.open_port(8080) as stream:

            async def send() -> None:
                await stream.write(data)
                await stream.write_eof()

            sending = asyncio.create_task(send())
            received = bytearray()
            while piece := await stream.read():
                received += piece
            await sending
    assert received[len(data) :] == b"end %d" % len(data)
    assert hashlib.sha256(received[: len(data)]).digest() == hashlib.sha256(data).digest()


async def test_what_does_not_listen_or_may_not_be_asked_is_told(stack: Stack, base: str) -> None:
    async with stack.client() as client, await client.create_sandbox(base) as sandbox:
        with pytest.raises(DsecError, match="nothing takes connections") as caught:
            await sandbox.open_port(4242)
        assert caught.value.code is ErrorCode.UNAVAILABLE
        for host in ("8.8.8.8", "100.96.0.1", "169.254.169.254", "localhost", "0.0.0.0", "::"):  # noqa: S104
            with pytest.raises(DsecError) as caught:
                await sandbox.open_port(80, host=host)
            assert caught.value.code is ErrorCode.INVALID
        for port in (0, -1, 65536):
            with pytest.raises(DsecError) as caught:
                await sandbox.open_port(port)
            assert caught.value.code is ErrorCode.INVALID
            with pytest.raises(DsecError) as caught:
                await sandbox.forward(port)
            assert caught.value.code is ErrorCode.INVALID
        with pytest.raises(DsecError) as caught:
            await sandbox.forward(4242, local_port=65536)
        assert caught.value.code is ErrorCode.INVALID
        async with await sandbox.forward(4242) as tunnel:
            reader, writer = await asyncio.open_connection("127.0.0.1", tunnel.local_port)
            with pytest.raises(ConnectionError):
                assert await reader.read() == b"never"
            writer.close()


async def test_a_service_that_does_not_read_holds_its_sender_back(stack: Stack, base: str) -> None:
    code = "import socket,time; s=socket.create_server(('',8080)); open('/tmp/l','w'); c=s.accept()[0]; time.sleep(60)"  # noqa: E501
    async with stack.client() as client, await client.create_sandbox(base) as sandbox:
        await sandbox.write_file("/tmp/s.py", code)
        await sandbox.exec(
            "python3 /tmp/s.py >/dev/null 2>&1 & until [ -e /tmp/l ]; do sleep 0.02; done"
        )
        async with await sandbox.open_port(8080) as stream:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2.0):
                    await stream.write(bytes(256 * MIB))
            assert stream._write_offset < 64 * MIB
            assert (await sandbox.exec("echo fine", check=True)).stdout_text == "fine\n"


async def test_too_many_connections_are_refused_and_room_comes_back(
    stack: Stack, base: str
) -> None:
    async with stack.client() as client, await client.create_sandbox(base) as sandbox:
        await _start_echo(sandbox)
        streams = [await sandbox.open_port(8080) for _ in range(64)]
        with pytest.raises(DsecError, match="64 connections") as caught:
            await sandbox.open_port(8080)
        assert caught.value.code is ErrorCode.EXHAUSTED
        await streams.pop().close()
        streams.append(await sandbox.open_port(8080))
        for stream in streams:
            await stream.close()


async def test_neither_another_sandbox_nor_another_project_reaches_a_connection(
    stack: Stack, base: str
) -> None:
    stack.dsec("project", "create", "curious")
    try:
        async with (
            stack.client() as client,
            stack.client("curious") as stranger,
            await client.create_sandbox(base) as sandbox,
            await client.create_sandbox(base) as neighbour,
        ):
            await _start_echo(sandbox)
            async with await sandbox.open_port(8080) as stream:
                for forged in (
                    type(stream)(client._connected(), neighbour._scoped, stream._id),
                    type(stream)(stranger._connected(), sandbox._scoped, stream._id),
                ):
                    for attempt in (forged.read, lambda it=forged: it.write(b"evil")):
                        with pytest.raises(DsecError) as caught:
                            await attempt()
                        assert caught.value.code is ErrorCode.NOT_FOUND
                    await forged.close()
                await stream.write(b"x")
                assert await stream.read() == b"x"
    finally:
        stack.dsec("project", "rm", "curious")


async def test_the_end_of_a_sandbox_ends_its_connections(stack: Stack, base: str) -> None:
    async with stack.client() as client:
        sandbox = await client.create_sandbox(base)
        await _start_echo(sandbox)
        stream = await sandbox.open_port(8080)
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(0.05)
        await sandbox.delete()
        with pytest.raises(DsecError) as caught:
            await reading
        assert caught.value.code in {ErrorCode.UNAVAILABLE, ErrorCode.EXPIRED}
        await stream.close()


async def test_a_policy_is_given_inspected_changed_and_followed(stack: Stack, base: str) -> None:
    probe = "python3 -c \"import socket; socket.create_connection(('10.77.0.1', 80), 1)\" 2>&1"
    ask = "python3 -c \"import socket; socket.getaddrinfo('nowhere.example', 80)\""
    async with (
        stack.client() as client,
        await client.create_sandbox(
            base,
            setup_network={"allow": ["10.0.0.0/8:443/tcp"]},
            network="none",
        ) as sandbox,
    ):
        info = await sandbox.network.inspect()
        assert (info.phase, info.policy.mode) == (NetworkPhase.SETUP, NetworkMode.ALLOW)
        assert len(info.addresses) == 2
        assert (await sandbox.exec(probe)).exit_code == 1
        info = await sandbox.network.set({"allow": ["10.0.0.0/8"], "deny": ["10.77.0.0/16"]})
        assert info.policy.deny[0].cidr == "10.77.0.0/16"
        info = await sandbox.network.enter_agent_phase()
        assert (info.phase, info.policy.mode) == (NetworkPhase.AGENT, NetworkMode.NONE)
        assert (await sandbox.exec(probe)).exit_code == 1
        assert (await sandbox.exec(ask)).exit_code != 0
        assert (await sandbox.network.inspect()).denied_packets >= 1
        resolv = await sandbox.read_text("/etc/resolv.conf")
        assert resolv.startswith("nameserver 100.96.0.1\n")


async def test_wrong_policies_are_refused_before_anything_starts(stack: Stack, base: str) -> None:
    async with stack.client() as client:
        before = {it.sandbox_id for it in await client.list_sandboxes(include_ended=True)}
        for policy in (
            {"allow": ["10.0.0.0/99"]},
            {"allow": ["example.org:0"]},
            {"mode": "open", "allow": ["10.0.0.1"]},
            {"allow": [{"cidr": "10.0.0.1", "host": "a.example"}]},
            {"allow": ["10.0.0.1"] * 257},
        ):
            with pytest.raises(DsecError) as caught:
                await client.create_sandbox(base, network=policy)
            assert caught.value.code is ErrorCode.INVALID, policy
        # What ended long ago may be forgotten meanwhile.
        after = {it.sandbox_id for it in await client.list_sandboxes(include_ended=True)}
        assert after <= before


def test_the_sync_sdk_and_the_command_line_do_the_same(stack: Stack, base: str) -> None:
    with (
        sync.DSecClient(stack.context.nats_servers, stack.context.credentials) as client,
        client.create_sandbox(base, network={"allow": ["10.2.0.0/16"]}) as sandbox,
    ):
        assert sandbox.network.inspect().policy.mode is NetworkMode.ALLOW
        sandbox.write_file("/tmp/echo.py", ECHO)
        sandbox.exec("python3 /tmp/echo.py 127.0.0.1 >/dev/null 2>&1 & :")
        sandbox.exec("until [ -e /tmp/listening ]; do sleep 0.02; done")
        with (
            sandbox.forward(8080) as tunnel,
            socket.create_connection(("127.0.0.1", tunnel.local_port)) as one,
        ):
            one.sendall(b"hello")
            assert one.recv(5) == b"hello"
        with sandbox.open_port(8080) as stream:
            stream.write(b"hi")
            assert stream.read() == b"hi"
        rule = "10.1.0.0/16:443/tcp"
        shown = stack.dsec_json("network", "set", sandbox.id, "--allow", rule)
        assert shown["policy"]["allow"][0]["ports"] == "443"
        assert rule in stack.dsec("network", "inspect", sandbox.id).stdout
        assert stack.dsec_json("network", "agent-phase", sandbox.id)["phase"] == "agent"
