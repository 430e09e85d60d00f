"""Inspect's own conformance checks, whole, on DSec sandboxes; none is expected to fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.importorskip("inspect_ai")

from inspect_ai.util import SandboxEnvironment
from inspect_ai.util._sandbox.self_check import *  # noqa: F403  this is how Inspect hands them out

from dsec.inspect_provider import DSecSandboxEnvironment, SandboxConfig
from inspect_base import build_inspect_rootfs
from stack import Stack

BASE = "inspect@1"


@pytest.fixture(scope="module")
def inspect_base(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> str:
    root = Path(tmp_path_factory.mktemp("inspect")) / "root"
    build_inspect_rootfs(root)
    stack.dsec(
        *("layer", "import", str(root), "--kind", "base", "--name", "inspect", "--version", "1")
    )
    return BASE


@pytest.fixture
async def sandbox_env(
    stack: Stack, inspect_base: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SandboxEnvironment]:
    monkeypatch.setenv("DSEC_NATS_SERVERS", ",".join(stack.context.nats_servers))
    monkeypatch.setenv(
        "DSEC_NATS_CREDENTIALS", str(stack.directory / "auth" / "projects" / "default.creds")
    )
    # As in an image with a USER line: whoever may read everything cannot be refused a file.
    config = SandboxConfig(base=inspect_base, user="agent")
    environments = await DSecSandboxEnvironment.sample_init("checks", config, {})
    try:
        yield environments["default"]
    finally:
        await DSecSandboxEnvironment.sample_cleanup("checks", config, environments, False)
        await DSecSandboxEnvironment.task_cleanup("checks", config, True)
        await asyncio.sleep(0)
