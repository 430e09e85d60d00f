"""The node daemon's other doors: layers, callers handed on, the log; and what outages do to it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import io
import json
import os
import signal
import sys
import tarfile
from pathlib import Path
from typing import Any, TypeVar

import pytest

from dsec_common import subjects
from dsec_common.behavior import BehaviorLog
from dsec_common.bus_types import ReplyAddress
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.log import LogConsumer, StartAt
from dsec_common.testing.kafka import kafka_for_tests
from dsec_common.wire.base import Message
from dsec_common.wire.files import FILE_CHUNK_BYTES
from dsec_common.wire.layer import (
    ImportLayer,
    InspectLayer,
    LayerChunkStored,
    LayerImportProgress,
    LayerInfo,
    LayerKind,
    LayerList,
    LayerRemoved,
    ListLayers,
    RemoveLayer,
    UploadLayerChunk,
)
from dsec_common.wire.sandbox import (
    CreateSandbox,
    DeleteSandbox,
    EndCause,
    InspectSandbox,
    SandboxCreated,
    SandboxDeleted,
    SandboxEnded,
    SandboxInfo,
    SandboxRunning,
    SandboxState,
)
from dsec_sandboxd.kernel.recording import FACTS, RecordingKernel
from refusals import refused
from sandboxd_node import BASE, NODE, NodeForTests, node_for_tests

R = TypeVar("R", bound=Message)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes and layers need root")


async def layer(node: NodeForTests, verb: str, message: Message, reply: type[R]) -> R:
    subject = subjects.layer("default", NODE, verb)
    return await node.project.request(subject, message, reply, timeout_s=30.0)


def archive(**files: str) -> bytes:
    """Return a tar archive with these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()


async def send(node: NodeForTests, content: bytes, upload_id: str = "u1") -> None:
    """Send an archive, the last piece first."""
    for offset in reversed(range(0, len(content), FILE_CHUNK_BYTES)):
        piece = content[offset : offset + FILE_CHUNK_BYTES]
        await layer(
            node,
            "upload",
            UploadLayerChunk(upload_id=upload_id, offset=offset, data=piece),
            LayerChunkStored,
        )


def announced(content: bytes, **changes: Any) -> ImportLayer:
    values: dict[str, Any] = {
        "upload_id": "u1",
        "size_bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "kind": LayerKind.WORKSPACE,
        "name": "work",
        "version": "1",
    }
    return ImportLayer(**(values | changes))


# --- Layers ---------------------------------------------------------------------------------------


async def test_an_uploaded_archive_becomes_a_layer_that_sandboxes_see(node: NodeForTests) -> None:
    content = archive(**{"work/readme": "from the archive\n", "work/big": "x" * 400_000})
    await send(node, content)
    made = await layer(node, "import", announced(content), LayerInfo)
    assert (made.reference, made.kind, made.nodes) == ("work@1", LayerKind.WORKSPACE, (NODE,))
    created = await node.place(CreateSandbox(base=BASE, workspace="work@1"))
    result = await node.exec(created.sandbox_id, "cat", "/work/readme")
    assert result.stdout == b"from the archive\n"
    listed = await layer(node, "list", ListLayers(), LayerList)
    assert [info.reference for info in listed.layers] == ["base@1", "tools@1", "work@1"]
    await node.until(
        lambda: (
            {event.stage for event in node.events if isinstance(event, LayerImportProgress)}
            >= {"hash", "publish"}
        )
    )
    await layer(node, "remove", RemoveLayer(reference="work@1"), LayerRemoved)
    error = await refused(layer(node, "inspect", InspectLayer(reference="work@1"), LayerInfo))
    assert error.code is ErrorCode.NOT_FOUND
    assert (await node.exec(created.sandbox_id, "cat", "/work/readme")).exit_code == 0


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"sha256": "00"}, ErrorCode.INVALID),
        ({"size_bytes": 1}, ErrorCode.INVALID),
        ({"upload_id": "never"}, ErrorCode.NOT_FOUND),
        ({"upload_id": "a.b"}, ErrorCode.INVALID),
        ({"name": "../x"}, ErrorCode.INVALID),
        ({"name": "base"}, ErrorCode.CONFLICT),
    ],
)
async def test_an_import_that_cannot_be_changes_nothing(
    node: NodeForTests, changes: dict[str, Any], code: ErrorCode
) -> None:
    content = archive(a="b")
    await send(node, content)
    before = await layer(node, "list", ListLayers(), LayerList)
    error = await refused(layer(node, "import", announced(content, **changes), LayerInfo))
    assert error.code is code
    after = await layer(node, "list", ListLayers(), LayerList)
    assert [info.digest for info in after.layers] == [info.digest for info in before.layers]


async def test_a_hostile_archive_is_a_layer_error(node: NodeForTests) -> None:
    content = archive(**{"../../etc/passwd": "root::0:0"})
    await send(node, content)
    error = await refused(layer(node, "import", announced(content), LayerInfo))
    assert error.code is ErrorCode.LAYER_ERROR
    # Whatever came of it, the upload is gone.
    again = await refused(layer(node, "import", announced(content), LayerInfo))
    assert again.code is ErrorCode.NOT_FOUND


async def test_uploads_are_bounded_in_size_and_number(tmp_path: Path, layers: Path) -> None:
    settings: dict[str, Any] = {
        "layer_upload_max_bytes": 1000,
        "layer_uploads_max": 1,
        "upload_idle_s": 0.2,
    }
    async with node_for_tests(tmp_path, layers, **settings) as node:
        far = UploadLayerChunk(upload_id="u1", offset=990, data=b"x" * 11)
        assert (await refused(layer(node, "upload", far, LayerChunkStored))).code is (
            ErrorCode.INVALID
        )
        await send(node, b"x", "u1")
        assert (await refused(send(node, b"x", "u2"))).code is ErrorCode.EXHAUSTED
        async with asyncio.timeout(20):
            while True:  # the first is abandoned and makes room
                with contextlib.suppress(DsecError):
                    await send(node, b"x", "u2")
                    break
        assert not [
            path for path in (tmp_path / "state").rglob("uploads/*") if path.name.endswith("u1")
        ]


async def test_a_hole_in_an_upload_is_not_taken_for_content(node: NodeForTests) -> None:
    last = UploadLayerChunk(upload_id="u1", offset=1 << 30, data=b"x")
    await layer(node, "upload", last, LayerChunkStored)
    whole = announced(b"", size_bytes=(1 << 30) + 1, sha256="00")
    error = await refused(layer(node, "import", whole, LayerInfo))
    assert (error.code, error.details["field"]) == (ErrorCode.INVALID, "size_bytes")


async def test_uploads_leave_the_disks_reserve_free(tmp_path: Path, layers: Path) -> None:
    async with node_for_tests(tmp_path, layers, disk_reserve_bytes=1 << 60) as node:
        assert (await refused(send(node, b"x"))).code is ErrorCode.EXHAUSTED


# --- Callers --------------------------------------------------------------------------------------


async def test_the_caller_behind_the_scheduler_is_answered_in_its_own_encoding(
    node: NodeForTests,
) -> None:
    answers: asyncio.Queue[Any] = asyncio.Queue()
    inbox = "_INBOX.dsec.scheduler.caller"

    async def on_answer(request: Any) -> None:
        await answers.put(request)

    await node.scheduler.subscribe(inbox, SandboxCreated, on_answer)
    await node.scheduler.flush()
    created = await node.place(caller=ReplyAddress(inbox, "application/json"))
    answer = await asyncio.wait_for(answers.get(), 20)
    assert answer.content_type == "application/json"
    assert answer.message.sandbox_id == created.sandbox_id


# --- The behaviour log ----------------------------------------------------------------------------


async def test_every_step_reaches_kafka_in_order(tmp_path: Path, layers: Path) -> None:
    async with (
        kafka_for_tests("embedded") as kafka,
        node_for_tests(tmp_path, layers, kafka_bootstrap=kafka.bootstrap_servers) as node,
    ):
        created = await node.place(CreateSandbox(base=BASE, agent="tester"))
        await node.exec(created.sandbox_id, "sh", "-c", "exit 3")
        await node.ask(created.sandbox_id, "delete", DeleteSandbox(), SandboxDeleted)
        seen: list[BehaviorLog] = []
        consumer = LogConsumer(kafka.config, start_at=StartAt.EARLIEST)
        async with consumer, asyncio.timeout(30):
            async for record in consumer:
                seen.append(record)
                if record.action == "delete":
                    break
    assert [(step.seq, step.action, step.status) for step in seen] == [
        (1, "create", "ok"),
        (2, "exec", "3"),
        (3, "delete", "ok"),
    ]
    assert {step.agent for step in seen} == {"tester"}
    assert {step.sandbox_id for step in seen} == {created.sandbox_id}


# --- Outages --------------------------------------------------------------------------------------


async def test_sandboxes_and_their_events_survive_a_lost_nats(node: NodeForTests) -> None:
    created = await node.place()
    await node.event_of(created.sandbox_id, SandboxRunning)
    await node.nats.server.kill()
    await node.service._sandboxes.end(created.sandbox_id.partition(".")[2])
    assert "reconnecting" in node.service.not_ready_reason()
    await node.nats.server.start()
    ended = await node.event_of(created.sandbox_id, SandboxEnded)
    assert ended.cause is EndCause.DELETED
    again = await node.place()
    assert (await node.exec(again.sandbox_id, "true")).exit_code == 0


class Daemon:
    """The daemon as a process of its own."""

    def __init__(self, node: NodeForTests) -> None:
        config = node.config
        self.runtime_file = node.directory / "runtime.json"
        self.log = node.directory / "daemon.log"
        self.flags = [
            f"--nats-servers={','.join(config.nats_servers)}",
            f"--nats-credentials={config.nats_credentials}",
            f"--node={config.node}",
            f"--layers-directory={config.layers_directory}",
            f"--run-directory={config.run_directory}",
            f"--state-directory={config.state_directory}",
            f"--runtime-file={self.runtime_file}",
        ]
        self.process: asyncio.subprocess.Process

    async def start(self) -> None:
        self.runtime_file.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "dsec_sandboxd", *self.flags, stdout=log, stderr=log
            )
        async with asyncio.timeout(20):
            while self.state() != "running":
                assert self.process.returncode is None, self.log.read_text()
                await asyncio.sleep(0.02)

    def state(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            return str(json.loads(self.runtime_file.read_text())["state"])
        return ""

    async def stop(self, number: int) -> int:
        self.process.send_signal(number)
        return await self.process.wait()


async def test_a_killed_daemon_is_succeeded_by_one_whose_stop_leaves_nothing(
    tmp_path: Path, layers: Path
) -> None:
    async with node_for_tests(tmp_path, layers) as node:
        assert await node.stop_service() == 0
        daemon = Daemon(node)
        await daemon.start()
        try:
            created = await node.place()
            await node.exec(created.sandbox_id, "sh", "-c", "sleep 1000 >/dev/null 2>&1 &")
            await daemon.stop(signal.SIGKILL)
            await daemon.start()
            info = await node.ask(created.sandbox_id, "inspect", InspectSandbox(), SandboxInfo)
            assert info.state is SandboxState.RUNNING
        finally:
            code = await daemon.stop(signal.SIGTERM)
        assert code == 0
        ended = await node.event_of(created.sandbox_id, SandboxEnded)
        assert ended.cause is EndCause.NODE_RESTARTED
        assert not (tmp_path / "run" / "s").exists()
        await node.start_service()
        deleted = await node.ask(created.sandbox_id, "delete", DeleteSandbox(), SandboxDeleted)
        assert deleted.end_cause is EndCause.NODE_RESTARTED


async def test_a_daemon_that_is_not_root_says_so_and_exits_with_2(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from dsec_sandboxd.__main__ import main\nimport os; os.setuid(65534)\nmain()",
        stderr=asyncio.subprocess.PIPE,
        cwd="/",
    )
    _, said = await process.communicate()
    assert process.returncode == 2, said
    assert b"needs root" in said


async def test_a_host_that_cannot_enforce_limits_is_refused(tmp_path: Path, layers: Path) -> None:
    facts = dataclasses.replace(FACTS, missing=("landlock", "memory"))
    async with node_for_tests(tmp_path, layers) as node:
        assert await node.stop_service() == 0
        service = node.make_service(kernel=RecordingKernel(facts))
        error = await refused(service.start())
        service.fail(error)
        assert await service.stop() == 1
        assert (error.code, error.details["missing"]) == (ErrorCode.UNSUPPORTED, "memory")
        await node.start_service()
