"""The whole daemon attacked: its logs, its store of output, its uploads and others' ids."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import new_id
from dsec_common.wire.exec import ExecInfo, ExecState, InspectExec
from dsec_common.wire.files import FileChunk, FileWritten, ReadFile, WriteFile
from exec_client import Box, output
from sandboxd_node import NodeForTests, build_layers, node_for_tests

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")
MIB = 1 << 20
ANSWER = b"expected_output=4711"


@pytest.fixture(scope="module")
def layer_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("layers")
    build_layers(directory)
    return directory / "store"


@pytest.fixture
async def node(tmp_path: Path, layer_store: Path) -> AsyncIterator[NodeForTests]:
    async with node_for_tests(
        tmp_path, layer_store, exec_memory_bytes=32 * MIB, exec_output_bytes=MIB
    ) as running:
        yield running


@pytest.fixture
async def rude(node: NodeForTests) -> Box:
    """The attacker's sandbox."""
    return Box(node, (await node.place()).sandbox_id)


@pytest.fixture
async def beside(node: NodeForTests, rude: Box) -> AsyncIterator[Box]:
    """A neighbour's sandbox, whose started command reads and answers before and after."""
    box = Box(node, (await node.place()).sandbox_id)
    exec_id = await box.start("sh", "-c", "while read x; do echo got $x; done", stdin=True)
    await box.write(exec_id, 0, b"one\n")
    await box.until(exec_id, b"got one\n")
    yield box
    await box.write(exec_id, 4, b"two\n", end=True)
    assert output(await box.events(exec_id)) == b"got one\ngot two\n"
    assert (await box.inspect(exec_id)).exit_code == 0


async def _write(
    box: Box, path: str, data: bytes, upload_id: str, **changes: object
) -> FileWritten:
    """Write a file that fits one message."""
    message = WriteFile(
        path=path,
        upload_id=upload_id,
        data=data,
        size_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        **changes,  # type: ignore[arg-type]
    )
    return await box.ask("write_file", message, FileWritten)


def _files_that_hold(directory: Path, text: bytes) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and text in path.read_bytes()]


async def test_the_platforms_logs_are_out_of_reach(
    node: NodeForTests, rude: Box, beside: Box
) -> None:
    started = await beside.sh(f"echo {ANSWER.decode()}; sleep 100")
    await beside.until(started, ANSWER)
    await node.exec(beside.id, "echo", ANSWER.decode())
    # They are there to be found, for who is on the host.
    kept = await asyncio.to_thread(_files_that_hold, node.directory, ANSWER)
    assert kept
    tops = "/bin /dev /etc /home /opt /root /run /srv /tmp /usr /var /mnt /media /sys"
    found = await node.exec(rude.id, "sh", "-c", f"grep -rlsa 'expected_[o]utput=' {tops} | head")
    assert found.stdout == b"", found
    for path in (*kept, node.directory, Path(node.config.state_directory)):
        there = await node.exec(rude.id, "ls", "-d", str(path))
        assert there.exit_code == 2, path
    names = await node.exec(
        rude.id, "sh", "-c", "find /run /var/log | sort; ls /proc | grep '^[0-9]'"
    )
    lines = names.stdout.decode().split()
    assert [line for line in lines if line.startswith("/run")] == [
        "/run",
        "/run/dsec",
        "/run/dsec/agent.sock",
    ]
    assert len([line for line in lines if line.isdigit()]) <= 8
    # Nor is the platform's own place one to be written.
    for line in ("rm /run/dsec/agent.sock", "echo > /run/dsec/x", "mv /run/dsec /run/y"):
        assert (await node.exec(rude.id, "sh", "-c", line)).exit_code != 0, line
    with pytest.raises(DsecError) as caught:
        await _write(rude, "/run/dsec/forged", b"x", new_id())
    assert caught.value.code in {ErrorCode.DENIED, ErrorCode.INVALID}
    await beside.cancel(started, grace_s=0.1)


async def test_endless_output_keeps_its_part_of_the_store_and_no_more(
    node: NodeForTests, rude: Box, beside: Box
) -> None:
    floods = [await rude.sh("yes $(seq 200)") for _ in range(12)]
    for exec_id in floods:
        await rude.read(exec_id)
    # Meanwhile all of a neighbour's output is kept.
    modest = await beside.sh("seq 50000")
    events = await beside.events(modest)
    assert output(events) == b"".join(b"%d\n" % number for number in range(1, 50_001))
    for exec_id in floods:
        await rude.cancel(exec_id, grace_s=0.1)
    store = Path(node.config.run_directory) / "execs"
    used = await asyncio.to_thread(
        lambda: sum(path.stat().st_blocks * 512 for path in store.rglob("*"))
    )
    assert 0 < used <= 32 * MIB // 8 + 2 * MIB


async def test_an_id_of_anothers_exec_or_upload_is_nothing_in_ones_own_sandbox(
    node: NodeForTests, rude: Box, beside: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec_sandboxd.file_uploads.LATE_PIECES_S", 1.0)
    theirs = await beside.sh("echo mine; sleep 100")
    await beside.until(theirs, b"mine\n")
    for ask in (
        lambda: rude.ask("inspect_exec", InspectExec(exec_id=theirs), ExecInfo),
        lambda: rude.read(theirs),
        lambda: rude.write(theirs, 0, b"x"),
        lambda: rude.cancel(theirs, grace_s=0.1),
    ):
        with pytest.raises(DsecError) as caught:
            await ask()
        assert caught.value.code is ErrorCode.NOT_FOUND
    assert (await beside.inspect(theirs)).state is ExecState.RUNNING
    await beside.cancel(theirs, grace_s=0.1)
    # Half of a file is up; whoever ends that upload elsewhere gets none of it, and changes none.
    upload_id, data = new_id(), ANSWER * 100
    digest = hashlib.sha256(data).hexdigest()
    half = WriteFile(path="/tmp/x", upload_id=upload_id, data=data[:1000], final=False)
    await beside.ask("write_file", half, FileWritten)
    rest = WriteFile(
        path="/tmp/x",
        upload_id=upload_id,
        data=data[1000:],
        offset=1000,
        size_bytes=len(data),
        sha256=digest,
    )
    with pytest.raises(DsecError):
        await rude.ask("write_file", rest, FileWritten)
    assert (await node.exec(rude.id, "ls", "/tmp")).stdout == b""
    assert (await beside.ask("write_file", rest, FileWritten)).complete
    got = await beside.ask("read_file", ReadFile(path="/tmp/x"), FileChunk)
    assert got.data == data
