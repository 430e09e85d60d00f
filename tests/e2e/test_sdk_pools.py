"""Warm pools and function calls through SDK, command line, scheduler and node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec import (
    CallStatus,
    CommandFailed,
    CpuClass,
    DSecClient,
    DsecError,
    ErrorCode,
    Limits,
    PoolInfo,
    WarmUse,
    agent_channel,
    sync,
)
from kernel_world import UNIFIED
from stack import Stack, pid_of, running_stack

PATIENCE_S = 60.0
MIB = 1 << 20
SMALL = Limits(cpus=0.05, memory_bytes=32 * MIB, disk_bytes=MIB)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("pools"), name="p") as platform:
        yield platform


@pytest.fixture(scope="module")
def base(stack: Stack) -> str:
    return stack.import_host_base()


async def until_ready(client: DSecClient, count: int) -> PoolInfo:
    """Return the only pool when exactly so many wait."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(DsecError):  # a service is being started again
                pools = await client.pools.list()
                if [pool.ready for pool in pools] == [count]:
                    return pools[0]
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def pool_of(client: DSecClient, base: str, size: int, **given: Any) -> AsyncIterator[None]:
    """Have a full pool, and none afterwards."""
    await client.pools.set(base, size=size, limits=SMALL, **given)
    await until_ready(client, size)
    yield
    await client.pools.remove(base, limits=SMALL)


def inside_the_kernel(stack: Stack) -> dict[str, int]:
    """Return the first processes of all sandboxes, waiting or not, by their local ids."""
    (node,) = stack.node_names
    found = {}
    for directory in (UNIFIED / f"dsec-{node}").glob("01*"):
        with contextlib.suppress(OSError, IndexError):
            found[directory.name] = int((directory / "cgroup.procs").read_text().split()[0])
    return found


async def test_a_pool_is_set_filled_used_refilled_listed_and_removed(
    stack: Stack, base: str
) -> None:
    async with stack.client() as client:
        told = await client.pools.set(base, size=3, limits=SMALL)
        assert (told.base, told.size) == (base, 3)
        full = await until_ready(client, 3)
        assert [(node.node, node.wanted) for node in full.nodes] == [(stack.node_names[0], 3)]
        async with await client.create_sandbox(base, limits=SMALL) as sandbox:
            assert sandbox.created is not None
            assert sandbox.created.warm
            assert (await sandbox.exec("echo alive")).stdout == b"alive\n"
        await until_ready(client, 3)
        assert (await client.pools.set(base, size=1, limits=SMALL)).key == told.key
        await until_ready(client, 1)
        await client.pools.remove(key=told.key)
        assert await client.pools.list() == []
        with pytest.raises(DsecError) as refused:
            await client.pools.remove(key=told.key)
        assert refused.value.code is ErrorCode.NOT_FOUND


async def test_it_is_as_its_request_says_in_everything(stack: Stack, base: str) -> None:
    limits = Limits(memory_bytes=96 * MIB, disk_bytes=8 * MIB, inodes=300, pids=20)
    label = uuid.uuid4().hex
    async with (
        stack.client() as client,
        pool_of(client, base, 2),
        await client.create_sandbox(
            base,
            limits=limits,
            env={"WHO": "me"},
            labels={"run": label},
            agent="a-type",
            ttl_s=600,
            warm=WarmUse.REQUIRE,
        ) as sandbox,
    ):
        local = sandbox.id.partition(".")[2]
        shown = await sandbox.exec(
            "echo $WHO; cat /proc/sys/kernel/hostname; ls /run/dsec; "
            "cat /proc/self/mountinfo /proc/self/cgroup",
            check=True,
        )
        assert shown.stdout_text.splitlines()[:3] == ["me", local, "agent.sock"]
        assert "warm" not in shown.stdout_text
        info = await sandbox.inspect()
        assert (info.limits, info.labels, info.agent) == (limits, {"run": label}, "a-type")
        assert info.ttl_s == 600
        assert [one.sandbox_id for one in await client.list_sandboxes(labels={"run": label})] == [
            sandbox.id
        ]
        bomb = await sandbox.exec(["python3", "-c", "x = bytearray(128 << 20)"])
        assert bomb.oom
        disk = await sandbox.exec(["python3", "-c", "open('/full', 'wb').write(bytes(9 << 20))"])
        assert b"No space left" in disk.stderr
        await sandbox.exec("rm /full", check=True)
        code = "for n in range(400): open(f'/tmp/{n}', 'w').close()"
        inodes = await sandbox.exec(["python3", "-c", code])
        assert b"No space left" in inodes.stderr


async def test_its_agent_speaks_for_it_and_no_other(stack: Stack, base: str) -> None:
    agent = (
        "from agent_channel import AgentChannel\n"
        "with AgentChannel() as channel:\n"
        "    print(channel.step('try', {'n': 1})['payload'])\n"
    )
    async with stack.client() as client, pool_of(client, base, 1):
        rollout = await client.rollouts.open()
        async with await client.create_sandbox(
            base, limits=SMALL, warm="require", rollout_id=rollout.id
        ) as sandbox:
            await sandbox.upload(agent_channel.__file__, "/agent/agent_channel.py")
            await sandbox.write_file("/agent/main.py", agent)
            running = asyncio.create_task(sandbox.exec(["python3", "/agent/main.py"], timeout_s=60))
            async with asyncio.timeout(PATIENCE_S):
                async for stage in rollout.stages():
                    assert stage.sandbox_id == sandbox.id
                    await stage.reply({"double": 2}, reward=0.5, done=True)
                    await rollout.close()
                    break
            assert (await running).check().stdout == b"{'double': 2}\n"


async def test_200_creations_against_a_pool_of_20_get_a_sandbox_each(
    stack: Stack, base: str
) -> None:
    async with stack.client() as client, pool_of(client, base, 20):
        warm = 0
        names: set[str] = set()
        inside: set[bytes] = set()

        async def use() -> None:
            nonlocal warm
            sandbox = await client.create_sandbox(base, limits=SMALL, timeout_s=60)
            assert sandbox.created is not None
            warm += sandbox.created.warm
            names.add(sandbox.id)
            inside.add((await sandbox.exec("cat /proc/sys/kernel/hostname", check=True)).stdout)
            marked = await sandbox.exec("test ! -e /mark && touch /mark", check=True)
            assert marked.ok
            await sandbox.delete()

        for fills in range(1, 6):
            await until_ready(client, 20)  # again, after what the last ones took
            await asyncio.gather(*(use() for _ in range(40)))
            assert warm >= 20 * fills
        assert len(names) == len(inside) == 200
        await until_ready(client, 20)


async def test_one_that_was_killed_while_it_waited_is_never_handed_out(
    stack: Stack, base: str
) -> None:
    async with stack.client() as client, pool_of(client, base, 4):
        for pid in inside_the_kernel(stack).values():
            os.kill(pid, signal.SIGKILL)
        for _ in range(6):
            async with await client.create_sandbox(base, limits=SMALL) as sandbox:
                assert (await sandbox.exec("echo alive")).stdout == b"alive\n"
        await until_ready(client, 4)


async def test_one_whose_first_process_stands_still_is_never_handed_out(
    stack: Stack, base: str
) -> None:
    async with stack.client() as client, pool_of(client, base, 2):
        for pid in inside_the_kernel(stack).values():
            os.kill(pid, signal.SIGSTOP)
        async with await client.create_sandbox(base, limits=SMALL) as sandbox:
            assert (await sandbox.exec("echo alive")).stdout == b"alive\n"
        await until_ready(client, 2)


async def test_what_cannot_be_warm_is_made_or_refused(stack: Stack, base: str) -> None:
    async with stack.client() as client:
        with pytest.raises(DsecError) as refused:
            await client.create_sandbox(base, limits=SMALL, warm="require", timeout_s=2)
        assert refused.value.code is ErrorCode.EXHAUSTED
        with pytest.raises(DsecError) as refused:
            await client.create_sandbox(base, warm="perhaps")
        assert refused.value.code is ErrorCode.INVALID
        async with pool_of(client, base, 1):
            other = Limits(cpu_class=CpuClass.BEST_EFFORT)
            for given in ({"limits": SMALL, "warm": "bypass"}, {"limits": other}):
                async with await client.create_sandbox(base, **given) as sandbox:
                    assert sandbox.created is not None
                    assert not sandbox.created.warm


async def test_a_killed_daemon_keeps_who_was_handed_out_and_fills_its_pool_anew(
    stack: Stack, base: str
) -> None:
    (node,) = stack.node_names
    async with stack.client() as client, pool_of(client, base, 3):
        sandbox = await client.create_sandbox(base, limits=SMALL, warm="require")
        await sandbox.exec("echo kept > /tmp/kept", check=True)
        await until_ready(client, 3)
        before = inside_the_kernel(stack)
        os.kill(pid_of(stack, f"sandboxd-{node}"), signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(DsecError):
                    if (await sandbox.exec("cat /tmp/kept")).stdout == b"kept\n":
                        break
                await asyncio.sleep(0.1)
        assert (await sandbox.inspect()).end_cause is None
        await until_ready(client, 3)
        local = sandbox.id.partition(".")[2]
        assert before.keys() & inside_the_kernel(stack).keys() == {local}
        await sandbox.delete()


async def test_a_restarted_scheduler_knows_the_pools(stack: Stack, base: str) -> None:
    async with stack.client() as client, pool_of(client, base, 2):
        os.kill(pid_of(stack, "scheduler"), signal.SIGKILL)
        await until_ready(client, 2)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(DsecError):
                    sandbox = await client.create_sandbox(base, limits=SMALL, warm="require")
                    break
                await asyncio.sleep(0.1)
        await sandbox.delete()


async def test_a_pool_without_its_layer_says_so(stack: Stack, base: str) -> None:
    del base
    async with stack.client() as client:
        await client.pools.set("no-such-layer@1", size=2)
        (pool,) = await client.pools.list()
        assert pool.ready == 0
        assert "no-such-layer" in pool.nodes[0].note
        await client.pools.remove("no-such-layer@1")


@pytest.mark.parametrize("size", [0, -1, 10_001])
async def test_a_size_that_no_pool_can_have_is_refused(stack: Stack, base: str, size: int) -> None:
    async with stack.client() as client:
        with pytest.raises(DsecError) as refused:
            await client.pools.set(base, size=size)
        assert refused.value.code is ErrorCode.INVALID


# --- Calls ----------------------------------------------------------------------------------------


async def test_a_call_has_its_files_and_gives_back_others(stack: Stack, base: str) -> None:
    async with stack.client() as client:
        called = await client.call(
            base,
            "cat /in/a /in/deep/b > /out; echo $WHO; echo oops >&2",
            files={"/in/a": b"\x00a", "/in/deep/b": "b"},
            collect=["/out"],
            env={"WHO": "me"},
        )
        assert called.check().status is CallStatus.SUCCESS
        assert called.result is not None
        assert (called.result.stdout, called.result.stderr) == (b"me\n", b"oops\n")
        assert called.files == {"/out": b"\x00ab"}
        async with asyncio.timeout(PATIENCE_S):  # its sandbox may outlive its answer
            while await client.list_sandboxes(states=["running"]):
                await asyncio.sleep(0.02)


async def test_a_call_says_whose_doing_its_failure_is(stack: Stack, base: str) -> None:
    async with stack.client() as client:
        failed = await client.call(base, "exit 3")
        assert (failed.status, failed.retryable) == (CallStatus.FAILED, False)
        with pytest.raises(CommandFailed):
            failed.check()
        late = await client.call(base, "echo so far; sleep 60", timeout_s=2.0)
        assert late.status is CallStatus.FAILED
        assert late.result is not None
        assert (late.result.timed_out, late.result.stdout) == (True, b"so far\n")
        hungry = await client.call(
            base, ["python3", "-c", "x = bytearray(256 << 20)"], limits=SMALL
        )
        assert hungry.status is CallStatus.FAILED
        whole = await client.call(
            base,
            ["python3", "-c", "x = bytearray(256 << 20)"],
            limits=Limits(memory_bytes=32 * MIB, oom_group=True),
        )
        assert whole.error is not None
        assert (whole.status, whole.error.code) == (CallStatus.FAILED, ErrorCode.OOM)
        assert (await client.call(base, ["/no/such"])).status is CallStatus.FAILED
        missing = await client.call(base, "echo there > /a", collect=["/a", "/b"])
        assert missing.status is CallStatus.FAILED
        assert missing.files == {"/a": b"there\n"}
        assert missing.error is not None
        assert missing.error.code is ErrorCode.NOT_FOUND
        too_much = await client.call(
            base, ["python3", "-c", "open('/a', 'w').write('x' * 300000)"], collect=["/a"]
        )
        assert too_much.status is CallStatus.FAILED
        full = await client.call(
            base, "true", files={"/a": b"x" * 150_000}, limits=Limits(disk_bytes=64 * 1024)
        )
        assert full.status is CallStatus.FAILED
        with pytest.raises(DsecError) as refused:
            await client.call("no-such-layer@1", "true")
        assert refused.value.code is ErrorCode.NOT_FOUND
        with pytest.raises(DsecError) as refused:
            await client.call(base, "true", files={"relative": b""})
        assert refused.value.code is ErrorCode.INVALID


async def test_a_file_of_a_call_never_leaves_the_sandbox(stack: Stack, base: str) -> None:
    async with stack.client() as client:
        code = "import os; os.symlink('/proc/1/root/etc/shadow', '/a'); os.mkfifo('/c')"
        link = await client.call(base, ["python3", "-c", code], collect=["/a", "/c"])
        assert link.files == {}
        odd = await client.call(base, "ls -l /dev/null", files={"/dev/null": b"x"})
        assert odd.status in {CallStatus.FAILED, CallStatus.SUCCESS}


async def test_one_request_id_runs_once(stack: Stack, base: str) -> None:
    request_id = uuid.uuid4().hex
    command = "cat /proc/sys/kernel/random/uuid > /id; cat /id"
    async with stack.client() as client:
        first, *others = await asyncio.gather(
            *(client.call(base, command, collect=["/id"], request_id=request_id) for _ in range(5))
        )
        again = await client.call(base, command, collect=["/id"], request_id=request_id)
        assert first.ok
        assert first.result is not None
        for other in (*others, again):
            assert other.result is not None
            assert other.result.stdout == first.result.stdout
            assert other.files == first.files
        with pytest.raises(DsecError) as refused:
            await client.call(base, "echo other", request_id=request_id)
        assert refused.value.code is ErrorCode.CONFLICT


async def test_calls_find_sandboxes_that_wait_for_them(stack: Stack, base: str) -> None:
    async with stack.client() as client:
        async with asyncio.timeout(PATIENCE_S):
            while not (await client.call(base, "true", limits=SMALL)).warm:
                await asyncio.sleep(0.05)
        many = await asyncio.gather(
            *(client.call(base, ["sh", "-c", f"echo {n}"], limits=SMALL) for n in range(40))
        )
        assert [called.result and called.result.stdout for called in many] == [
            f"{n}\n".encode() for n in range(40)
        ]


def test_the_synchronous_client_has_pools_and_calls(stack: Stack, base: str) -> None:
    context = stack.context
    with sync.DSecClient(context.nats_servers, context.credentials) as client:
        client.pools.set(base, size=1, limits=SMALL)
        assert [pool.size for pool in client.pools.list()] == [1]
        client.pools.remove(base, limits=SMALL)
        assert client.call(base, "echo hello").check().result.stdout == b"hello\n"


def test_the_command_line_has_pools_and_calls(stack: Stack, base: str, tmp_path: Path) -> None:
    told = stack.dsec_json("pool", "set", base, "-n", "1")
    (listed,) = stack.dsec_json("pool", "list")
    assert listed["key"] == told["key"]
    stack.dsec("pool", "remove", told["key"])
    given, got = tmp_path / "in", tmp_path / "out"
    given.write_text("hello")
    done = stack.dsec(
        "call",
        "-f",
        f"/in={given}",
        "-o",
        f"/out={got}",
        base,
        "sh",
        "-c",
        "cp /in /out; echo done",
    )
    assert done.stdout == "done\n"
    assert got.read_text() == "hello"
