"""Nonsense on the sockets of PID 1 and the spawner: neither crashes, leaks or obeys."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
from collections.abc import Iterator

import pytest

from dsec_sandboxd.kernel.linux import PROGRAMS
from dsec_sandboxd.kernel.protocol import (
    ControlFlag,
    ControlKind,
    FileOperation,
    SpawnerKind,
    SpawnerRequest,
    pack_control,
)
from dsec_sandboxd.kernel.spawner import Spawner
from kernel_world import World, descriptors_of

ROUNDS = 1500
# What the client counts its own requests from, far from any number below.
OWN_IDS = 0x5A5A_0000
NUMBERS = (0, 1, 2, 3, 255, 4095, 4096, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1)


def number(source: random.Random) -> int:
    return source.choice(NUMBERS) if source.random() < 0.7 else source.getrandbits(32)


def mutate(source: random.Random, packet: bytes) -> bytes:
    """Flip, cut, lengthen or leave a packet."""
    data = bytearray(packet)
    for _ in range(source.randrange(4)):
        if data:
            data[source.randrange(len(data))] = source.getrandbits(8)
    if source.random() < 0.3:
        del data[source.randrange(len(data) + 1) :]
    if source.random() < 0.1:
        data += source.randbytes(source.randrange(2000))
    return bytes(data)


def control_packets(source: random.Random) -> Iterator[bytes]:
    """Yield requests to PID 1 that look right to different degrees; none can start a program."""
    while True:
        strings = source.randrange(6)
        payload = b"".join(
            source.randbytes(source.randrange(20)) + b"\0" * (source.random() < 0.9)
            for _ in range(strings)
        )
        yield mutate(
            source,
            pack_control(
                source.choice([*ControlKind]),
                number(source),
                flags=source.choice([0, *ControlFlag, number(source)]),
                arguments=source.choice([0, 1, 2, strings, number(source)]),
                environment=source.choice([0, 1, number(source)]),
                signal_number=number(source),
                operation=source.choice([0, *FileOperation, number(source)]),
                mode=number(source),
                payload_bytes=source.choice([len(payload), 0, number(source)]),
            )
            + payload,
        )


def spawner_packets(source: random.Random) -> Iterator[bytes]:
    """Yield requests to the spawner whose slot or base id can never be right."""
    while True:
        request = SpawnerRequest(
            kind=source.choice([*SpawnerKind]),
            slot=source.choice([4096, 2**31, 2**32 - 1]),
            base_id=source.choice([0, 1, 65535, 2**32 - 1]),
            layer=number(source),
            layers=[number(source) for _ in range(source.randrange(17))],
            controllers=number(source),
            flags=number(source),
            disk_bytes=source.getrandbits(64),
            inodes=source.getrandbits(64),
        )
        packet = request.pack(number(source))
        cut = source.random() < 0.3
        yield packet[: source.randrange(len(packet))] if cut else packet


async def send(channel: socket.socket, packet: bytes, descriptors: list[int]) -> None:
    while True:
        try:
            socket.send_fds(channel, [packet or b"\0"], descriptors)
        except BlockingIOError:
            await asyncio.sleep(0.001)
        else:
            return


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_init_survives_any_packet_and_leaks_no_descriptor(world: World, seed: int) -> None:
    source = random.Random(seed)  # noqa: S311  a repeatable one is wanted
    await world.create()
    await world.say("true")
    await world.kernel.stat("a", "/")  # answered after the end of the command is dealt with
    init = world.init_pid()
    before = descriptors_of(init)
    client = world.kernel._sandboxes["a"].init
    client._next_id = OWN_IDS
    channel = client._channel
    null = os.open("/dev/null", os.O_RDWR)
    try:
        packets = control_packets(source)
        for _ in range(ROUNDS):
            await send(channel, next(packets), [null] * source.choice([0, 0, 1, 2, 16]))
    finally:
        os.close(null)
    assert await world.say("echo alive") == "alive"
    await world.kernel.stat("a", "/")
    assert descriptors_of(init) == before


@pytest.mark.parametrize("seed", [1, 2])
async def test_the_spawner_survives_any_packet_and_leaks_no_descriptor(seed: int) -> None:
    source = random.Random(seed)  # noqa: S311  a repeatable one is wanted
    spawner = await Spawner.start(PROGRAMS / "spawner", PROGRAMS / "pid1")
    try:
        warm = SpawnerRequest(kind=SpawnerKind.WARM, slot=0, base_id=0x7000_0000)
        await spawner.request(warm)
        before = descriptors_of(spawner.pid)
        spawner._next_id = OWN_IDS
        packets = spawner_packets(source)
        null = os.open("/dev/null", os.O_RDWR)
        try:
            for _ in range(ROUNDS):
                packet = next(packets)
                await send(spawner._channel, packet, [null] * source.choice([0, 1, 2, 16]))
        finally:
            os.close(null)
        await spawner.request(warm)
        assert spawner.alive
        assert descriptors_of(spawner.pid) == before
    finally:
        await spawner.stop()


async def test_a_command_cannot_answer_in_the_name_of_init(world: World) -> None:
    """The control socket is not among a command's descriptors, and PID 1's cannot be reached."""
    await world.create()
    code = (
        "import os\n"
        "for number in range(3, 64):\n"
        "    try: os.fstat(number); print(number)\n"
        "    except OSError: pass\n"
    )
    assert await world.python(code) == ""
    header = struct.calcsize("=10I")
    assert header == len(pack_control(ControlKind.DONE, 1))
