"""The SDK against a node and a scheduler of a few lines each, over a real NATS with accounts."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from dsec import CommandFailed, DSecClient, DsecError, ErrorCode, sync
from dsec_common import subjects
from dsec_common.bus import Bus, Request
from dsec_common.subjects import ScopedId
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_common.wire import sandbox as wire
from dsec_common.wire.base import Message
from dsec_common.wire.files import (
    FILE_CHUNK_BYTES,
    FileChunk,
    FileInfo,
    FileKind,
    FileWritten,
    ReadFile,
    ReadTree,
    StatFile,
    TreeChunk,
    WriteFile,
)
from dsec_common.wire.sandbox import CreateSandbox, EndCause, ExecCommand, SandboxCreated

NODE = "node-1"

Chunk = TypeVar("Chunk", FileChunk, TreeChunk)


class Node:
    """Speaks the wire protocol of one node; files are bytes in a dict."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.files: dict[str, bytes] = {}
        self.archives: dict[str, bytes] = {}
        self.pieces: dict[str, dict[int, bytes]] = {}
        self.version = 0
        self.changes_while_read = 0
        self.lies = ""
        self.creates: list[CreateSandbox] = []
        self.refusals: list[DsecError] = []
        self.execs: list[ExecCommand] = []
        self.in_flight = self.most_in_flight = 0

    async def serve(self, scheduler: Bus) -> None:
        await scheduler.serve(subjects.any_project("sandbox.create"), CreateSandbox, self.create)
        for verb, kind, handler in (
            ("exec", ExecCommand, self.exec),
            ("read_file", ReadFile, self.read),
            ("read_tree", ReadTree, self.read_tree),
            ("write_file", WriteFile, self.write),
            ("stat_file", StatFile, self.stat),
            ("delete", wire.DeleteSandbox, self.delete),
        ):
            await self.bus.serve(subjects.any_project_sandbox(NODE, verb), kind, handler)  # type: ignore[arg-type]

    async def create(self, request: Request[CreateSandbox]) -> Message:
        self.creates.append(request.message)
        if self.refusals:
            raise self.refusals.pop(0)
        return SandboxCreated(
            sandbox_id=str(ScopedId(NODE, "one")),
            node=NODE,
            created_at=1.0,
            layers=(request.message.base,),
            limits=request.message.limits,
        )

    async def exec(self, request: Request[ExecCommand]) -> Message:
        self.execs.append(request.message)
        return wire.ExecResult(exit_code=7, stderr=b"no", stdout=request.message.stdin)

    async def read(self, request: Request[ReadFile]) -> Message:
        asked = request.message
        if asked.path not in self.files:
            raise DsecError(ErrorCode.NOT_FOUND, f"{asked.path} does not exist")
        data = self.files[asked.path]
        if asked.offset and self.changes_while_read:
            self.changes_while_read -= 1
            self.version += 1
        piece = b"" if asked.final else data[asked.offset : asked.offset + asked.length]
        is_whole = asked.final or len(piece) == len(data)
        return self._told(
            FileChunk(
                data=piece,
                offset=asked.offset,
                size_bytes=len(data),
                end_of_file=asked.offset + len(piece) >= len(data),
                mode=0o6755,
                version=str(self.version),
                sha256=hashlib.sha256(data).hexdigest() if is_whole else "",
            )
        )

    async def read_tree(self, request: Request[ReadTree]) -> Message:
        asked = request.message
        data = self.archives[asked.path]
        piece = data[asked.offset : asked.offset + FILE_CHUNK_BYTES]
        if asked.offset + len(piece) < len(data):
            return TreeChunk(data=piece, offset=asked.offset)
        return self._told(
            TreeChunk(
                data=piece,
                offset=asked.offset,
                end=True,
                size_bytes=len(data),
                sha256=hashlib.sha256(data).hexdigest(),
            )
        )

    def _told(self, chunk: Chunk) -> Chunk:
        """Return the chunk with the one untruth that the test asks for."""
        if self.lies == "hash" and chunk.sha256:
            return msgspec.structs.replace(chunk, sha256=hashlib.sha256(b"other").hexdigest())
        if self.lies == "no hash":
            return msgspec.structs.replace(chunk, sha256="")
        if self.lies in {"more", "less"}:
            size_bytes = chunk.size_bytes + (1 if self.lies == "more" else -1)
            return msgspec.structs.replace(chunk, size_bytes=size_bytes)
        return chunk

    async def write(self, request: Request[WriteFile]) -> Message:
        asked = request.message
        pieces = self.pieces.setdefault(asked.upload_id, {})
        pieces[asked.offset] = asked.data
        if asked.final:
            data = b"".join(pieces[offset] for offset in sorted(pieces))
            assert len(data) == asked.size_bytes
            assert hashlib.sha256(data).hexdigest() == asked.sha256
            self.files[asked.path] = data
        return FileWritten(received_bytes=len(asked.data), complete=asked.final)

    async def stat(self, request: Request[StatFile]) -> Message:
        path = request.message.path
        kind = FileKind.DIRECTORY if path in self.archives else FileKind.FILE
        return FileInfo(path=path, kind=kind)

    async def delete(self, _: Request[wire.DeleteSandbox]) -> Message:
        return wire.SandboxDeleted(sandbox_id=f"{NODE}.one", end_cause=EndCause.DELETED)


@pytest.fixture
async def nats() -> AsyncIterator[NatsForTests]:
    async with nats_for_tests() as server:
        yield server


@pytest.fixture
async def node(nats: NatsForTests) -> AsyncIterator[Node]:
    async with nats.service("sandboxd", NODE) as bus, nats.service("scheduler") as scheduler:
        peer = Node(bus)
        await peer.serve(scheduler)
        await bus.flush()
        await scheduler.flush()
        yield peer


def _client(nats: NatsForTests) -> DSecClient:
    return DSecClient(nats.server.url, nats.auth.project("default"))


@pytest.mark.parametrize("size", [0, 1, 128 * 1024, 128 * 1024 + 1, 3_000_000])
async def test_a_file_of_any_size_arrives_whole_both_ways(
    nats: NatsForTests, node: Node, size: int
) -> None:
    data = os.urandom(size)
    async with _client(nats) as client:
        sandbox = client.sandbox(f"{NODE}.one")
        await sandbox.write_file("/tmp/a", data)
        assert node.files["/tmp/a"] == data
        assert await sandbox.read_file("/tmp/a") == data


async def test_local_files_go_in_and_out_and_bring_no_setuid(
    nats: NatsForTests, node: Node, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(500_000))
    target.write_text("old")
    async with _client(nats) as client:
        sandbox = client.sandbox(f"{NODE}.one")
        assert await sandbox.upload(source, "/x") == 500_000
        assert await sandbox.download("/x", target) == 500_000
    assert target.read_bytes() == source.read_bytes()
    assert target.stat().st_mode & 0o7777 == 0o755
    assert sorted(os.listdir(tmp_path)) == ["source", "target"]  # noqa: PTH208  a test's own few files


async def test_a_failed_download_leaves_the_local_file_as_it_was(
    nats: NatsForTests, node: Node, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.write_text("old")
    async with _client(nats) as client:
        with pytest.raises(DsecError, match="does not exist"):
            await client.sandbox(f"{NODE}.one").download("/missing", target)
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["target"]  # noqa: PTH208  as above


async def test_a_file_that_changes_while_it_is_read_is_read_again_and_then_refused(
    nats: NatsForTests, node: Node
) -> None:
    node.files["/log"] = bytes(1_000_000)
    async with _client(nats) as client:
        sandbox = client.sandbox(f"{NODE}.one")
        node.changes_while_read = 1
        assert await sandbox.read_file("/log") == node.files["/log"]
        node.changes_while_read = 1_000
        with pytest.raises(DsecError, match="changed while it was being read") as caught:
            await sandbox.read_file("/log")
    assert caught.value.code is ErrorCode.CONFLICT


LIES = ("hash", "no hash", "more", "less")


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("size", [1000, 500_000])
async def test_a_file_that_is_not_what_its_hash_and_size_say_is_no_download(
    nats: NatsForTests, node: Node, tmp_path: Path, lie: str, size: int
) -> None:
    node.files["/x"] = os.urandom(size)
    target = tmp_path / "target"
    target.write_text("old")
    async with _client(nats) as client:
        sandbox = client.sandbox(f"{NODE}.one")
        node.lies = lie
        for reading in (sandbox.download("/x", target), sandbox.read_file("/x")):
            with pytest.raises(DsecError) as caught:
                await reading
            assert caught.value.code is ErrorCode.CONFLICT
        assert target.read_text() == "old"
        assert os.listdir(tmp_path) == ["target"]  # noqa: PTH208  as above
        node.lies = ""
        assert await sandbox.download("/x", target) == size
    assert target.read_bytes() == node.files["/x"]


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("size", [1000, 500_000])
async def test_a_directory_that_is_not_what_its_hash_and_size_say_is_no_download(
    nats: NatsForTests, node: Node, tmp_path: Path, lie: str, size: int
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(size))
    with tarfile.open(tmp_path / "tar", "w", format=tarfile.GNU_FORMAT) as tar:
        tar.add(source, "file")
    node.archives["/d"] = (tmp_path / "tar").read_bytes()
    (tmp_path / "tar").unlink()
    target.mkdir()
    (target / "kept").write_text("old")
    async with _client(nats) as client:
        sandbox = client.sandbox(f"{NODE}.one")
        node.lies = lie
        with pytest.raises(DsecError) as caught:
            await sandbox.download("/d", target)
        assert caught.value.code is ErrorCode.CONFLICT
        assert os.listdir(target) == ["kept"]  # noqa: PTH208  as above
        assert sorted(os.listdir(tmp_path)) == ["source", "target"]  # noqa: PTH208  as above
        node.lies = ""
        assert await sandbox.download("/d", target) == 1
    assert (target / "file").read_bytes() == source.read_bytes()


async def test_a_full_platform_is_asked_again_and_a_lasting_refusal_is_told(
    nats: NatsForTests, node: Node
) -> None:
    full = DsecError(ErrorCode.EXHAUSTED, "no room", retry_after_s=0.01)
    async with _client(nats) as client:
        node.refusals = [full, full]
        sandbox = await client.create_sandbox("python@1", cpus=0.5)
        assert sandbox.id == f"{NODE}.one"
        assert len(node.creates) == 3
        assert node.creates[0].limits.cpus == 0.5
        # However often: the caller has said how long the sandbox may be waited for.
        node.refusals = [full] * 20
        assert (await client.create_sandbox("python@1")).id == f"{NODE}.one"
        assert len(node.creates) == 24
        node.refusals = [full] * 1000
        with pytest.raises(DsecError, match="no room"):
            await client.create_sandbox("python@1", timeout_s=1.0)
        assert len(node.creates) > 25
        node.refusals = [DsecError(ErrorCode.INVALID, "memory is 0")]
        asked = len(node.creates)
        with pytest.raises(DsecError, match="memory is 0"):
            await client.create_sandbox("python@1", memory_bytes=0)
        assert len(node.creates) == asked + 1


async def test_a_command_is_a_shell_line_or_a_list_and_checked_when_asked(
    nats: NatsForTests, node: Node
) -> None:
    async with _client(nats) as client:
        sandbox = client.sandbox(f"{NODE}.one")
        result = await sandbox.exec("exit 7", stdin="héllo")
        assert node.execs[0].argv == ("/bin/sh", "-c", "exit 7")
        assert (result.exit_code, result.stdout_text) == (7, "héllo")
        with pytest.raises(CommandFailed, match="exited with 7"):
            await sandbox.exec(["false", "x"], check=True)
        assert node.execs[1].argv == ("false", "x")


async def test_the_context_deletes_and_a_sandbox_that_is_forgotten_counts_as_deleted(
    nats: NatsForTests, node: Node
) -> None:
    async with _client(nats) as client:
        async with await client.create_sandbox("python@1") as sandbox:
            pass
        assert await sandbox.delete() is EndCause.DELETED


async def test_an_impossible_id_never_reaches_a_subject(nats: NatsForTests) -> None:
    async with _client(nats) as client:
        for name in ("*", "a.*", "a.b.c", "a b.c", ">", "x" * 300):
            with pytest.raises(DsecError, match="not a valid sandbox id"):
                client.sandbox(name)


async def test_a_client_that_is_not_connected_says_how_to_use_it(nats: NatsForTests) -> None:
    with pytest.raises(DsecError, match="async with"):
        await _client(nats).list_sandboxes()


async def test_without_a_server_the_error_comes_in_time_and_names_the_address(
    nats: NatsForTests,
) -> None:
    client = DSecClient("nats://127.0.0.1:1", nats.auth.project("default"), connect_timeout_s=0.2)
    with pytest.raises(DsecError, match=r"127\.0\.0\.1:1"):
        await client.connect()


async def test_the_sync_twin_does_the_same_without_await(nats: NatsForTests, node: Node) -> None:
    def use() -> tuple[str, bytes, int | None]:
        with sync.DSecClient(nats.server.url, nats.auth.project("default")) as client:
            assert client.project == "default"
            with client.create_sandbox("python@1", toolkits=["a@1"]) as sandbox:
                sandbox.write_file("/s", "text")
                return sandbox.id, sandbox.read_file("/s"), sandbox.exec("x").exit_code

    assert await asyncio.to_thread(use) == (f"{NODE}.one", b"text", 7)
