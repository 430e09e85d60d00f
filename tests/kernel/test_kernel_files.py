"""Files of a sandbox, through its own permissions."""

from __future__ import annotations

import os

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.file_ports import FileKind
from dsec_sandboxd.kernel.interface import OpenMode
from kernel_world import World


async def write(world: World, path: str, data: bytes, mode: OpenMode = OpenMode.WRITE) -> None:
    descriptor = await world.kernel.open_file("a", path, mode)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(data)


async def read(world: World, path: str, user: str = "0") -> bytes:
    descriptor = await world.kernel.open_file("a", path, OpenMode.READ, user=user)
    with os.fdopen(descriptor, "rb") as stream:
        return stream.read()


async def refusal(
    world: World, path: str, mode: OpenMode = OpenMode.READ, user: str = "0"
) -> DsecError:
    with pytest.raises(DsecError) as caught:
        os.close(await world.kernel.open_file("a", path, mode, user=user))
    return caught.value


async def test_what_is_written_is_read_on_both_sides(world: World) -> None:
    await world.create()
    data = bytes(range(256)) * 1000
    await write(world, "/tmp/file", data)
    assert await read(world, "/tmp/file") == data
    assert await world.say("wc -c < /tmp/file") == "256000"
    await write(world, "/tmp/file", b"short")
    await write(world, "/tmp/file", b"er", OpenMode.APPEND)
    assert await world.say("cat /tmp/file") == "shorter"


async def test_a_file_of_a_lower_layer_is_copied_up_when_written(world: World) -> None:
    await world.create()
    await write(world, "/work/both.txt", b"changed")
    assert await world.say("cat /work/both.txt") == "changed"


async def test_creating_what_exists_is_a_conflict(world: World) -> None:
    await world.create()
    error = await refusal(world, "/work/both.txt", OpenMode.CREATE)
    assert error.code is ErrorCode.CONFLICT


async def test_files_belong_to_the_user_who_makes_them(world: World) -> None:
    await world.create()
    os.close(
        await world.kernel.open_file(
            "a", "/home/dev/mine", OpenMode.WRITE, permissions=0o640, user="dev"
        )
    )
    stat = await world.kernel.stat("a", "/home/dev/mine")
    assert (stat.kind, stat.user_id, stat.group_id, stat.mode) == (FileKind.FILE, 1000, 1000, 0o640)
    assert (await refusal(world, "/root/secret", user="dev")).code is ErrorCode.DENIED
    assert await read(world, "/root/secret") == b"for root"


async def test_every_kind_of_refusal_is_typed(world: World) -> None:
    await world.create()
    await world.say("ln -s loop /tmp/loop; mkfifo /tmp/fifo")
    absent = await refusal(world, "/tmp/absent")
    assert (absent.code, absent.details["what"]) == (ErrorCode.NOT_FOUND, "path")
    assert (await refusal(world, "/work/both.txt/x")).code is ErrorCode.NOT_FOUND
    for path, reason in (
        ("/tmp", "is_directory"),
        ("relative", "invalid_path"),
        ("/a\0b", "invalid_path"),
        ("/" + "x" * 5000, "invalid_path"),
        ("/" + "x" * 300, "invalid_path"),
        ("/tmp/loop", "invalid_path"),
        ("/tmp/fifo", "not_a_file"),
        ("/dev/null", "not_a_file"),
        ("/dev/zero", "not_a_file"),
        ("/proc/meminfo", "not_a_file"),
        ("/proc/self/ns/mnt", "not_a_file"),
    ):
        error = await refusal(world, path)
        assert error.code is ErrorCode.INVALID, path
        assert error.details["reason"] == reason, path
    assert (await refusal(world, "/tmp/fifo", OpenMode.WRITE)).code is ErrorCode.INVALID
    assert (await refusal(world, "/proc/self/mem")).code is ErrorCode.DENIED
    assert (await refusal(world, "/run/dsec/../../proc/1/mem")).code in {
        ErrorCode.DENIED,
        ErrorCode.INVALID,
    }


async def test_a_file_of_the_run_directory_can_be_read(world: World) -> None:
    run = world.directory / "run"
    run.mkdir()
    (run / "note").write_text("from the host")
    await world.create(run_directory=run)
    assert await read(world, "/run/dsec/note") == b"from the host"
    assert (await refusal(world, "/run/dsec/note", OpenMode.WRITE)).code is ErrorCode.DENIED


async def test_descriptors_of_the_operation_itself_lead_nowhere(world: World) -> None:
    await world.create()
    for number in range(10):
        with pytest.raises(DsecError):
            await world.kernel.list_directory("a", f"/proc/self/fd/{number}/..")
        with pytest.raises(DsecError):
            await world.run("true", cwd=f"/proc/self/fd/{number}")
    assert (await refusal(world, "/proc/self/exe")).code is ErrorCode.DENIED
    assert (await refusal(world, "/proc/self/exe", OpenMode.WRITE)).code is ErrorCode.DENIED


async def test_a_link_leads_inside_the_sandbox_only(world: World) -> None:
    await world.create()
    await world.say(
        "ln -s /etc/hostname-of-host /tmp/absolute; ln -s ../../../../../../../etc/passwd /tmp/up"
    )
    assert (await refusal(world, "/tmp/absolute")).code is ErrorCode.NOT_FOUND
    assert await read(world, "/tmp/up") == (await world.say("cat /etc/passwd")).encode() + b"\n"


async def test_directories_are_made_listed_renamed_and_removed(world: World) -> None:
    await world.create()
    kernel = world.kernel
    await kernel.make_directory("a", "/data/deep/er", parents=True, permissions=0o750)
    await kernel.make_directory("a", "/data/deep/er", parents=True)
    assert (await kernel.stat("a", "/data/deep/er")).mode == 0o750
    with pytest.raises(DsecError) as caught:
        await kernel.make_directory("a", "/data/deep/er")
    assert caught.value.code is ErrorCode.CONFLICT
    with pytest.raises(DsecError) as caught:
        await kernel.make_directory("a", "/absent/x")
    assert caught.value.code is ErrorCode.NOT_FOUND
    await world.say("cd /data; ln -s x link; mkfifo pipe; printf 'a' > \"$(printf 'n\\377\\n')\"")
    entries = {entry.name: entry.kind for entry in await kernel.list_directory("a", "/data")}
    assert entries == {
        "deep": FileKind.DIRECTORY,
        "link": FileKind.LINK,
        "pipe": FileKind.OTHER,
        "n\udcff": FileKind.FILE,
    }
    await kernel.rename("a", "/data/n\udcff", "/data/plain")
    assert await read(world, "/data/plain") == b"a"
    with pytest.raises(DsecError) as caught:
        await kernel.unlink("a", "/data/deep")
    assert caught.value.code is ErrorCode.CONFLICT
    await kernel.unlink("a", "/data/deep/er")
    await kernel.unlink("a", "/data/link")
    await kernel.unlink("a", "/data/plain")
    assert [entry.name for entry in await kernel.list_directory("a", "/data")] != []


async def test_a_listing_is_bounded(world: World) -> None:
    await world.create(inodes=20_000)
    await world.python(
        "import os\nos.mkdir('/tmp/many')\n"
        "for n in range(10100): open(f'/tmp/many/{n}', 'w').close()"
    )
    assert len(await world.kernel.list_directory("a", "/tmp/many")) == 10_000


async def test_a_link_itself_is_described(world: World) -> None:
    await world.create()
    await world.say("ln -s /etc/passwd /tmp/link")
    assert (await world.kernel.stat("a", "/tmp/link")).kind is FileKind.LINK
    with pytest.raises(DsecError) as caught:
        await world.kernel.stat("a", "/tmp/absent")
    assert caught.value.code is ErrorCode.NOT_FOUND
