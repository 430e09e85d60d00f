"""Snapshots through the whole platform: SDK and command line, scheduler and nodes."""

from __future__ import annotations

import asyncio
import json

import pytest

from documents import Page, pages
from dsec import DsecError, ErrorCode, Sandbox
from dsec.cli.snapshot import in_tree_order
from stack import Stack


async def test_a_sandbox_is_kept_put_back_forked_and_made_again(stack: Stack, base: str) -> None:
    async with stack.client() as client:
        async with await client.create_sandbox(base, cpus=0.25, env={"A": "b"}) as parent:
            await parent.write_file("/work/x", "one")
            first = await parent.snapshot("first", labels={"step": "1"})
            await parent.write_file("/work/x", "two")
            second = await parent.snapshot("second")
            assert (await parent.roll_back(first)) > 0
            assert await parent.read_text("/work/x") == "one"
            third = await parent.snapshot("third")
            children = await parent.fork(4)
            made = [child for child in children if isinstance(child, Sandbox)]
            assert len(made) == 4
            for child in made:
                assert await child.read_text("/work/x") == "one"
                assert (await child.exec("echo $A")).stdout_text == "b\n"
                await child.delete()
            listed = await client.snapshots.list(sandbox_id=parent.id)
            infos = [snapshot.info for snapshot in listed if snapshot.info is not None]
            assert [(depth, info.name) for depth, info in in_tree_order(infos)] == [
                (0, "first"),
                (1, "second"),
                (1, "third"),
            ]
        # The original is gone; its node alone can go on from here.
        async with await client.create_sandbox(snapshot=second) as restored:
            assert restored.node == second.node
            assert await restored.read_text("/work/x") == "two"
            fourth = await restored.snapshot("fourth", wait_durable=True)
            assert fourth.info is not None
            assert fourth.info.durable
        durable = await third.wait_durable()
        assert durable.durable
        with pytest.raises(DsecError) as caught:
            await client.create_sandbox(base, snapshot=second)
        assert caught.value.code is ErrorCode.INVALID
        for snapshot in (first, second, third, fourth):
            await snapshot.delete()
            await snapshot.delete()
        with pytest.raises(DsecError) as caught:
            await client.create_sandbox(snapshot=second)
        assert caught.value.code is ErrorCode.NOT_FOUND


async def test_whoever_is_in_a_sandbox_that_is_put_back_is_told_so(stack: Stack, base: str) -> None:
    listening = (
        "import socket; s = socket.create_server(('127.0.0.1', 8080)); print('on', flush=True); "
        "c = s.accept()[0]; c.recv(1)"
    )
    async with stack.client() as client, await client.create_sandbox(base) as sandbox:
        snapshot = await sandbox.snapshot()
        ended = await sandbox.start("echo said")
        await ended.wait()
        server = await sandbox.start(["python3", "-c", listening])
        async for piece in server:
            if b"on" in piece.data:
                break
        stream = await sandbox.open_port(8080)
        async with sandbox.watch("/tmp") as changes:
            asked = [
                asyncio.ensure_future(anext(changes)),
                asyncio.ensure_future(stream.read()),
                asyncio.ensure_future(server.output()),
                asyncio.ensure_future(sandbox.exec("sleep 1000")),
            ]
            await sandbox.exec("true")
            await sandbox.roll_back(snapshot)
            told = await asyncio.gather(*asked, return_exceptions=True)
        for error in told:
            assert isinstance(error, DsecError), told
            assert (error.code, error.retryable) == (ErrorCode.CONFLICT, False), told
            assert error.details["reason"] == "rolled_back"
        await stream.close()
        assert (await sandbox.process(ended.id).output()).stdout == b"said\n"
        assert {info.exec_id for info in await sandbox.processes()} == {
            ended.id,
            server.id,
        }


async def test_a_snapshot_of_a_node_that_is_not_there_is_told_so(stack: Stack, base: str) -> None:
    del base
    async with stack.client() as client:
        with pytest.raises(DsecError) as caught:
            await client.create_sandbox(snapshot="no-such-node.01m8mh9e4z1t2r34cb0ccb2zs2")
    assert caught.value.code is ErrorCode.UNAVAILABLE


def test_the_command_line_does_the_same(stack: Stack, base: str) -> None:
    sandbox = stack.dsec("sandbox", "create", base, "--cpus", "0.25").stdout.strip()
    stack.dsec("sandbox", "exec", "--shell", sandbox, "mkdir /w; echo 1 > /w/x")
    snapshot = stack.dsec("snapshot", "create", sandbox, "--name", "cli", "--wait").stdout.strip()
    stack.dsec("sandbox", "exec", "--shell", sandbox, "rm -r /w")
    stack.dsec("snapshot", "rollback", sandbox, snapshot)
    children = json.loads(stack.dsec("snapshot", "fork", sandbox, "2", "--json").stdout)
    restored = stack.dsec("snapshot", "restore", snapshot).stdout.strip()
    created = stack.dsec("sandbox", "create", "--snapshot", snapshot, "-e", "A=b").stdout.strip()
    ids = [sandbox, restored, created, *(child["sandbox_id"] for child in children)]
    for one in ids:
        assert stack.dsec("sandbox", "exec", one, "cat", "/w/x").stdout == "1\n"
    info = json.loads(stack.dsec("snapshot", "inspect", snapshot, "--json").stdout)
    assert (info["durable"], info["name"]) == (True, "cli")
    assert snapshot in stack.dsec("snapshot", "list", "--sandbox", sandbox).stdout
    packed = stack.dsec("snapshot", "pack-diff", snapshot, "cli-packed@1", "--kind", "toolkit")
    assert packed.stdout.startswith("cli-packed@1 sha256:")
    stack.dsec("sandbox", "rm", *ids)
    stack.dsec("snapshot", "rm", snapshot)
    assert snapshot not in stack.dsec("snapshot", "list", "--json").stdout


def test_the_page_about_sandboxes_shows_snapshots() -> None:
    page: Page = next(page for page in pages() if page.name == "docs/sdk.md")
    assert any("sandbox.snapshot(" in block.text for block in page.blocks)
