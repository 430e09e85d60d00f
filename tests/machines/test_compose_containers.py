"""The image, and the services of ``compose.yaml`` as containers on a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from docker_base import BaseUnavailableError
from docker_compose import REPOSITORY
from docker_engine import DockerEngine, EngineUnavailableError, find_programs
from docker_stack import IMAGE, ContainerStack
from dsec.rootfs import build_host_rootfs
from dsec_common.errors import DsecError
from dsec_common.wire.sandbox import EndCause

# The first test of a machine makes the base image and fetches what the services depend on.
pytestmark = pytest.mark.timeout(400)

BASE = "host@1"


@pytest.fixture(scope="module")
def engine() -> Iterator[DockerEngine]:
    try:
        find_programs()
        with DockerEngine() as started:
            started.build(REPOSITORY, started.base_image(), IMAGE)
            yield started
        assert started.cgroups() == []
    except (EngineUnavailableError, BaseUnavailableError) as error:
        pytest.skip(f"no Docker engine for the containers' tests: {error}")


@pytest.fixture
async def stack(engine: DockerEngine, tmp_path: Path) -> AsyncIterator[ContainerStack]:
    containers = ContainerStack(engine, tmp_path / "servers", scale={"scheduler": 2, "chronus": 2})
    async with containers:
        yield containers
    assert containers.leftovers() == []
    assert engine.docker("ps", "--all", "--quiet") == ""


async def test_the_services_run_as_containers_and_a_sandbox_does_its_work(
    stack: ContainerStack, tmp_path: Path
) -> None:
    await asyncio.to_thread(build_host_rootfs, tmp_path / "root")
    async with stack.client() as client:
        name, _, version = BASE.partition("@")
        await client.layers.import_directory(
            tmp_path / "root", kind="base", name=name, version=version
        )
        async with await client.create_sandbox(BASE, memory_bytes=64 << 20, pids=32) as sandbox:
            assert sandbox.node == stack.node
            done = await sandbox.exec("echo $((6 * 7)); cat /proc/self/cgroup", check=True)
            assert done.stdout_text.startswith("42\n")
            assert stack.node not in done.stdout_text
            await sandbox.write_file("/work/file", b"kept")
            assert await sandbox.read_file("/work/file") == b"kept"
            async with asyncio.timeout(20):
                # What the node wrote to Kafka is read back by the tracer.
                while not await _traced(stack, sandbox.id, "exec"):
                    await asyncio.sleep(0.1)

        # A killed container takes its sandboxes along, and its successor clears the rest up.
        left = await client.create_sandbox(BASE)
        node = "sandboxd-1"
        stack.engine.docker("kill", "--signal=KILL", node)
        stack.engine.docker("start", node)
        await stack.wait_healthy(node)
        async with asyncio.timeout(20):
            while (ended := await left.inspect()).end_cause is None:
                await asyncio.sleep(0.1)
        assert ended.end_cause is EndCause.NODE_RESTARTED
        assert (await client.list_sandboxes()) == []
        async with await client.create_sandbox(BASE) as another:
            assert (await another.exec("true")).exit_code == 0


async def _traced(stack: ContainerStack, sandbox_id: str, action: str) -> bool:
    async with stack.client() as client:
        try:
            trace = await client.trace(sandbox_id)
        except DsecError:
            return False
    return action in {step.action for step in trace.steps}
