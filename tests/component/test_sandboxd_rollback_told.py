"""What a rollback tells those who were in the sandbox: what ended stays, what ran says why."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import msgspec
import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import new_id
from dsec_common.wire.exec import ExecEvents, ExecInfo, ExecList, ExecState, ListExecs, StartExec
from dsec_common.wire.files import (
    FileChange,
    FileEvents,
    FileWritten,
    ReadTree,
    TreeChunk,
    TreeWritten,
    WatchFiles,
    WriteFile,
    WriteTree,
)
from dsec_common.wire.sandbox import ExecCommand, ExecResult
from exec_client import Box, output
from sandboxd_node import NodeForTests
from snapshot_node import Asker

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")

ROLLED_BACK = (ErrorCode.CONFLICT, "rolled_back", False)


class Story:
    """A sandbox with a snapshot to go back to."""

    def __init__(self, node: NodeForTests, sandbox_id: str, snapshot_id: str) -> None:
        self.asker = Asker(node)
        self.box = Box(node, sandbox_id)
        self.snapshot_id = snapshot_id

    async def roll_back(self) -> None:
        await self.asker.roll_back(self.box.id, self.snapshot_id)


@pytest.fixture
async def story(node: NodeForTests) -> Story:
    sandbox_id = (await node.place()).sandbox_id
    taken = await Asker(node).take(sandbox_id)
    return Story(node, sandbox_id, taken.snapshot_id)


async def refused(asking: Any) -> tuple[ErrorCode, Any, bool]:
    with pytest.raises(DsecError) as caught:
        await asking
    error = caught.value
    return error.code, error.details.get("reason"), error.retryable


async def test_a_command_that_had_ended_is_kept_and_its_message_runs_nothing_again(
    story: Story,
) -> None:
    box = story.box
    message = StartExec(argv=("sh", "-c", "echo said"))
    first = await box.ask("start_exec", message, ExecInfo)
    events = await box.events(first.exec_id)
    await story.roll_back()
    again = await box.ask("start_exec", message, ExecInfo)
    assert (again.exec_id, again.state, again.exit_code) == (first.exec_id, ExecState.EXITED, 0)
    assert await box.events(first.exec_id) == events
    listed = await box.ask("list_execs", ListExecs(include_ended=True), ExecList)
    assert [info.exec_id for info in listed.execs] == [first.exec_id]
    # What starts in the new processes has numbers that the old ones had.
    later = await box.sh("echo later")
    assert output(await box.events(later)) == b"later\n"


async def test_a_command_that_ran_says_that_a_rollback_ended_it_and_keeps_what_it_printed(
    story: Story,
) -> None:
    box = story.box
    message = StartExec(argv=("sh", "-c", "echo begun; sleep 1000"), stdin=True)
    ran = (await box.ask("start_exec", message, ExecInfo)).exec_id
    seen = await box.until(ran, b"begun\n")
    waiting = asyncio.ensure_future(box.read(ran, seen[-1].seq))
    one_shot = ExecCommand(argv=("sleep", "1000"))
    waiting_for_all = asyncio.ensure_future(box.ask("exec", one_shot, ExecResult))
    await story.asker.shell(box.id, "true")
    await story.roll_back()
    assert (await refused(waiting_for_all)) == ROLLED_BACK
    page: ExecEvents = await waiting
    assert page.ended is not None
    info = await box.inspect(ran)
    assert info.state is ExecState.FAILED
    assert (info.error_code, info.error_reason) == ("conflict", "rolled_back")
    assert output(await box.events(ran)) == b"begun\n"
    assert (await box.ask("start_exec", message, ExecInfo)).exec_id == ran
    assert await story.asker.shell(box.id, "ps 2>/dev/null | grep -c '[s]leep 1000'; true") in (
        "0\n",
        "",
    )


async def test_the_kept_commands_of_before_and_after_a_rollback_are_there_for_the_next_daemon(
    node: NodeForTests, story: Story
) -> None:
    box = story.box
    before = await box.sh("echo before")
    await box.events(before)
    ran = await box.sh("sleep 1000")
    await story.roll_back()
    after = await box.sh("echo after; read line; echo $line", stdin=True)
    await box.until(after, b"after\n")
    node.service._keep_sandboxes = True
    await node.stop_service()
    await node.start_service()
    assert output(await box.events(before)) == b"before\n"
    assert (await box.inspect(ran)).error_code == "conflict"
    await box.write(after, 0, b"goes on\n", end=True)
    assert output(await box.events(after)) == b"after\ngoes on\n"


async def test_an_upload_under_way_says_that_a_rollback_ended_it(story: Story) -> None:
    box = story.box
    upload_id = new_id()
    piece = WriteFile(path="/srv-file", upload_id=upload_id, data=b"x" * 1000, final=False)
    await box.ask("write_file", piece, FileWritten)
    tree_id = new_id()
    first = WriteTree(path="/tree", upload_id=tree_id, data=bytes(512), final=False)
    await box.ask("write_tree", first, TreeWritten)
    await story.roll_back()
    final = WriteFile(path="/srv-file", upload_id=upload_id, offset=1000, data=b"y")
    assert await refused(box.ask("write_file", final, FileWritten)) == ROLLED_BACK
    rest = WriteTree(path="/tree", upload_id=tree_id, offset=512, data=bytes(512))
    assert await refused(box.ask("write_tree", rest, TreeWritten)) == ROLLED_BACK


async def test_a_directory_on_its_way_out_says_that_a_rollback_ended_it(story: Story) -> None:
    box = story.box
    await story.asker.shell(box.id, "mkdir /tree; head -c 3000000 /dev/zero > /tree/large")
    begin = ReadTree(path="/tree", download_id=new_id())
    first = await box.ask("read_tree", begin, TreeChunk)
    await story.roll_back()
    on = msgspec.structs.replace(begin, offset=len(first.data))
    assert await refused(box.ask("read_tree", on, TreeChunk)) == ROLLED_BACK


async def test_a_watch_says_that_a_rollback_ended_it_and_loses_nothing_silently(
    story: Story,
) -> None:
    box = story.box
    watch_id = new_id()
    begin = WatchFiles(path="/tmp", watch_id=watch_id, wait_s=0.0)
    assert not (await box.ask("watch_files", begin, FileEvents)).events
    on = WatchFiles(path="/tmp", watch_id=watch_id, wait_s=20.0, begun=True)
    waiting = asyncio.ensure_future(box.ask("watch_files", on, FileEvents))
    await story.asker.shell(box.id, "true")
    await story.roll_back()
    assert await refused(waiting) == ROLLED_BACK
    assert await refused(box.ask("watch_files", on, FileEvents)) == ROLLED_BACK
    other = WatchFiles(path="/tmp", watch_id=new_id(), wait_s=0.0)
    await box.ask("watch_files", other, FileEvents)
    await story.asker.shell(box.id, "echo x > /tmp/new")
    on = WatchFiles(path="/tmp", watch_id=other.watch_id, begun=True)
    seen = await box.ask("watch_files", on, FileEvents)
    assert seen.events[0].change is FileChange.CREATED


async def test_a_watch_that_the_node_does_not_know_is_over_and_not_begun_anew(story: Story) -> None:
    on = WatchFiles(path="/tmp", watch_id=new_id(), wait_s=0.0, begun=True)
    refusal = await refused(story.box.ask("watch_files", on, FileEvents))
    assert refusal[:2] == (ErrorCode.NOT_FOUND, "watch_over")
