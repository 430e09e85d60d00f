"""`dsec up` on a machine with a default route: sandboxes get outside, and the machine gets back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from outside_world import MACHINE, OTHER, PYPI, PYPI6, UPLINK, Outside, StackOutside

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root"),
    pytest.mark.timeout(300),
]

FORWARDING = f"/proc/sys/net/ipv4/conf/{UPLINK}/forwarding"
PROBE = """
import socket, sys
for where in sys.argv[1:]:
    try:
        with socket.create_connection((where, 443), 3) as one:
            one.sendall(b'hello')
            print(where, one.getpeername()[0] if one.recv(5) == b'hello' else 'cut')
    except OSError as error:
        print(where, type(error).__name__)
"""


@pytest.fixture
async def outside() -> AsyncIterator[Outside]:
    made = Outside()
    await made.serve()
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
async def platform(tmp_path: Path, outside: Outside) -> AsyncIterator[StackOutside]:
    made = StackOutside(tmp_path / "stack", outside, name="u", nodes=2)
    yield made
    await asyncio.to_thread(made.stop)
    await asyncio.to_thread(made.dsec, "down")
    assert made.leftovers() == []


async def _json(platform: StackOutside, *arguments: str) -> Any:
    return await asyncio.to_thread(platform.dsec_json, *arguments)


async def _reached(platform: StackOutside, sandbox_id: str, *where: str) -> dict[str, str]:
    done = await asyncio.to_thread(
        platform.dsec, "sandbox", "exec", sandbox_id, "--", "python3", "-c", PROBE, *where
    )
    return dict(line.split() for line in done.stdout.splitlines())


async def test_sandboxes_of_every_node_get_outside_as_far_as_their_policy_says(
    platform: StackOutside, outside: Outside
) -> None:
    await asyncio.to_thread(platform.start)
    base = await asyncio.to_thread(platform.import_host_base)
    assert outside.read(FORWARDING) == "0"  # before anybody needs it
    for name in platform.node_names:
        assert (
            "uplink" not in (await _json(platform, "node", "inspect", name))["heartbeat"]["missing"]
        )
    nodes = set()
    for _ in platform.node_names:
        made = await _json(platform, "sandbox", "create", base, "--rule-set", "pypi")
        nodes.add(made["node"])
        found = await _reached(
            platform, made["sandbox_id"], "pypi.org", PYPI6, "other.example", OTHER, MACHINE
        )
        assert found["pypi.org"] in {PYPI, PYPI6}
        assert found[PYPI6] == PYPI6
        assert found["other.example"] == "gaierror"
        assert found[OTHER] == found[MACHINE] == "ConnectionRefusedError"
        shown = await _json(platform, "network", "inspect", made["sandbox_id"])
        assert shown["outside_missing"] == ""
    assert nodes == set(platform.node_names)
    assert set(outside.peers) <= {MACHINE, "fd77::1"}  # translated
    made = await _json(
        platform, "sandbox", "create", base, "--deny", f"{OTHER}/32", "--deny", "10.0.0.0/8"
    )
    found = await _reached(platform, made["sandbox_id"], PYPI, "pypi.org", OTHER)
    assert (found[PYPI], found[OTHER]) == (PYPI, "ConnectionRefusedError")
    for wrong in ("no-such-set", "pypi"):
        refused = await asyncio.to_thread(
            platform.dsec,
            *("sandbox", "create", base, "--rule-set", wrong, "--deny", "a/b", "--json"),
            check=False,
        )
        assert json.loads(refused.stderr)["error"]["code"] == "invalid"
    assert outside.read(FORWARDING) == "1"
    assert await asyncio.to_thread(platform.stop) == 0
    assert outside.devices() == {"lo", UPLINK}
    assert outside.read(FORWARDING) == "0"


async def test_without_an_uplink_what_needs_one_is_refused_and_the_rest_works(
    platform: StackOutside, outside: Outside
) -> None:
    await asyncio.to_thread(platform.start, "--no-uplink")
    base = await asyncio.to_thread(platform.import_host_base)
    node = await _json(platform, "node", "inspect", platform.node_names[0])
    assert "network_uplink" in node["heartbeat"]["missing"]["uplink"]
    for options in (("--network", "open"), ("--rule-set", "pypi"), ("--allow", "pypi.org:443/tcp")):
        refused = await asyncio.to_thread(
            platform.dsec, "sandbox", "create", base, *options, "--json", check=False
        )
        error = json.loads(refused.stderr)["error"]
        assert error["code"] == "unsupported"
        assert "--uplink" in error["message"]
    made = await _json(platform, "sandbox", "create", base, "--allow", "10.1.0.0/16")
    shown = await _json(platform, "network", "inspect", made["sandbox_id"])
    assert "network_uplink" in shown["outside_missing"]
    refused = await asyncio.to_thread(
        platform.dsec,
        *("network", "set", made["sandbox_id"], "--mode", "open", "--json"),
        check=False,
    )
    assert json.loads(refused.stderr)["error"]["code"] == "unsupported"
    found = await _reached(platform, made["sandbox_id"], PYPI)
    assert found[PYPI] in {"ConnectionRefusedError", "OSError"}
    assert outside.read(FORWARDING) == "0"
    assert outside.devices() == {"lo", UPLINK}


async def test_after_kill_9_of_all_down_puts_the_machine_back(
    platform: StackOutside, outside: Outside
) -> None:
    await asyncio.to_thread(platform.start)
    base = await asyncio.to_thread(platform.import_host_base)
    await _json(platform, "sandbox", "create", base, "--network", "open")
    assert outside.read(FORWARDING) == "1"
    assert len(outside.devices()) == 3
    for part in platform.parts:
        if part["name"].startswith("sandboxd-"):
            os.kill(part["process"]["pid"], signal.SIGSTOP)
    await asyncio.to_thread(platform.stop, signal.SIGKILL)
    for part in platform.parts:
        if part["name"].startswith("sandboxd-"):
            os.kill(part["process"]["pid"], signal.SIGKILL)
    await asyncio.to_thread(platform.dsec, "down")
    assert outside.read(FORWARDING) == "0"
    async with asyncio.timeout(10):  # the kernel takes a namespace apart in its own time
        while outside.devices() != {"lo", UPLINK}:
            await asyncio.sleep(0.01)
