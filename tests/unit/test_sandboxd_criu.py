"""Process memory is refused with what ``criu check`` says, asked once."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec_common.errors import ErrorCode
from dsec_sandboxd.criu import Criu


def install(directory: Path, script: str) -> None:
    """Put a program called criu where it is looked for."""
    program = directory / "criu"
    program.unlink(missing_ok=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


async def test_a_host_without_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    error = await Criu().refusal()
    assert (error.code, error.details["reason"]) == (ErrorCode.UNSUPPORTED, "criu")
    assert "not installed" in error.message


async def test_a_check_that_fails_is_told_in_its_own_words(programs: Path) -> None:
    install(programs, 'test "$1" = check || exit 9; echo "Error: no vDSO"; exit 3')
    error = await Criu().refusal()
    assert "status 3: Error: no vDSO" in error.message


async def test_a_check_that_passes_is_no_promise(programs: Path) -> None:
    install(programs, "exit 0")
    assert "does not drive it" in (await Criu().refusal()).message


async def test_a_program_that_cannot_run_is_a_reason(programs: Path) -> None:
    (programs / "criu").write_bytes(b"\x7fELF broken")
    (programs / "criu").chmod(0o755)
    assert "does not run here" in (await Criu().refusal()).message


async def test_it_is_asked_once_for_each_program(programs: Path) -> None:
    install(programs, f"echo asked >> {programs}/log; echo one; exit 1")
    criu = Criu()
    for _ in range(3):
        assert "one" in (await criu.refusal()).message
    assert (programs / "log").read_text() == "asked\n"
    install(programs, f"echo asked >> {programs}/log; echo two; exit 1")
    assert "two" in (await criu.refusal()).message
    assert (programs / "log").read_text() == "asked\nasked\n"
