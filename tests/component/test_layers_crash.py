"""A process that dies at any step of an import leaves the old state or the new one."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.layer import LayerKind
from dsec_sandboxd.layers import LayerStore
from dsec_sandboxd.layers.staging import exclusive
from layer_builders import file_member, tar_bytes

# The interpreter announces every file operation to audit hooks; this one kills the process at the
# given one, which no clean-up code survives.
DYING_IMPORT = """
import asyncio, os, signal, sys
from pathlib import Path
from dsec_common.wire.layer import LayerKind
from dsec_sandboxd.layers import LayerStore

WATCHED = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.symlink",
           "os.chmod", "os.chown", "os.utime", "subprocess.Popen", "shutil.rmtree"}
left = int(sys.argv[3])
armed = False

def count(event, arguments):
    global left
    if armed and event in WATCHED:
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

async def main():
    global armed
    store = LayerStore(Path(sys.argv[1]))
    await store.open()
    armed = True
    await store.import_layer(
        "default", "layer", "1", Path(sys.argv[2]), kind=LayerKind.BASE, replace=True)
    armed = False
    await store.close()

sys.addaudithook(count)
STEPS
"""

# One process that forks for every step, since starting an interpreter takes longer than an import.
EVERY_STEP = DYING_IMPORT.replace(
    "STEPS",
    """
import shutil
step = 0
while True:
    step += 1
    target = Path(sys.argv[3]) / str(step)
    shutil.copytree(sys.argv[1], target)
    child = os.fork()
    if child == 0:
        left = step
        sys.argv[1] = str(target)
        asyncio.run(main())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(step, status, flush=True)
    if status == 0:
        break
""",
).replace("left = int(sys.argv[3])", "left = 0")


async def import_archive(directory: Path, archive: Path) -> str:
    async with LayerStore(directory) as store:
        imported = await store.import_layer(
            "default", "layer", "1", archive, kind=LayerKind.BASE, replace=True
        )
        return imported.layer.digest


async def recovered_digest(directory: Path, old: str, new: str) -> str:
    """Open the store as the next process would, check it, and return what it holds."""
    async with LayerStore(directory) as store:
        digest = (await store.resolve("default", "layer@1")).digest
    assert list((directory / "staging").iterdir()) == []
    images = directory / "images" / "sha256"
    kept = {f"sha256:{path.stem}" for path in images.glob("*.erofs")}
    assert kept == {f"sha256:{path.stem}" for path in images.glob("*.json")}
    # A replaced image waits for the garbage collection; one without a reference must be gone.
    assert kept == ({old} if digest == old else {old, new})
    return digest


async def test_a_kill_at_any_step_leaves_the_old_layer_or_the_new_one(tmp_path: Path) -> None:
    before, after = tmp_path / "before.tar", tmp_path / "after.tar"
    before.write_bytes(tar_bytes([file_member("a", b"before")]))
    after.write_bytes(tar_bytes([file_member("d/a", b"after"), file_member("b")]))
    template, states = tmp_path / "store", tmp_path / "states"
    old = await import_archive(template, before)
    new = await import_archive(tmp_path / "elsewhere", after)
    states.mkdir()
    runner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", EVERY_STEP, template, after, states, stdout=subprocess.PIPE
    )
    output, _ = await runner.communicate()
    steps = [[int(field) for field in line.split()] for line in output.splitlines()]
    assert {status for _, status in steps[:-1]} == {int(signal.SIGKILL)}
    assert steps[-1][1] == 0
    assert len(steps) > 30
    found = [await recovered_digest(states / str(step), old, new) for step, _ in steps]
    assert set(found) == {old, new}
    assert found == sorted(found, key=[old, new].index)


async def test_a_dead_import_is_removed_and_a_living_one_is_left_alone(tmp_path: Path) -> None:
    directory, archive = tmp_path / "store", tmp_path / "a.tar"
    archive.write_bytes(tar_bytes([file_member("a", bytes(1 << 20))] * 40))
    async with LayerStore(directory) as store:
        reading = asyncio.Event()
        task = asyncio.create_task(
            store.import_layer(
                "default",
                "layer",
                "1",
                archive,
                kind=LayerKind.BASE,
                progress=lambda step: reading.set() if step.done_bytes else None,
            )
        )
        await reading.wait()
        async with LayerStore(directory) as other:
            assert await other.open() == 0
        await task
        dead = directory / "staging" / "0123"
        (dead / "tree" / "d").mkdir(parents=True)
        (dead / "intent").write_text("not a digest")
        dead.with_suffix(".lock").touch()
        assert await store.open() == 1
        assert list((directory / "staging").iterdir()) == []
        await store.resolve("default", "layer@1")


def test_a_lock_that_is_never_given_back_is_unavailable(tmp_path: Path) -> None:
    lock = tmp_path / "store.lock"
    with exclusive(lock, 1.0), pytest.raises(DsecError) as error, exclusive(lock, 0.05):
        pass
    assert error.value.code is ErrorCode.UNAVAILABLE
    assert error.value.retryable
