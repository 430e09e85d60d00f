"""Terminals, transfers and watches, attacked from inside while the platform uses them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

import pytest

from attack_world import CALL, AttackWorld
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import JSON, encode
from dsec_sandboxd.file_watch import _Watch
from dsec_sandboxd.kernel.interface import CommandSpec, Stream
from dsec_sandboxd.kernel.process import Process
from kernel_world import MIB, descriptors_of

KEYS = (
    CALL
    + """
import fcntl, struct, termios
for number, argument in ((0x5412, b'x'), (0x541c, bytes([3, 1])), (0x5423, struct.pack('i', 21)),
                         (0x541d, 0), (0x540e, 1), (0x5456, 1)):
    attempt(hex(number), lambda: fcntl.ioctl(0, number, argument))
print('hang-up', call(153))
print(os.ttyname(0), termios.tcgetattr(0)[3] & termios.ECHO != 0)
"""
)


async def _printed(process: Process) -> str:
    """Return what a process prints on its terminal until it lets go of it."""
    text = b""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(BlockingIOError):
                try:
                    process.relay()
                except OSError as error:
                    if isinstance(error, BlockingIOError):
                        raise
                    break  # nobody has it any more
            with contextlib.suppress(BlockingIOError):
                text += os.read(process.outputs[Stream.STDOUT], 65_536)
            await asyncio.sleep(0.002)
    with contextlib.suppress(BlockingIOError):
        while data := os.read(process.outputs[Stream.STDOUT], 65_536):
            text += data
    return text.decode()


def _launch(arena: AttackWorld, *argv: str, local: str = "a") -> Process:
    command = CommandSpec(argv=argv, terminal=(24, 80), with_input=True)
    return arena.kernel.launch(local, command, spool_fd=-1, before=lambda _number: None)


async def test_no_key_strokes_are_forged_and_no_terminal_is_taken_over(
    arena: AttackWorld,
) -> None:
    process = _launch(arena, "python3", "-c", KEYS)
    await process.started
    said = (await _printed(process)).splitlines()
    process.finish()
    assert said[-1] == "/dev/pts/0 True"
    # Becoming one's own controlling terminal is what terminals are for; nothing else is done.
    assert [line.split()[0] for line in said if "done" in line] in ([], ["0x540e"]), said
    # Nor from beside it: another process of the sandbox opens the same terminal.
    process = _launch(arena, "cat")
    await process.started
    beside = await arena.python(
        CALL
        + "import fcntl\nterminal = os.open('/dev/pts/0', os.O_RDWR | os.O_NOCTTY)\n"
        + "attempt('keys', lambda: fcntl.ioctl(terminal, 0x5412, b'x'))"
    )
    assert beside == "keys EPERM"
    process.kill()
    await process.exited
    process.finish()


async def test_who_takes_all_terminals_takes_only_the_sandboxs_own(arena: AttackWorld) -> None:
    take = (
        "import os, time\nkept = []\n"
        "try:\n    while True: kept.append(os.open('/dev/pts/ptmx', os.O_RDWR | os.O_NOCTTY))\n"
        "except OSError: print(len(kept), flush=True); time.sleep(60)"
    )
    holding = await arena.exec_until_output(arena.command("python3", "-c", take))
    process = _launch(arena, "true")
    with pytest.raises(DsecError) as caught:
        await process.started
    assert caught.value.code is ErrorCode.EXHAUSTED
    process.finish()
    beside = _launch(arena, "/bin/echo", "mine", local="neighbour")
    await beside.started
    assert await _printed(beside) == "mine\r\n"
    beside.finish()
    holding.cancel()
    await asyncio.wait([holding])


async def test_stopping_every_process_hangs_no_upload_download_or_watch(
    arena: AttackWorld,
) -> None:
    await arena.say("mkdir -p /tmp/tree && cp -r /usr/lib/python3* /tmp/tree/ 2>/dev/null; true")
    before = len(descriptors_of())
    stopper = await arena.exec_until_output(
        CommandSpec(argv=("/attack/stopper", "19"), timeout_s=60)
    )

    async def download() -> int:
        size = 0
        with await arena.kernel.pack_tree("a", "/tmp/tree") as source:
            while data := await source.receive():
                size += len(data)
        return size

    async def upload() -> None:
        with await arena.kernel.unpack_tree("a", "/tmp/in") as sink:
            for _ in range(64):
                await sink.send(bytes(1024))
            await sink.finish()

    async def watch() -> None:
        with await arena.kernel.watch("a", "/tmp", recursive=True) as watcher:
            await watcher.next()

    async with asyncio.timeout(30):
        outcomes = await asyncio.gather(
            *(work() for _ in range(5) for work in (download, upload, watch)),
            return_exceptions=True,
        )
    for outcome in outcomes:
        assert outcome is None or isinstance(outcome, int | DsecError), outcome
    stopper.cancel()
    await asyncio.wait([stopper])
    assert len(descriptors_of()) <= before + 4


async def test_a_flood_of_changes_is_taken_at_a_pace_and_kept_in_bounds(
    arena: AttackWorld,
) -> None:
    watch = _Watch("/tmp", await arena.kernel.watch("a", "/tmp", recursive=True))
    began = time.monotonic()
    flood = (
        "import os\nos.makedirs('/tmp/' + '/'.join(['d' * 200] * 15)); print(1, flush=True)\n"
        "os.chdir('/tmp/' + '/'.join(['d' * 200] * 15))\n"
        "while True:\n    os.close(os.open('f' * 200, os.O_CREAT)); os.unlink('f' * 200)"
    )
    flooding = await arena.exec_until_output(arena.command("python3", "-c", flood))
    for _ in range(100):
        assert (await arena.run("/bin/echo", "x", local="neighbour")).stdout == b"x\n"
    events = await watch.after(0, 5.0, "")
    elapsed_s = time.monotonic() - began
    assert events.events
    assert len(encode(events, JSON)) < MIB, "it fits a message"
    assert 0 < watch._last <= 50 * (elapsed_s / 0.02 + 2)
    assert watch._kept_bytes <= MIB
    flooding.cancel()
    await asyncio.wait([flooding])
    await watch.end()


async def test_with_all_memory_taken_the_platforms_requests_fail_in_words_or_work(
    arena: AttackWorld,
) -> None:
    fill = (
        "import os, time\n"
        "print('filling', flush=True)\n"
        "for number in range(40):\n"
        "    if os.fork() == 0:\n"
        "        kept = []\n"
        "        while True: kept.append(bytearray(1 << 16))\n"
        "time.sleep(60)"
    )
    holding = await arena.exec_until_output(arena.command("python3", "-c", fill))
    # Each has a bound of its own, ten seconds for a file, whatever the sandbox does to it.
    async with asyncio.timeout(55):
        for _ in range(2):
            with contextlib.suppress(DsecError):
                await arena.kernel.stat("a", "/etc/passwd")
            with contextlib.suppress(DsecError):
                await arena.run("/attack/whoami", timeout_s=2)
            with contextlib.suppress(DsecError):
                await arena.write("a", "/tmp/x", b"x")
    holding.cancel()
    await asyncio.wait([holding])
    assert (await arena.run("/bin/echo", "x", local="neighbour")).stdout == b"x\n"


async def test_a_pipe_that_changes_under_the_reader_does_it_no_harm(arena: AttackWorld) -> None:
    # Its size, its mode, its pages, and stolen back from the platform.
    said = await arena.run(
        "python3",
        "-c",
        CALL
        + """
import fcntl, mmap, struct, threading
area = mmap.mmap(-1, 1 << 20)
vector = struct.pack('PN', ctypes.addressof(ctypes.c_char.from_buffer(area)), 1 << 16)
thief = os.open('/proc/self/fd/1', os.O_RDONLY | os.O_NONBLOCK)
for turn in range(3000):
    try: fcntl.fcntl(1, 1031, 4096 if turn % 2 else 1 << 20)
    except OSError: pass
    fcntl.fcntl(1, fcntl.F_SETFL, os.O_NONBLOCK if turn % 3 else 0)
    libc.syscall(278, 1, vector, ctypes.c_long(1), ctypes.c_long(0xa))
    area[:8] = struct.pack('Q', turn)
    try: os.read(thief, 100)
    except BlockingIOError: pass
os.write(2, b'over')
""",
        timeout_s=20,
        output_limit_bytes=MIB,
    )
    assert said.stderr == b"over"
    assert len(said.stdout) <= MIB
