from __future__ import annotations

import asyncio
import json
import os
import uuid
from pathlib import Path

import nats
import pytest

from dsec import CommandFailed, DsecError, ErrorCode, sync
from dsec_common import subjects
from dsec_common.wire.base import CONTENT_TYPE_HEADER, JSON
from dsec_common.wire.files import FileKind
from dsec_common.wire.sandbox import EndCause, SandboxState
from layer_builders import docker_save_bytes, file_member, tar_bytes, write_oci_layout
from stack import Stack

MIB = 1024 * 1024


async def test_a_sandbox_is_created_used_and_deleted(stack: Stack, base: str) -> None:
    async with stack.client() as client:
        async with await client.create_sandbox(base, env={"WHO": "agent"}) as sandbox:
            assert sandbox.node in stack.node_names
            result = await sandbox.exec("echo $WHO; echo oops >&2; exit 3", env={"X": "1"})
            assert (result.exit_code, result.stdout, result.stderr) == (3, b"agent\n", b"oops\n")
            python = await sandbox.exec(["python3", "-c", "print(6 * 7)"], check=True)
            assert python.stdout_text == "42\n"
            echoed = await sandbox.exec(["cat"], stdin="tea ☕", check=True)
            assert echoed.stdout_text == "tea ☕"
            info = await sandbox.inspect()
            assert info.state is SandboxState.RUNNING
            assert info.layers[0]
        assert (await sandbox.inspect()).end_cause is EndCause.DELETED
        assert await sandbox.delete() is EndCause.DELETED
        with pytest.raises(DsecError) as caught:
            await sandbox.exec("true")
        assert caught.value.code in {ErrorCode.EXPIRED, ErrorCode.NOT_FOUND}


async def test_what_a_file_cannot_be_is_told_in_words(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    async with (
        stack.client() as client,
        await client.create_sandbox(base, disk_bytes=4 * MIB) as sandbox,
    ):
        with pytest.raises(DsecError, match="writable layer is full") as caught:
            await sandbox.write_file("/big", b"x" * (32 * MIB))
        assert caught.value.code is ErrorCode.EXHAUSTED
        assert not caught.value.retryable
        assert "dsec-" not in (await sandbox.exec("ls -a /")).stdout_text
        with pytest.raises(DsecError, match="'/usr' is a directory"):
            await sandbox.read_file("/usr")
        await sandbox.make_directory("/mine", mode=0o755)
        with pytest.raises(DsecError) as caught:
            await sandbox.write_file("/mine/deep/file", "x", user="nobody")
        assert caught.value.code is ErrorCode.DENIED
        with pytest.raises(DsecError, match="'/proc/mine': Permission denied"):
            await sandbox.write_file("/proc/mine", "x")
        with pytest.raises(FileNotFoundError, match=r"/nowhere'$"):
            await sandbox.download("/etc/passwd", tmp_path / "nowhere/passwd")


async def test_files_go_both_ways_whole(stack: Stack, base: str, tmp_path: Path) -> None:
    data = os.urandom(2 * MIB + 17)
    async with (
        stack.client() as client,
        await client.create_sandbox(base) as sandbox,
    ):
        await sandbox.write_file("/work/deep/data.bin", data, mode=0o640)
        assert await sandbox.read_file("/work/deep/data.bin") == data
        info = await sandbox.stat("/work/deep/data.bin")
        assert (info.kind, info.size_bytes, info.mode & 0o777) == (FileKind.FILE, len(data), 0o640)
        await sandbox.write_file("/work/text", "schön")
        assert await sandbox.read_text("/work/text") == "schön"
        await sandbox.make_directory("/work/empty")
        names = [entry.path.rpartition("/")[2] for entry in await sandbox.list_directory("/work")]
        assert names == ["deep", "empty", "text"]
        count = await sandbox.download("/work", tmp_path / "work")
        assert count == 2
        assert (tmp_path / "work/deep/data.bin").read_bytes() == data
        assert await sandbox.upload(tmp_path / "work", "/copy") == 2
        same = await sandbox.exec("cmp /work/deep/data.bin /copy/deep/data.bin")
        assert same.ok
        with pytest.raises(DsecError, match="nothing-here") as caught:
            await sandbox.read_file("/work/nothing-here")
        assert caught.value.code is ErrorCode.NOT_FOUND


async def test_listing_finds_by_label_and_keeps_the_ended_apart(stack: Stack, base: str) -> None:
    run = uuid.uuid4().hex
    async with stack.client() as client:
        first = await client.create_sandbox(base, labels={"run": run, "n": "1"})
        second = await client.create_sandbox(base, labels={"run": run, "n": "2"})
        found = await client.sandboxes(labels={"run": run})
        assert [sandbox.id for sandbox in found] == [first.id, second.id]
        await first.delete()
        living = await client.list_sandboxes(labels={"run": run})
        assert [info.sandbox_id for info in living] == [second.id]
        every = await client.list_sandboxes(labels={"run": run}, include_ended=True)
        assert [info.end_cause for info in every] == [EndCause.DELETED, None]
        await second.delete()


async def test_the_same_key_is_the_same_sandbox_and_with_other_arguments_a_conflict(
    stack: Stack, base: str
) -> None:
    key = uuid.uuid4().hex
    async with stack.client() as client:
        first, again = await asyncio.gather(
            *(client.create_sandbox(base, idempotency_key=key) for _ in range(2))
        )
        assert first.id == again.id
        with pytest.raises(DsecError) as caught:
            await client.create_sandbox(base, idempotency_key=key, cpus=0.5)
        assert caught.value.code is ErrorCode.CONFLICT
        await first.delete()


async def test_the_durable_door_gives_a_sandbox_too(stack: Stack, base: str) -> None:
    async with (
        stack.client() as client,
        await client.queue_sandbox(base, timeout_s=30) as sandbox,
    ):
        assert (await sandbox.exec("echo queued")).stdout == b"queued\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"base": "no-such-layer@1"}, ErrorCode.NOT_FOUND),
        ({"base": "host@no-such-version"}, ErrorCode.NOT_FOUND),
        ({"base": "host"}, ErrorCode.INVALID),
        ({"base": "host@1", "memory_bytes": 0}, ErrorCode.INVALID),
        ({"base": "host@1", "memory_bytes": 2**50}, ErrorCode.EXHAUSTED),
        ({"base": "host@1", "cpus": -1.0}, ErrorCode.INVALID),
        ({"base": "host@1", "env": {"A=B": "x"}}, ErrorCode.INVALID),
        ({"base": "host@1", "rollout_id": "*.>"}, ErrorCode.INVALID),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused_in_its_own_words(
    stack: Stack, base: str, arguments: dict[str, object], code: ErrorCode
) -> None:
    async with stack.client() as client:
        with pytest.raises(DsecError) as caught:
            await client.create_sandbox(**arguments)  # type: ignore[arg-type]
    assert caught.value.code is code, caught.value.message
    assert len(caught.value.message) > 20


async def test_commands_that_misbehave_are_contained(stack: Stack, base: str) -> None:
    async with (
        stack.client() as client,
        await client.create_sandbox(base) as sandbox,
    ):
        with pytest.raises(DsecError, match="no-such-program") as caught:
            await sandbox.exec(["no-such-program"])
        assert caught.value.code is ErrorCode.NOT_FOUND
        flood = await sandbox.exec("head -c 104857600 /dev/zero", timeout_s=60)
        assert (flood.exit_code, flood.stdout_truncated) == (0, True)
        assert len(flood.stdout) == 256 * 1024
        bytes_out = await sandbox.exec(r"printf '\377\376x'")
        assert (bytes_out.stdout, bytes_out.stdout_text) == (b"\xff\xfex", "\ufffd\ufffdx")
        stubborn = await sandbox.exec(
            "trap '' TERM; echo before; while :; do sleep 1; done", timeout_s=1.5
        )
        assert stubborn.timed_out
        assert stubborn.stdout == b"before\n"
        with pytest.raises(CommandFailed) as late:
            await sandbox.exec("sleep 60", timeout_s=0.3, check=True)
        assert late.value.code is ErrorCode.COMMAND_TIMEOUT
        daemon = await sandbox.exec("(setsid sleep 300 >/dev/null 2>&1 &); echo left", timeout_s=9)
        assert daemon.stdout == b"left\n"
        assert (await sandbox.exec("echo still here")).stdout == b"still here\n"


async def test_many_sandboxes_at_once_are_apart(stack: Stack, base: str) -> None:
    async with stack.client() as client:

        async def one(number: int) -> bytes:
            async with await client.create_sandbox(base) as sandbox:
                await sandbox.write_file("/mine", str(number))
                return await sandbox.read_file("/mine")

        assert await asyncio.gather(*map(one, range(16))) == [b"%d" % n for n in range(16)]


async def test_any_nats_client_can_ask_in_json(stack: Stack, base: str) -> None:
    connection = await nats.connect(
        stack.context.nats_servers[0], user_credentials=stack.context.credentials
    )
    headers = {CONTENT_TYPE_HEADER: JSON}
    try:
        reply = await connection.request(
            subjects.sandbox_create("default"),
            json.dumps({"type": "CreateSandbox", "base": base}).encode(),
            timeout=30,
            headers=headers,
        )
        created = json.loads(reply.data)
        assert reply.headers is not None
        assert reply.headers[CONTENT_TYPE_HEADER] == JSON
        subject = f"dsec.v1.default.sandbox.{created['sandbox_id']}"
        ran = await connection.request(
            f"{subject}.exec", b'{"argv": ["echo", "hi"]}', timeout=30, headers=headers
        )
        assert json.loads(ran.data)["stdout"] == "aGkK"
        wrong = await connection.request(
            f"{subject}.exec", b'{"argv": "echo"}', timeout=30, headers=headers
        )
        assert json.loads(wrong.data)["code"] == "invalid"
        assert wrong.headers is not None
        assert wrong.headers["Nats-Service-Error-Code"] == "400"
        gone = await connection.request(f"{subject}.delete", b"{}", timeout=30, headers=headers)
        assert json.loads(gone.data)["end_cause"] == "deleted"
    finally:
        await connection.close()


async def test_another_project_sees_and_reaches_nothing(stack: Stack, base: str) -> None:
    stack.dsec("project", "create", "stranger")
    async with (
        stack.client() as client,
        stack.client("stranger") as stranger,
        await client.create_sandbox(base) as sandbox,
    ):
        assert await stranger.list_sandboxes(include_ended=True) == []
        assert await stranger.layers.list() == []
        with pytest.raises(DsecError) as caught:
            await stranger.sandbox(sandbox.id).exec("true")
        assert caught.value.code is ErrorCode.NOT_FOUND
        assert await stranger.sandbox(sandbox.id).delete() is EndCause.DELETED
        assert (await sandbox.exec("echo alive")).stdout == b"alive\n"
        with pytest.raises(DsecError) as caught:
            await stranger.create_sandbox(base)
        assert caught.value.code is ErrorCode.NOT_FOUND
    stack.dsec("project", "rm", "stranger")


async def test_layers_are_imported_found_and_removed(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    (tmp_path / "tree/opt").mkdir(parents=True)
    (tmp_path / "tree/opt/tool").write_text("#!/bin/sh\necho tool\n")
    (tmp_path / "tree/opt/tool").chmod(0o755)
    stages: list[str] = []
    async with stack.client() as client:
        layer = await client.layers.import_directory(
            tmp_path / "tree",
            kind="toolkit",
            name="tool",
            version="1",
            progress=lambda stage, *_: stages.append(stage),
        )
        assert layer.nodes == tuple(sorted(stack.node_names))
        assert stages[0] == "upload"
        assert (await client.layers.inspect("tool@1")).digest == layer.digest
        assert "tool@1" in [found.reference for found in await client.layers.list()]
        async with await client.create_sandbox(base, toolkits=["tool@1"]) as sandbox:
            assert (await sandbox.exec(["/opt/tool"], check=True)).stdout == b"tool\n"
        (tmp_path / "tree/opt/tool").write_text("#!/bin/sh\necho other\n")
        with pytest.raises(DsecError) as caught:
            await client.layers.import_directory(
                tmp_path / "tree", kind="toolkit", name="tool", version="1"
            )
        assert caught.value.code is ErrorCode.CONFLICT
        await client.layers.remove("tool@1")
        with pytest.raises(DsecError, match="tool") as caught:
            await client.layers.inspect("tool@1")
        assert caught.value.code is ErrorCode.NOT_FOUND


async def test_a_container_image_becomes_one_layer(stack: Stack, base: str, tmp_path: Path) -> None:
    lower = tar_bytes([file_member("opt/kept", b"kept"), file_member("opt/gone", b"gone")])
    upper = tar_bytes([file_member("opt/.wh.gone", b""), file_member("opt/new", b"new")])
    write_oci_layout(tmp_path / "layout", [lower, upper])
    (tmp_path / "saved.tar").write_bytes(docker_save_bytes([lower, upper]))
    async with stack.client() as client:
        first = await client.layers.import_oci(
            tmp_path / "layout", kind="workspace", name="image", version="1"
        )
        second = await client.layers.import_oci(
            tmp_path / "saved.tar", kind="workspace", name="image", version="2"
        )
        assert first.digest == second.digest
        async with await client.create_sandbox(base, workspace="image@1") as sandbox:
            names = [entry.path for entry in await sandbox.list_directory("/opt")]
            assert [name.rpartition("/")[2] for name in names] == ["kept", "new"]
        for reference in ("image@1", "image@2"):
            await client.layers.remove(reference)


def test_the_sync_twin_runs_the_same_story(stack: Stack, base: str) -> None:
    with (
        sync.DSecClient(stack.context.nats_servers, stack.context.credentials) as client,
        client.create_sandbox(base) as sandbox,
    ):
        sandbox.write_file("/hello", "sync")
        assert sandbox.exec("cat /hello", check=True).stdout_text == "sync"
        assert sandbox.id in [found.id for found in client.sandboxes()]
        assert client.layers.inspect(base).reference == base
