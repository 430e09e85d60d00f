"""Programs of the host run beside the daemon, and never outlive who asked for them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from dsec_sandboxd.programs import run_program


async def test_a_program_tells_its_exit_code_and_its_errors() -> None:
    said = await run_program(["/bin/sh", "-c", "echo out; echo bad >&2; exit 3"], deadline_s=30)
    assert said == (3, b"bad\n")


async def test_its_output_is_heard_when_asked_for_and_only_the_end_of_it() -> None:
    script = "head -c 9000 /dev/zero; echo end"
    status, output = await run_program(["/bin/sh", "-c", script], deadline_s=30, listen=True)
    assert (status, len(output), output[-4:]) == (0, 4096, b"end\n")


async def test_it_has_the_descriptors_and_the_environment_it_is_given() -> None:
    reading, writing = os.pipe()
    try:
        script = f"echo $A > /proc/self/fd/{writing}; test ! -e /proc/self/fd/{reading}"
        arguments = ["/bin/sh", "-c", script]
        said = await run_program(
            arguments, deadline_s=30, descriptors=(writing,), environment={"A": "b"}
        )
        assert said == (0, b"")
        assert os.read(reading, 100) == b"b\n"
    finally:
        os.close(reading)
        os.close(writing)


async def test_one_that_takes_too_long_is_killed() -> None:
    with pytest.raises(TimeoutError):
        await run_program(["/bin/sleep", "1000"], deadline_s=0.05)


async def test_one_that_nobody_waits_for_any_more_is_killed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "begun")
    script = f"echo $$ > {tmp_path}/begun; exec sleep 1000"
    running = asyncio.ensure_future(run_program(["/bin/sh", "-c", script], deadline_s=100))
    await asyncio.sleep(0)
    pid = int(await asyncio.to_thread((tmp_path / "begun").read_text))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_one_that_is_not_there_is_said() -> None:
    with pytest.raises(FileNotFoundError):
        await run_program(["/nowhere/program"], deadline_s=30)
