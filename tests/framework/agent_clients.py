"""The clients of the agent protocol in each language, as programs that a test drives."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from documents import ROOT, page

_BUILD_TIMEOUT_S = 300


@functools.cache
def _python() -> tuple[str, ...]:
    return (sys.executable, str(Path(__file__).with_name("agent_conformance.py")))


@functools.cache
def _go() -> tuple[str, ...]:
    program = _built_in("go") / "conformance"
    _build(["go", "build", "-o", str(program), "./conformance"], ROOT / "sdk" / "go")
    return (str(program),)


@functools.cache
def _rust() -> tuple[str, ...]:
    target = _built_in("rust")
    _build(
        ["cargo", "build", "--quiet", "--locked", "--example", "conformance"],
        ROOT / "sdk" / "rust",
        CARGO_TARGET_DIR=str(target),
    )
    return (str(target / "debug" / "examples" / "conformance"),)


def documented(language: str) -> tuple[str, ...]:
    """Return the agent in a language that the protocol's page shows, built."""
    (source,) = [
        block.text for block in page("docs/agent-protocol.md").blocks if block.language == language
    ]
    project = _built_in(f"documented-{language}")
    if language == "go":
        (project / "main.go").write_text(source)
        module = "module double\n\ngo 1.19\n\nrequire dsec/agent v0.0.0\n"
        replaced = f"\nreplace dsec/agent => {ROOT / 'sdk' / 'go'}\n"
        (project / "go.mod").write_text(module + replaced)
        _build(["go", "build", "-o", "double"], project)
        return (str(project / "double"),)
    rust = ROOT / "sdk" / "rust"
    (project / "src").mkdir(exist_ok=True)
    (project / "src" / "main.rs").write_text(source)
    (project / "Cargo.toml").write_text(
        '[package]\nname = "double"\nversion = "1.0.0"\nedition = "2021"\n\n'
        f'[dependencies]\ndsec-agent = {{ path = "{rust}" }}\n'
    )
    # The same versions of the same packages as the client itself has.
    shutil.copy(rust / "Cargo.lock", project)
    target = _built_in("rust")
    _build(["cargo", "build", "--quiet"], project, CARGO_TARGET_DIR=str(target))
    return (str(target / "debug" / "double"),)


LANGUAGES: dict[str, Callable[[], tuple[str, ...]]] = {"python": _python, "go": _go, "rust": _rust}
_TOOLCHAINS = {"go": "go", "rust": "cargo"}


def client_in(language: str) -> tuple[str, ...]:
    """Return the program of a language, built once; skip where its toolchain is missing."""
    need_toolchain(language)
    return LANGUAGES[language]()


def need_toolchain(language: str) -> None:
    """Skip where a language cannot be built."""
    toolchain = _TOOLCHAINS.get(language)
    if toolchain is not None and shutil.which(toolchain) is None:
        pytest.skip(f"{toolchain} is not installed (scripts/system-packages --for-tests)")


def _built_in(name: str) -> Path:
    """Return where a program is built; it stays, so that the next run builds what has changed."""
    directory = ROOT / ".dsec" / "clients" / name
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _build(command: list[str], directory: Path, **environment: str) -> None:
    done = subprocess.run(
        command,
        check=False,
        cwd=directory,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=_BUILD_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr


@dataclass
class Client:
    """A client that answers requests, one after the other."""

    process: asyncio.subprocess.Process

    async def ask(self, op: str, **request: Any) -> Any:
        """Return what comes of a request: ``result`` or ``error``."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"op": op, **request}).encode() + b"\n")
        return json.loads(await self.process.stdout.readline())


@contextlib.asynccontextmanager
async def client_process(
    language: str, socket: Path, *arguments: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Yield a client's process, which is killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *client_in(language),
        *arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        limit=2**23,
        env=os.environ
        | {
            "DSEC_AGENT_SOCKET": str(socket),
            "DSEC_AGENT_STATE": str(socket.with_name("state.sqlite")),
        },
    )
    try:
        yield process
    finally:
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
