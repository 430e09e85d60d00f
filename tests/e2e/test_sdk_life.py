"""A sandbox's life through SDK and command line on a whole platform."""

from __future__ import annotations

import asyncio
import json
import uuid

import pytest

from dsec import CommandFailed, DsecError, ErrorCode, IdleAction, SandboxState, sync
from dsec_common.wire.sandbox import EndCause
from stack import Stack


async def test_one_request_creates_runs_and_tells(stack: Stack, base: str) -> None:
    async with (
        stack.client() as client,
        await client.create_sandbox(base, command="echo first; exit 2") as sandbox,
    ):
        result = sandbox.first_result
        assert result is not None
        assert (result.exit_code, result.stdout) == (2, b"first\n")
        assert (await sandbox.exec("echo second")).stdout == b"second\n"


async def test_a_first_command_that_cannot_run_leaves_its_sandbox(stack: Stack, base: str) -> None:
    async with (
        stack.client() as client,
        await client.create_sandbox(base, command=["/no/such/program"]) as sandbox,
    ):
        with pytest.raises(DsecError) as caught:
            _ = sandbox.first_result
        assert caught.value.code is ErrorCode.NOT_FOUND
        assert (await sandbox.exec("true")).ok


async def test_a_repeated_key_is_the_same_sandbox_and_runs_nothing_again(
    stack: Stack, base: str
) -> None:
    key = uuid.uuid4().hex
    async with stack.client() as client:
        made = await asyncio.gather(
            *(
                client.create_sandbox(
                    base, command="echo x >> /tmp/ran; cat /tmp/ran", idempotency_key=key
                )
                for _ in range(4)
            )
        )
        again = await client.create_sandbox(
            base, command="echo x >> /tmp/ran; cat /tmp/ran", idempotency_key=key
        )
        assert {sandbox.id for sandbox in made} == {again.id}
        for sandbox in (*made, again):
            assert sandbox.first_result is not None
            assert sandbox.first_result.stdout == b"x\n"
        assert await again.read_file("/tmp/ran") == b"x\n"
        with pytest.raises(DsecError) as caught:
            await client.create_sandbox(base, command="echo other", idempotency_key=key)
        assert caught.value.code is ErrorCode.CONFLICT
        await again.delete()
        ended = await client.create_sandbox(
            base, command="echo x >> /tmp/ran; cat /tmp/ran", idempotency_key=key
        )
        assert ended.id == again.id


async def test_run_leaves_nothing_and_gives_the_result(stack: Stack, base: str) -> None:
    label = uuid.uuid4().hex
    async with stack.client() as client:
        result = await client.run(base, ["cat"], stdin="tea ☕", labels={"run": label}, cpus=0.5)
        assert result.stdout_text == "tea ☕"
        with pytest.raises(CommandFailed) as caught:
            await client.run(base, "exit 5", check=True, labels={"run": label})
        assert caught.value.result.exit_code == 5
        async with asyncio.timeout(10):
            while await client.list_sandboxes(labels={"run": label}):
                await asyncio.sleep(0.01)
        ended = await client.list_sandboxes(labels={"run": label}, states=["ended"])
        assert {info.end_cause for info in ended} == {EndCause.DELETED}


async def test_pause_wake_touch_and_labels(stack: Stack, base: str) -> None:
    async with stack.client() as client, await client.create_sandbox(base, ttl_s=300) as sandbox:
        assert (await sandbox.pause()).state is SandboxState.PAUSED
        assert (await sandbox.exec("echo awake")).stdout == b"awake\n"
        await sandbox.pause()
        assert (await sandbox.resume()).state is SandboxState.RUNNING
        before = (await sandbox.inspect()).expires_at
        assert (await sandbox.touch()).expires_at >= before
        assert (await sandbox.touch(0)).expires_at == 0
        assert (await sandbox.set_labels({"a": "1", "b": "2"})).labels == {"a": "1", "b": "2"}
        assert (await sandbox.set_labels({"a": None})).labels == {"b": "2"}


async def test_listings_are_filtered_and_come_in_pages(stack: Stack, base: str) -> None:
    run = uuid.uuid4().hex
    async with stack.client() as client:
        made = [
            await client.create_sandbox(
                base,
                labels={"run": run},
                agent="odd" if number % 2 else "even",
                cpus=0.1,
                memory_bytes=32 << 20,
            )
            for number in range(5)
        ]
        labels = {"run": run}
        await made[0].pause()
        paused = await client.list_sandboxes(labels=labels, states=[SandboxState.PAUSED])
        assert [info.sandbox_id for info in paused] == [made[0].id]
        odd = await client.list_sandboxes(labels=labels, agent="odd")
        assert [info.sandbox_id for info in odd] == [made[1].id, made[3].id]
        third = (await made[2].inspect()).created_at
        later = await client.list_sandboxes(labels=labels, created_after=third)
        assert [info.sandbox_id for info in later] == [sandbox.id for sandbox in made[2:]]
        earlier = await client.list_sandboxes(labels=labels, created_before=third)
        assert [info.sandbox_id for info in earlier] == [sandbox.id for sandbox in made[:2]]
        seen: list[str] = []
        cursor = ""
        while True:
            page = await client.list_page(labels=labels, limit=2, cursor=cursor)
            assert len(page.sandboxes) <= 2
            seen += [info.sandbox_id for info in page.sandboxes]
            cursor = page.next_cursor
            if not cursor:
                break
        assert seen == [sandbox.id for sandbox in made]
        first = await client.list_page(labels=labels, limit=2)
        for bad in (
            {"labels": {}, "cursor": first.next_cursor},
            {"labels": labels, "cursor": "nonsense"},
            {"labels": labels, "limit": -1},
        ):
            with pytest.raises(DsecError) as caught:
                await client.list_page(**bad)
            assert caught.value.code is ErrorCode.INVALID
        with pytest.raises(DsecError):
            await client.list_sandboxes(states=["asleep"])
        for sandbox in made:
            await sandbox.delete()


def test_the_plain_sdk_does_the_same(stack: Stack, base: str) -> None:
    context = stack.client().context
    with (
        sync.DSecClient(context.nats_servers, context.credentials) as client,
        client.create_sandbox(
            base, command="echo hi", idle_ttl_s=60, idle_action=IdleAction.PAUSE
        ) as sandbox,
    ):
        assert sandbox.first_result.stdout == b"hi\n"
        assert sandbox.pause().state is SandboxState.PAUSED
        assert sandbox.inspect().idle_action is IdleAction.PAUSE
        assert client.run(base, "echo once").stdout == b"once\n"


def test_the_command_line_runs_one_command_and_leaves_with_its_code(
    stack: Stack, base: str
) -> None:
    done = stack.dsec("run", base, "--", "sh", "-c", "echo out; echo err >&2; exit 7", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")
    shown = json.loads(stack.dsec("run", "--json", base, "echo", "hi").stdout)
    assert (shown["exit_code"], shown["stdout"]) == (0, "hi\n")
    late = stack.dsec("run", "--timeout", "0.2", base, "sleep", "60", check=False)
    assert late.returncode == 124
    absent = stack.dsec("run", base, "/no/such/program", check=False)
    assert absent.returncode == 127
    assert "not_found" in absent.stderr


def test_the_command_line_turns_a_sandbox(stack: Stack, base: str) -> None:
    name = stack.dsec(
        "sandbox", "create", base, "--idle-ttl", "300", "--idle-action", "pause"
    ).stdout.strip()
    assert stack.dsec_json("sandbox", "pause", name)["state"] == "paused"
    assert [info["sandbox_id"] for info in stack.dsec_json("sandbox", "list", "--state", "paused")]
    assert "then pause" in stack.dsec("sandbox", "inspect", name).stdout
    assert stack.dsec("sandbox", "resume", name).stdout.split()[1] == "running"
    assert stack.dsec_json("sandbox", "touch", name, "--ttl", "60")["ttl_s"] == 60
    assert stack.dsec_json("sandbox", "label", name, "a=1", "b=2")["labels"] == {"a": "1", "b": "2"}
    assert stack.dsec_json("sandbox", "label", name, "a-")["labels"] == {"b": "2"}
    page = stack.dsec_json("sandbox", "list", "--label", "b=2", "--limit", "1")
    assert [info["sandbox_id"] for info in page["sandboxes"]] == [name]
    stack.dsec("sandbox", "rm", name)
