"""Watches of a real sandbox, and how many requests about files it serves at once."""

from __future__ import annotations

import asyncio
import os

from dsec_common.errors import ErrorCode
from dsec_sandboxd.kernel.file_ports import WatchChange
from kernel_world import World
from refusals import refused

# --- Watches --------------------------------------------------------------------------------------


async def test_a_watch_tells_what_changes_below_a_directory(world: World) -> None:
    await world.create()
    await world.say("mkdir -p /tmp/w/sub")
    with await world.kernel.watch("a", "/tmp/w", recursive=True) as watcher:
        seen = []

        async def until(change: WatchChange, path: str) -> None:
            async with asyncio.timeout(10):
                while True:
                    event = await watcher.next()
                    assert event is not None
                    seen.append((event.change, event.path))
                    if seen[-1] == (change, path):
                        return

        await world.say("echo 1 > /tmp/w/sub/file")
        await until(WatchChange.CREATED, "sub/file")
        await until(WatchChange.MODIFIED, "sub/file")
        await world.say("mkdir -p /tmp/w/new/deep; echo 1 > /tmp/w/new/deep/file")
        await until(WatchChange.CREATED, "new/deep/file")
        await world.say("mv /tmp/w/new /tmp/w/other")
        await until(WatchChange.MOVED_FROM, "new")
        await until(WatchChange.MOVED_TO, "other")
        await world.say("chmod 600 /tmp/w/other/deep/file; rm /tmp/w/other/deep/file")
        await until(WatchChange.ATTRIBUTES, "other/deep/file")
        await until(WatchChange.DELETED, "other/deep/file")
        await world.say("rm -r /tmp/w")
        async with asyncio.timeout(10):
            while await watcher.next() is not None:
                pass


async def test_a_watch_of_one_directory_stays_there(world: World) -> None:
    await world.create()
    await world.say("mkdir -p /tmp/w/sub")
    with await world.kernel.watch("a", "/tmp/w") as watcher:
        await world.say("echo 1 > /tmp/w/sub/file; echo 1 > /tmp/w/here")
        event = await watcher.next()
        assert event is not None
        assert event.path in {"sub", "here"}
    for path, code in (
        ("/tmp/absent", ErrorCode.NOT_FOUND),
        ("/tmp/w/here", ErrorCode.NOT_FOUND),
        ("/proc", ErrorCode.INVALID),
    ):
        assert (await refused(world.kernel.watch("a", path))).code is code
    assert (await refused(world.kernel.watch("a", "/root", user="dev"))).code is ErrorCode.DENIED


async def test_a_watch_sees_an_upload_only_when_it_has_its_name(world: World) -> None:
    await world.create()
    with await world.kernel.watch("a", "/tmp") as watcher:
        with await world.kernel.put_file("a", "/tmp/file") as upload:
            os.write(upload.descriptor, b"content")
            await upload.commit(0o640)
        await world.say("echo x > '/tmp/#1'")
        seen = []
        async with asyncio.timeout(10):
            while ("#1", WatchChange.MODIFIED) not in seen:
                event = await watcher.next()
                assert event is not None
                seen.append((event.path, event.change))
    assert {path for path, _ in seen} == {"file", "#1"}
    assert seen[0] == ("file", WatchChange.CREATED)


async def test_more_changes_than_are_read_overflow_and_say_so(world: World) -> None:
    await world.create(inodes=30_000)
    await world.say("mkdir /tmp/w")
    with await world.kernel.watch("a", "/tmp/w") as watcher:
        await world.python(
            "import os\n"
            "for i in range(40_000):\n    os.close(os.open(f'/tmp/w/{i % 2000}', os.O_CREAT))\n"
            "    os.unlink(f'/tmp/w/{i % 2000}')"
        )
        async with asyncio.timeout(30):
            while True:
                event = await watcher.next()
                assert event is not None
                if event.change is WatchChange.OVERFLOW:
                    break


async def test_a_watch_ends_with_its_sandbox_and_when_it_is_let_go(world: World) -> None:
    await world.create()
    watcher = await world.kernel.watch("a", "/tmp")
    waiting = asyncio.create_task(watcher.next())
    await world.kernel.destroy("a")
    assert (await refused(waiting)).code is ErrorCode.UNAVAILABLE
    watcher.close()
    await world.create()
    watcher = await world.kernel.watch("a", "/tmp")
    assert len(world.pids()) == 2
    watcher.close()
    async with asyncio.timeout(10):
        while len(world.pids()) != 1:
            await asyncio.sleep(0.01)


# --- Many at once ---------------------------------------------------------------------------------


async def test_more_requests_than_places_wait_for_one(world: World) -> None:
    await world.create(pids=100)
    found = await asyncio.gather(*(world.kernel.stat("a", "/tmp") for _ in range(500)))
    assert len(found) == 500


async def test_requests_find_a_place_beside_streams_that_go_on(world: World) -> None:
    await world.create(pids=100)
    watchers = [await world.kernel.watch("a", "/tmp") for _ in range(16)]
    found = await asyncio.gather(*(world.kernel.stat("a", "/tmp") for _ in range(300)))
    for watcher in watchers:
        watcher.close()
    assert len(found) == 300


async def test_without_a_process_to_spare_a_request_is_exhausted(world: World) -> None:
    await world.create(pids=8)
    bomb = asyncio.create_task(
        world.python(
            "import os, time\ntry:\n    while os.fork(): pass\nexcept OSError: pass\ntime.sleep(60)"
        )
    )
    async with asyncio.timeout(10):
        while len(world.pids()) < 8:
            await asyncio.sleep(0.01)
    error = await refused(world.kernel.stat("a", "/tmp"))
    assert error.code is ErrorCode.EXHAUSTED
    await world.kernel.destroy("a")
    await refused(bomb)


async def test_a_sandbox_that_takes_all_its_watches_takes_no_others(world: World) -> None:
    await world.create()
    await world.create("b")
    greedy = asyncio.create_task(
        world.python(
            "import ctypes, time\nlibc = ctypes.CDLL(None)\n"
            "taken = 0\nwhile libc.inotify_init() >= 0: taken += 1\n"
            "open('/tmp/taken', 'w').write(str(taken)); time.sleep(60)"
        )
    )
    async with asyncio.timeout(20):
        while (await world.shell("test -s /tmp/taken")).exit_code != 0:
            await asyncio.sleep(0.05)
    assert (await refused(world.kernel.watch("a", "/tmp"))).code is ErrorCode.EXHAUSTED
    with await world.kernel.watch("b", "/tmp") as watcher:
        await world.say("echo x > /tmp/file", local="b")
        event = await watcher.next()
        assert event is not None
        assert event.path == "file"
    await world.kernel.destroy("a")
    await refused(greedy)
