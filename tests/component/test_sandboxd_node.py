"""The node daemon over real NATS on the real kernel, asked as scheduler and projects ask it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from dsec_common import subjects
from dsec_common.clock import SystemClock
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.files import (
    FILE_CHUNK_BYTES,
    DirectoryListing,
    DirectoryMade,
    FileChunk,
    FileInfo,
    FileKind,
    FileWritten,
    ListDirectory,
    MakeDirectory,
    ReadFile,
    StatFile,
    WriteFile,
)
from dsec_common.wire.sandbox import (
    MIB,
    CreateSandbox,
    DeleteSandbox,
    EndCause,
    InspectSandbox,
    Limits,
    SandboxDeleted,
    SandboxEnded,
    SandboxInfo,
    SandboxRunning,
    SandboxState,
)
from refusals import refused
from sandboxd_node import BASE, NODE, TOOLKIT, NodeForTests, connect_to_agent_socket, node_for_tests

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")


async def test_a_sandbox_is_created_used_and_deleted(node: NodeForTests) -> None:
    created = await node.place(CreateSandbox(base=BASE, toolkits=(TOOLKIT,), env={"A": "b"}))
    assert created.layers == (BASE, TOOLKIT)
    result = await node.exec(
        created.sandbox_id, "sh", "-c", "echo $A; cat /opt/tools/hello; exit 3"
    )
    assert (result.exit_code, result.stdout) == (3, b"b\nhello from the toolkit\n")
    info = await node.ask(created.sandbox_id, "inspect", InspectSandbox(), SandboxInfo)
    assert info.state is SandboxState.RUNNING
    assert info.pids_used
    deleted = await node.ask(created.sandbox_id, "delete", DeleteSandbox(), SandboxDeleted)
    assert deleted.end_cause is EndCause.DELETED
    running = await node.event_of(created.sandbox_id, SandboxRunning)
    ended = await node.event_of(created.sandbox_id, SandboxEnded)
    assert running.created.sandbox_id == created.sandbox_id
    assert ended.cause is EndCause.DELETED


async def test_a_deleted_sandbox_keeps_its_cause_and_stays_deleted(node: NodeForTests) -> None:
    created = await node.place()
    for _ in range(2):
        await node.ask(created.sandbox_id, "delete", DeleteSandbox(), SandboxDeleted)
    error = await refused(node.exec(created.sandbox_id, "true"))
    assert (error.code, error.details["end_cause"]) == (ErrorCode.EXPIRED, "deleted")
    info = await node.ask(created.sandbox_id, "inspect", InspectSandbox(), SandboxInfo)
    assert info.end_cause is EndCause.DELETED


async def test_the_same_placement_twice_is_one_sandbox(node: NodeForTests) -> None:
    first, second = await asyncio.gather(
        node.place(message_id="m1", local="same"), node.place(message_id="m1", local="same")
    )
    assert first.created_at == second.created_at
    error = await refused(node.place(message_id="m2", local="same"))
    assert error.code is ErrorCode.CONFLICT


async def test_another_project_finds_nothing(node: NodeForTests) -> None:
    created = await node.place()
    for verb, message, reply in (
        ("inspect", InspectSandbox(), SandboxInfo),
        ("delete", DeleteSandbox(), SandboxDeleted),
        ("read_file", ReadFile(path="/etc/passwd"), FileChunk),
    ):
        error = await refused(
            node.ask(created.sandbox_id, verb, message, reply, bus=node.other, project="other")
        )
        assert error.code is ErrorCode.NOT_FOUND
    assert (await node.exec(created.sandbox_id, "true")).exit_code == 0


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (CreateSandbox(base="nothing@1"), ErrorCode.NOT_FOUND),
        (CreateSandbox(base="base"), ErrorCode.INVALID),
        (CreateSandbox(base=TOOLKIT), ErrorCode.INVALID),
        (CreateSandbox(base=BASE, limits=Limits(memory_bytes=0)), ErrorCode.INVALID),
        (CreateSandbox(base=BASE, limits=Limits(memory_bytes=1 << 50)), ErrorCode.EXHAUSTED),
    ],
)
async def test_a_placement_that_cannot_be_is_refused(
    node: NodeForTests, request_: CreateSandbox, code: ErrorCode
) -> None:
    assert (await refused(node.place(request_))).code is code
    assert node.service.heartbeat().allocated.sandboxes == 0


async def test_a_sandbox_ready_too_late_is_removed(node: NodeForTests) -> None:
    error = await refused(node.place(valid_s=-1.0, local="late"))
    assert error.code is ErrorCode.TIMEOUT
    await node.until(lambda: node.service.heartbeat().allocated.sandboxes == 0)


async def test_a_time_to_live_ends_a_sandbox(node: NodeForTests) -> None:
    created = await node.place(CreateSandbox(base=BASE, ttl_s=0.3))
    ended = await node.event_of(created.sandbox_id, SandboxEnded)
    assert ended.cause is EndCause.EXPIRED


async def test_a_command_that_is_not_there_is_told_apart_from_its_failure(
    node: NodeForTests,
) -> None:
    created = await node.place()
    error = await refused(node.exec(created.sandbox_id, "no-such-program"))
    assert (error.code, error.details["what"]) == (ErrorCode.NOT_FOUND, "command")
    error = await refused(node.exec(created.sandbox_id, "true", cwd="/nowhere"))
    assert (error.code, error.details["what"]) == (ErrorCode.NOT_FOUND, "directory")
    result = await node.exec(created.sandbox_id, "sh", "-c", "exit 127")
    assert result.exit_code == 127


async def test_a_command_that_takes_too_long_gives_what_it_printed(node: NodeForTests) -> None:
    created = await node.place()
    result = await node.exec(created.sandbox_id, "sh", "-c", "echo before; sleep 60", timeout_s=1.5)
    assert result.timed_out
    assert result.stdout == b"before\n"


async def test_output_is_bounded_and_says_so(node: NodeForTests) -> None:
    created = await node.place()
    result = await node.exec(created.sandbox_id, "head", "-c", "10000000", "/dev/zero")
    assert result.stdout_truncated
    assert len(result.stdout) == 256 * 1024


async def test_commands_run_while_a_sandbox_is_deleted_end_with_its_cause(
    node: NodeForTests,
) -> None:
    created = await node.place()
    running = asyncio.create_task(
        refused(node.exec(created.sandbox_id, "sh", "-c", "echo x > /tmp/started; sleep 60"))
    )
    while True:
        try:
            await node.ask(created.sandbox_id, "stat_file", StatFile(path="/tmp/started"), FileInfo)
            break
        except DsecError:
            continue
    await node.ask(created.sandbox_id, "delete", DeleteSandbox(), SandboxDeleted)
    error = await running
    assert error.code is ErrorCode.EXPIRED


async def test_files_go_in_and_out_by_pieces_in_any_order(node: NodeForTests) -> None:
    created = await node.place()
    content = os.urandom(5 * FILE_CHUNK_BYTES + 17)
    digest = hashlib.sha256(content).hexdigest()
    pieces = [
        WriteFile(
            path="/new/place/data",
            upload_id="u1",
            data=content[offset : offset + FILE_CHUNK_BYTES],
            offset=offset,
            final=offset + FILE_CHUNK_BYTES >= len(content),
            size_bytes=len(content),
            sha256=digest,
            mode=0o640,
        )
        for offset in range(0, len(content), FILE_CHUNK_BYTES)
    ]
    answers = await asyncio.gather(
        *(
            node.ask(created.sandbox_id, "write_file", piece, FileWritten)
            for piece in reversed(pieces)
        )
    )
    assert [answer.complete for answer in answers] == [True] + [False] * (len(pieces) - 1)
    read = b""
    versions = set()
    while True:
        chunk = await node.ask(
            created.sandbox_id,
            "read_file",
            ReadFile(path="/new/place/data", offset=len(read)),
            FileChunk,
        )
        read += chunk.data
        versions.add(chunk.version)
        if chunk.end_of_file:
            break
    assert read == content
    assert len(versions) == 1
    assert chunk.mode == 0o640
    listing = await node.ask(
        created.sandbox_id, "list_directory", ListDirectory(path="/new/place"), DirectoryListing
    )
    assert [(entry.path, entry.kind) for entry in listing.entries] == [("data", FileKind.FILE)]


async def test_a_file_that_is_not_what_was_announced_changes_nothing(node: NodeForTests) -> None:
    created = await node.place()
    wrong = WriteFile(path="/tmp/x", upload_id="u1", data=b"abc", size_bytes=3, sha256="00")
    error = await refused(node.ask(created.sandbox_id, "write_file", wrong, FileWritten))
    assert error.code is ErrorCode.INVALID
    listing = await node.ask(
        created.sandbox_id, "list_directory", ListDirectory(path="/tmp"), DirectoryListing
    )
    assert listing.entries == ()


async def test_an_abandoned_upload_is_removed(tmp_path: Path, layers: Path) -> None:
    async with node_for_tests(tmp_path, layers, upload_idle_s=1.0) as node:
        created = await node.place()
        piece = WriteFile(path="/tmp/x", upload_id="u1", data=b"abc", final=False)
        await node.ask(created.sandbox_id, "write_file", piece, FileWritten)

        listing = await node.ask(
            created.sandbox_id, "list_directory", ListDirectory(path="/tmp"), DirectoryListing
        )
        assert listing.entries == ()  # it has no name yet

        def processes() -> int:
            [procs] = Path("/sys/fs/cgroup/unified").glob(f"dsec-{NODE}/*/cgroup.procs")
            return len(procs.read_text().split())

        assert processes() > 1  # what listed may still be ending
        async with asyncio.timeout(20):
            while processes() > 1:
                await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("verb", "message", "code", "reason"),
    [
        ("read_file", ReadFile(path="/nothing"), ErrorCode.NOT_FOUND, "not_found"),
        ("read_file", ReadFile(path="/tmp"), ErrorCode.INVALID, "is_directory"),
        ("read_file", ReadFile(path="etc/passwd"), ErrorCode.INVALID, "invalid_path"),
        ("read_file", ReadFile(path="/etc\0"), ErrorCode.INVALID, "invalid_path"),
        (
            "read_file",
            ReadFile(path="/root/x", user="1000"),
            ErrorCode.DENIED,
            "permission_denied",
        ),
        (
            "write_file",
            WriteFile(path="/etc/x", upload_id="u", user="1000"),
            ErrorCode.DENIED,
            "permission_denied",
        ),
        ("write_file", WriteFile(path="/tmp/", upload_id="u"), ErrorCode.INVALID, "is_directory"),
        ("write_file", WriteFile(path="/tmp", upload_id="u"), ErrorCode.INVALID, "is_directory"),
        ("stat_file", StatFile(path="/nothing"), ErrorCode.NOT_FOUND, "not_found"),
    ],
)
async def test_file_errors_say_why(
    node: NodeForTests, verb: str, message: Any, code: ErrorCode, reason: str
) -> None:
    created = await node.place()
    error = await refused(node.ask(created.sandbox_id, verb, message, FileChunk))
    assert (error.code, error.details.get("reason")) == (code, reason)


async def test_directories_are_made_with_those_above_them(node: NodeForTests) -> None:
    created = await node.place()
    for _ in range(2):
        await node.ask(
            created.sandbox_id, "make_directory", MakeDirectory(path="/a/b/c"), DirectoryMade
        )
    found = await node.ask(created.sandbox_id, "stat_file", StatFile(path="/a/b/c"), FileInfo)
    assert found.kind is FileKind.DIRECTORY


async def test_a_full_disk_is_told_and_leaves_the_sandbox_usable(node: NodeForTests) -> None:
    created = await node.place(CreateSandbox(base=BASE, limits=Limits(disk_bytes=MIB)))
    content = b"x" * FILE_CHUNK_BYTES
    outcomes = []
    for number in range(16):
        piece = WriteFile(
            path="/tmp/big",
            upload_id="u",
            data=content,
            offset=number * FILE_CHUNK_BYTES,
            final=False,
        )
        try:
            await node.ask(created.sandbox_id, "write_file", piece, FileWritten)
        except DsecError as error:
            outcomes.append((error.code, error.details["reason"]))
            break
    assert outcomes == [(ErrorCode.EXHAUSTED, "no_space")]
    assert (await node.exec(created.sandbox_id, "true")).exit_code == 0


async def test_a_stopped_node_tells_the_end_of_each_sandbox(tmp_path: Path, layers: Path) -> None:
    async with node_for_tests(tmp_path, layers) as node:
        created = await node.place()
        assert await node.stop_service() == 0
        ended = await node.event_of(created.sandbox_id, SandboxEnded)
        assert ended.cause is EndCause.NODE_RESTARTED
        await node.start_service()
        info = await node.ask(created.sandbox_id, "inspect", InspectSandbox(), SandboxInfo)
        assert info.end_cause is EndCause.NODE_RESTARTED


async def test_heartbeats_tell_what_the_node_has_and_has_given_out(node: NodeForTests) -> None:
    await node.place(CreateSandbox(base=BASE, limits=Limits(cpus=0.5)))
    await node.until(lambda: node.heartbeats and node.heartbeats[-1].allocated.sandboxes == 1)
    beat = node.heartbeats[-1]
    assert beat.node == NODE
    assert beat.allocated.cpus == 0.5
    assert beat.capacity.cpus == beat.physical.cpus * 32
    assert beat.store_id


async def test_the_agents_socket_knows_whose_it_is(node: NodeForTests) -> None:
    created = await node.place(CreateSandbox(base=BASE, agent="tester"))
    seen = await node.exec(
        created.sandbox_id, "sh", "-c", "test -S /run/dsec/agent.sock && ! touch /run/dsec/x"
    )
    assert seen.exit_code == 0
    local = created.sandbox_id.partition(".")[2]
    reader, writer = await connect_to_agent_socket(node.directory / "run" / "s" / local)
    request = json.dumps({"id": 1, "op": "hello"}).encode()
    writer.write(len(request).to_bytes(4, "big") + request)
    answer = json.loads(
        await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
    )
    assert answer["result"]["sandbox_id"] == created.sandbox_id
    await node.ask(created.sandbox_id, "delete", DeleteSandbox(), SandboxDeleted)
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()


async def test_sixteen_at_once_all_live_and_all_go(node: NodeForTests) -> None:
    created = await asyncio.gather(*(node.place() for _ in range(16)))
    results = await asyncio.gather(*(node.exec(made.sandbox_id, "true") for made in created))
    assert {result.exit_code for result in results} == {0}
    await asyncio.gather(
        *(node.ask(made.sandbox_id, "delete", DeleteSandbox(), SandboxDeleted) for made in created)
    )
    assert node.service.heartbeat().allocated.sandboxes == 0


def test_subjects_of_the_daemon_are_its_own() -> None:
    assert subjects.any_project_sandbox(NODE, "exec").split(".")[4] == NODE


class HourAhead(SystemClock):
    """A machine's clock that was set wrong."""

    def now(self) -> float:
        return super().now() + 3600.0


async def test_a_placement_is_valid_by_the_clock_that_the_nodes_heartbeats_tell(
    tmp_path: Path, layers: Path
) -> None:
    async with node_for_tests(tmp_path, layers, parts={"clock": HourAhead()}) as node:
        await node.until(lambda: node.heartbeats)
        ahead_s = node.heartbeats[-1].sent_at - time.time()
        assert 3540 < ahead_s < 3660
        assert (await node.place(valid_s=ahead_s + 20.0)).sandbox_id
        assert (await refused(node.place(valid_s=20.0))).code is ErrorCode.TIMEOUT
