"""What the spawner alone is asked, rightly and wrongly: what it answers, and that nothing stays."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsec_common.errors import DsecError
from dsec_sandboxd.kernel.cgroups import LimitText
from dsec_sandboxd.kernel.linux import PROGRAMS
from dsec_sandboxd.kernel.protocol import (
    CREATE_HAS_RUN_MOUNT,
    SpawnerKind,
    SpawnerRequest,
    step_name,
)
from dsec_sandboxd.kernel.spawner import Spawner
from kernel_world import (
    MIB,
    NODE,
    UNIFIED,
    Layers,
    World,
    descriptors_of,
    wait_until_dead,
)

BASE_ID = 0x7000_0000
RAW = UNIFIED / f"dsec-{NODE}-raw"


@pytest.fixture
async def spawner(layers: Layers) -> AsyncIterator[Spawner]:
    """A spawner of its own with the base as layer 0."""
    started = await Spawner.start(PROGRAMS / "spawner", PROGRAMS / "pid1")
    image = os.open(layers.base, os.O_RDONLY)
    try:
        await started.request(SpawnerRequest(kind=SpawnerKind.HOLD, layer=0), [image])
        yield started
    finally:
        os.close(image)
        await started.stop()


@pytest.fixture
def group() -> Iterator[int]:
    """A node's v2 directory; whatever is left in it is killed."""
    path = RAW
    path.mkdir()
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)
    (path / "cgroup.kill").write_text("1")
    subprocess.run(
        [
            "sh",
            "-c",
            'while ! rmdir "$0" 2>/dev/null; do rmdir "$0"/*/ 2>/dev/null; sleep 0.01; done',
            path,
        ],
        check=True,
        timeout=10,
    )


def create_request(**changes: object) -> SpawnerRequest:
    values: dict[str, object] = {
        "kind": SpawnerKind.CREATE,
        "slot": 0,
        "base_id": BASE_ID,
        "layers": [0],
        "disk_bytes": 4 * MIB,
        "inodes": 100,
        "hostname": "raw",
        "cgroup": "sandbox",
    }
    return SpawnerRequest(**(values | changes))  # type: ignore[arg-type]  # a test's shorthand


async def held(spawner: Spawner) -> int:
    # It answers before it closes what a request brought: one more answer, and all is closed.
    await spawner.request(SpawnerRequest(kind=SpawnerKind.RELEASE, slot=0))
    return len(descriptors_of(spawner.pid))


@pytest.mark.parametrize(
    ("changes", "step", "error"),
    [
        ({"layers": [1]}, "protocol", errno.ENOENT),
        ({"layers": []}, "protocol", errno.EINVAL),
        ({"layers": [5000]}, "protocol", errno.ENOENT),
        ({"base_id": 0}, "protocol", errno.EINVAL),
        ({"base_id": 65535}, "protocol", errno.EINVAL),
        ({"base_id": 0xFFFF_FFFF}, "protocol", errno.EINVAL),
        ({"slot": 4096}, "protocol", errno.EINVAL),
        ({"hostname": "x" * 64}, "protocol", errno.EINVAL),
        ({"controllers": 2}, "protocol", errno.EINVAL),
        ({"flags": CREATE_HAS_RUN_MOUNT}, "protocol", errno.EINVAL),
        ({"disk_bytes": 0}, "protocol", errno.EINVAL),
        ({"cgroup": ""}, "protocol", errno.EINVAL),
        ({"cgroup": ".."}, "protocol", errno.EINVAL),
        ({"cgroup": "a/b"}, "protocol", errno.EINVAL),
        ({"cgroup": "x" * 80}, "protocol", errno.EINVAL),
        ({"limit_texts": [LimitText(1, "pids.max", b"1")]}, "protocol", errno.EINVAL),
        ({"limit_texts": [LimitText(200, "pids.max", b"1")]}, "protocol", errno.EINVAL),
        ({"limit_texts": [LimitText(0, "../cgroup.freeze", b"1")]}, "protocol", errno.EINVAL),
        ({"limit_texts": [LimitText(0, "x" * 2000, b"1")]}, "protocol", errno.EINVAL),
        ({"limit_texts": [LimitText(0, "no.such", b"1")]}, "cgroup_limit", errno.ENOENT),
        ({"limit_texts": [LimitText(0, "cgroup.freeze", b"?")]}, "cgroup_limit", errno.EINVAL),
    ],
)
async def test_a_wrong_request_names_what_is_wrong_and_leaves_nothing(
    spawner: Spawner, group: int, changes: dict[str, object], step: str, error: int
) -> None:
    await spawner.request(SpawnerRequest(kind=SpawnerKind.WARM, slot=0, base_id=BASE_ID))
    before = await held(spawner)
    with pytest.raises(DsecError) as caught:
        await spawner.request(create_request(**changes), [group])
    assert caught.value.details["operation"] == step
    assert caught.value.details["errno"] == errno.errorcode[error]
    assert await held(spawner) == before
    assert [path for path in RAW.iterdir() if path.is_dir()] == []


async def test_what_waits_behind_a_creation_is_told_its_own_failure_and_leaves_nothing(
    spawner: Spawner, group: int
) -> None:
    for slot in (0, 1):
        warm = SpawnerRequest(kind=SpawnerKind.WARM, slot=slot, base_id=BASE_ID + slot * 65536)
        await spawner.request(warm)
    before = await held(spawner)
    wrong: list[tuple[dict[str, object], str, int]] = [
        ({"layers": [1]}, "protocol", errno.ENOENT),  # its cgroup is made before that is seen
        ({"limit_texts": [LimitText(0, "no.such", b"1")]}, "cgroup_limit", errno.ENOENT),
        ({"cgroup": "first"}, "cgroup_make", errno.EEXIST),
        ({"cgroup": ".."}, "protocol", errno.EINVAL),
    ]
    other = {"slot": 1, "base_id": BASE_ID + 65536}
    for changes, step, error in wrong:
        asked = [
            spawner.send(create_request(**named), [group])
            for named in ({"cgroup": "first"}, other | changes, other | {"cgroup": "third"})
        ]
        first, between, third = [await future for future in asked]
        assert (step_name(between[0].step), between[0].error) == (step, error)
        for name, (reply, descriptors) in (("first", first), ("third", third)):
            assert not reply.error
            signal.pidfd_send_signal(descriptors[0], signal.SIGKILL)
            for descriptor in descriptors:
                os.close(descriptor)
            wait_until_dead(reply.pid)
            (RAW / name).rmdir()
        assert [path for path in RAW.iterdir() if path.is_dir()] == []
        for slot in (0, 1):
            await spawner.request(SpawnerRequest(kind=SpawnerKind.RELEASE, slot=slot))
        assert await held(spawner) == before


async def test_a_failed_step_of_the_spawner_kills_the_child_and_closes_everything(
    spawner: Spawner, group: int, tmp_path: Path
) -> None:
    await spawner.request(SpawnerRequest(kind=SpawnerKind.WARM, slot=0, base_id=BASE_ID))
    before = await held(spawner)
    somewhere = os.open(tmp_path, os.O_RDONLY)
    cases = [
        ("clone", create_request(), [somewhere]),
        ("cgroup_make", create_request(controllers=1), [group, somewhere]),
        ("overlay", create_request(layers=[0] * 16), [group]),
    ]
    try:
        for step, request, descriptors in cases:
            future = spawner.send(request, descriptors)
            reply, received = await future
            if step == "overlay" and not reply.error:  # the same layer many times is possible
                for descriptor in received:
                    os.close(descriptor)
                await spawner.request(SpawnerRequest(kind=SpawnerKind.RELEASE, slot=0))
                continue
            again = dataclasses.replace(request, cgroup="again")  # the first may not be dead yet
            with pytest.raises(DsecError) as caught:
                await spawner.request(again, descriptors)
            assert caught.value.details["operation"] == step
            assert await held(spawner) == before, step
            assert os.listdir(somewhere) == []  # noqa: PTH208  a descriptor
    finally:
        os.close(somewhere)


async def test_a_step_of_the_child_that_fails_is_named_on_the_control_socket(
    world: World, group: int, spawner: Spawner
) -> None:
    # A plain directory is no detached mount: moving it to /run/dsec fails inside.
    not_a_mount = os.open(world.directory, os.O_RDONLY)
    try:
        _, received = await spawner.request(
            create_request(flags=CREATE_HAS_RUN_MOUNT), [group, not_a_mount]
        )
    finally:
        os.close(not_a_mount)
    from dsec_sandboxd.kernel.init import InitClient  # noqa: PLC0415  only here

    pidfd, control = received
    client = InitClient(control, lambda: None)
    with pytest.raises(DsecError) as caught:
        await client.ready
    assert caught.value.details["operation"] == "run_mount"
    client.close()
    os.close(pidfd)
