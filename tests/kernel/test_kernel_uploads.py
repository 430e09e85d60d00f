"""Files of a real sandbox: uploads, moves, listings and removals."""

from __future__ import annotations

import asyncio
import os

import pytest

from dsec_common.errors import ErrorCode
from dsec_sandboxd.kernel.file_ports import FileKind
from kernel_world import MIB, World
from refusals import refused
from trees import archive, member, tolerant, unpack

# --- One file -------------------------------------------------------------------------------------


async def test_an_upload_has_no_name_until_it_is_committed(world: World) -> None:
    await world.create()
    with await world.kernel.put_file("a", "/tmp/deep/er/file", parents=True) as upload:
        os.write(upload.descriptor, b"content")
        assert await world.say("find /tmp/deep -type f") == ""
        await upload.commit(0o640)
    assert await world.say("cat /tmp/deep/er/file; stat -c %a /tmp/deep/er/file") == "content640"


async def test_an_upload_replaces_a_file_in_one_step(world: World) -> None:
    await world.create()
    await world.say("echo old > /tmp/file; ln /tmp/file /tmp/other; mkdir /tmp/dir")
    for path in ("/tmp/file", "/work/both.txt"):
        with await world.kernel.put_file("a", path) as upload:
            os.write(upload.descriptor, path.encode())
            await upload.commit(0o600)
        assert await world.say(f"cat {path}") == path
    assert await world.say("cat /tmp/other; ls -A /tmp | tr '\\n' ' '") == "old\ndir file other"
    for path in ("/tmp/dir", "/tmp/dir/", "/tmp/.."):
        error = await refused(world.kernel.put_file("a", path))
        assert (error.code, error.details["reason"]) == (ErrorCode.INVALID, "is_directory")
    await world.say("mkfifo /tmp/pipe")
    error = await refused(world.kernel.put_file("a", "/tmp/pipe"))
    assert (error.code, error.details["reason"]) == (ErrorCode.INVALID, "not_a_file")
    assert (await refused(world.kernel.put_file("a", "/absent/x"))).code is ErrorCode.NOT_FOUND
    denied = await refused(world.kernel.put_file("a", "/root/x", user="dev"))
    assert denied.code is ErrorCode.DENIED
    denied = await refused(world.kernel.put_file("a", "/root/a/b", parents=True, user="dev"))
    assert denied.code is ErrorCode.DENIED


async def put(world: World, path: str, *, user: str = "0", change_mode: bool = False) -> None:
    """Put a file at a path as one that is new would be 0644."""
    with await world.kernel.put_file("a", path, parents=True, user=user) as upload:
        os.write(upload.descriptor, b"new")
        await upload.commit(0o644, change_mode=change_mode)


async def test_what_an_upload_replaces_leaves_it_mode_and_owner(world: World) -> None:
    await world.create()
    await world.say(
        "cd /tmp; echo old > script; chmod 4755 script; echo old > secret; chmod 600 secret;"
        "chown dev:7 secret; mkdir -m 777 open; echo old > open/file; chmod 640 open/file"
    )
    look = "cd /tmp; stat -c '%a %u:%g' script secret open/file; cat script secret open/file"
    await put(world, "/tmp/script")
    await put(world, "/tmp/secret")
    await put(world, "/tmp/open/file", user="dev")  # who may not give it back to root
    identity = await world.say("id -u dev; id -g dev")
    user, group = identity.split()
    assert await world.say(look) == f"755 0:0\n600 {user}:7\n640 {user}:{group}\nnewnewnew"
    await put(world, "/tmp/secret", change_mode=True)
    assert await world.say("stat -c '%a %u:%g' /tmp/secret") == f"644 {user}:7"


async def test_an_upload_follows_a_link_as_a_command_would(world: World) -> None:
    await world.create()
    await world.say(
        "cd /tmp; mkdir -p dir/sub; echo old > dir/file; chmod 750 dir/file;"
        "ln -s ../file dir/sub/one;"
        "ln -s /tmp/dir/sub/one two; ln -s dir/made three; ln -s absent/made four; ln -s five five;"
        "ln -s dir six; chown -h dev two"
    )
    await put(world, "/tmp/two")
    await put(world, "/tmp/three")
    assert await world.say("cd /tmp; stat -c %a dir/file dir/made; cat dir/file dir/made") == (
        "750\n644\nnewnew"
    )
    assert await world.say("cd /tmp; readlink two dir/sub/one three | tr '\\n' ' '") == (
        "/tmp/dir/sub/one ../file dir/made"
    )
    for path, code in (
        ("/tmp/four", ErrorCode.NOT_FOUND),
        ("/tmp/five", ErrorCode.INVALID),
        ("/tmp/six", ErrorCode.INVALID),
    ):
        assert (await refused(world.kernel.put_file("a", path, parents=True))).code is code
    await world.say("test ! -e /tmp/absent")


async def test_an_upload_that_is_given_up_leaves_nothing(world: World) -> None:
    await world.create()
    await world.say("echo old > /tmp/file")
    upload = await world.kernel.put_file("a", "/tmp/file")
    os.write(upload.descriptor, b"x" * MIB)
    upload.close()
    upload.close()
    assert await world.say("cat /tmp/file; ls -A /tmp") == "old\nfile"


async def test_killing_the_process_of_an_upload_ends_it_with_an_error(world: World) -> None:
    await world.create()
    with await world.kernel.put_file("a", "/tmp/file") as upload:
        await world.shell("kill -9 -1")
        error = await refused(upload.commit(0o600))
    assert error.code is ErrorCode.UNAVAILABLE
    assert await world.say("ls -A /tmp") == ""


async def test_a_full_disk_leaves_the_old_file(world: World) -> None:
    await world.create(disk_bytes=4 * MIB)
    await world.say("echo old > /tmp/file")
    with await world.kernel.put_file("a", "/tmp/file") as upload:
        assert os.write(upload.descriptor, b"x" * 8 * MIB) < 8 * MIB
        with pytest.raises(OSError, match="28"):
            os.write(upload.descriptor, b"x")
    assert await world.say("cat /tmp/file") == "old"
    assert (await world.shell("echo room > /tmp/other")).exit_code == 0


async def test_without_inodes_nothing_changes(world: World) -> None:
    await world.create(inodes=64)
    await world.shell("i=0; while [ $i -lt 100 ]; do : > /tmp/f$i; i=$((i+1)); done 2>/dev/null")
    error = await refused(world.kernel.put_file("a", "/tmp/more"))
    assert error.code is ErrorCode.EXHAUSTED
    error = await refused(unpack(world, "/tmp", archive((member("more"), b"x"))))
    assert error.code is ErrorCode.EXHAUSTED
    assert (await world.shell("test -e /tmp/more")).exit_code == 1


# --- Moving, looking, removing --------------------------------------------------------------------


async def test_a_move_can_keep_what_is_there(world: World) -> None:
    await world.create()
    await world.say("mkdir /tmp/a /tmp/b; echo 1 > /tmp/a/one; echo 2 > /tmp/two")
    kernel = world.kernel
    error = await refused(kernel.rename("a", "/tmp/two", "/tmp/a/one", replace=False))
    assert error.code is ErrorCode.CONFLICT
    await kernel.rename("a", "/tmp/two", "/tmp/a/one")
    await kernel.rename("a", "/tmp/a", "/tmp/b")
    await kernel.rename("a", "/tmp/b", "/tmp/c", replace=False)
    assert await world.say("cat /tmp/c/one") == "2"
    await kernel.rename("a", "/work/code.txt", "/tmp/code.txt")
    assert await world.say("cat /tmp/code.txt; ls /work") == "from the workspaceboth.txt"
    for path, target in (("/work", "/tmp/work"), ("/tmp/code.txt", "/dev/shm/code.txt")):
        error = await refused(kernel.rename("a", path, target))
        assert (error.code, error.details["reason"]) == (ErrorCode.UNSUPPORTED, "across_layers")
    error = await refused(kernel.rename("a", "/tmp/c", "/tmp/c/below"))
    assert (error.code, error.details["reason"]) == (ErrorCode.INVALID, "invalid_path")


async def test_a_stat_of_a_link_says_where_it_leads(world: World) -> None:
    await world.create()
    await world.say("ln -s ../there /tmp/link; chown -h 7:8 /tmp/link")
    found = await world.kernel.stat("a", "/tmp/link")
    assert (found.kind, found.link_target, found.user_id, found.group_id) == (
        FileKind.LINK,
        "../there",
        7,
        8,
    )


async def test_a_large_directory_is_listed_in_pages_with_stats(world: World) -> None:
    await world.create(inodes=30_000)
    await world.python(
        "import os\nos.mkdir('/tmp/many')\n"
        "for i in range(12_345): os.close(os.open(f'/tmp/many/{i}', os.O_CREAT, 0o600))\n"
        "os.symlink('x', '/tmp/many/link'); os.mkdir('/tmp/many/dir')"
    )
    names: list[str] = []
    after, more = "", True
    while more:
        page = await world.kernel.list_page("a", "/tmp/many", after=after, limit=1000)
        assert len(page.entries) <= 1000
        assert all(entry.stat is not None for entry in page.entries)
        names += [entry.name for entry in page.entries]
        after, more = page.entries[-1].name, page.more
    assert names == sorted([*map(str, range(12_345)), "link", "dir"])
    last = {entry.name: entry for entry in page.entries}["link"]
    assert last.stat is not None
    assert (last.kind, last.stat.link_target) == (FileKind.LINK, "x")


async def test_a_tree_is_removed_without_following_links(world: World) -> None:
    await world.create()
    await world.say(
        "mkdir -p /tmp/t/a/b/c /tmp/kept; echo x > /tmp/kept/file; ln -s /tmp/kept /tmp/t/a/link;"
        "ln -s /tmp/kept/file /tmp/t/file; mkfifo /tmp/t/pipe; chmod 0 /tmp/t/a/b/c"
    )
    removal = await world.kernel.remove_tree("a", "/tmp/t")
    assert (removal.complete, removal.removed) == (True, 7)
    assert await world.say("ls /tmp; cat /tmp/kept/file") == "kept\nx"
    await world.say("ln -s /tmp/kept /tmp/link")
    assert (await world.kernel.remove_tree("a", "/tmp/link")).removed == 1
    assert (await world.kernel.remove_tree("a", "/tmp/kept/file")).removed == 1
    assert (await refused(world.kernel.remove_tree("a", "/tmp/t"))).code is ErrorCode.NOT_FOUND
    assert (await refused(world.kernel.remove_tree("a", "/"))).code is ErrorCode.DENIED
    error = await refused(world.kernel.remove_tree("a", "/root", user="dev"))
    assert error.code is ErrorCode.DENIED
    assert (await refused(world.kernel.remove_tree("a", "/dev/shm"))).code in {
        ErrorCode.INVALID,
        ErrorCode.DENIED,
    }


async def test_a_very_deep_tree_is_removed(world: World) -> None:
    await world.create(inodes=30_000)
    await world.python(
        "import os\nos.mkdir('/tmp/deep'); os.chdir('/tmp/deep')\n"
        "for i in range(3000):\n    os.mkdir('d'); open('f', 'w').close(); os.chdir('d')"
    )
    removal = await world.kernel.remove_tree("a", "/tmp/deep", budget_s=5.0)
    assert (removal.complete, removal.removed) == (True, 6001)


async def test_a_huge_tree_is_removed_piece_by_piece(world: World) -> None:
    await world.create(inodes=30_000)
    await world.python(
        "import os\n"
        "for d in range(100):\n    os.makedirs(f'/tmp/t/{d}')\n"
        "    for i in range(200): open(f'/tmp/t/{d}/{i}', 'w').close()"
    )
    removed, rounds = 0, 0
    while True:
        removal = await world.kernel.remove_tree("a", "/tmp/t", budget_s=0.005)
        removed, rounds = removed + removal.removed, rounds + 1
        if removal.complete:
            break
    assert (removed, rounds > 1) == (20_101, True)


async def test_removal_under_an_attacker_who_moves_directories_touches_nothing_else(
    world: World,
) -> None:
    await world.create(inodes=30_000)
    await world.say("mkdir -p /tmp/t /tmp/out /home/dev/kept; echo x > /home/dev/kept/file")
    attack = asyncio.create_task(
        world.python(
            "import os, time\nend = time.time() + 3\ni = 0\n"
            "while time.time() < end:\n    i += 1\n    try:\n"
            "        os.makedirs(f'/tmp/t/{i % 7}/x/y', exist_ok=True)\n"
            "        os.rename(f'/tmp/t/{i % 7}/x', f'/tmp/out/{i}')\n"
            "        os.symlink('/home/dev/kept', f'/tmp/t/{i % 7}/x')\n"
            "    except OSError: pass"
        )
    )
    while not attack.done():
        await tolerant(world.kernel.remove_tree("a", "/tmp/t", budget_s=0.05))
    await attack
    assert await world.say("cat /home/dev/kept/file") == "x"
