"""Set-up: the three layers of each task, made once and found by name from then on."""

from __future__ import annotations

import asyncio
import hashlib
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dsec import DSecClient, DsecError, ErrorCode, Limits
from dsec.rootfs import build_host_rootfs
from examples.repair.edits import Edit, apply_edit, edits_of_source

PACKAGE = "toolz"
PACKAGE_VERSION = "1.0.0"
PACKAGE_SHA256 = "2c86e3d9a04798ac556793bced838816296a2f085017664e4995cb40a1047a02"
PYTEST = "pytest==8.3.5"
SOURCES = ("toolz/itertoolz.py", "toolz/dicttoolz.py", "toolz/functoolz.py", "toolz/recipes.py")
AGENT_DIRECTORY = Path(__file__).parent / "agent"
LIMITS = Limits(memory_bytes=512 << 20, disk_bytes=64 << 20, pids=128)
TEST_COMMAND = ("python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "toolz")
TEST_ENVIRONMENT = {"PYTHONPATH": "/opt/toolkit/site-packages", "PYTHONDONTWRITEBYTECODE": "1"}

Say = Callable[[str], None]


@dataclass(frozen=True)
class Task:
    """One broken package: the references of its layers. What was broken stays in the set-up."""

    name: str
    base: str
    workspace: str
    toolkit: str


def _fingerprint(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    # It also complains of packages that are installed here and have nothing to do with the target.
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(
            f"pip {' '.join(arguments)} failed; is a package index reachable? It said:\n"
            f"{done.stderr[-2000:]}"
        )


async def _exists(client: DSecClient, reference: str) -> bool:
    try:
        await client.layers.inspect(reference)
    except DsecError as error:
        if error.code is ErrorCode.NOT_FOUND:
            return False
        raise
    return True


async def ensure_base(client: DSecClient, say: Say) -> str:
    """Return the base image's reference: this host's own Python and shell."""
    version = _fingerprint(sys.version.encode(), sys.executable.encode())
    reference = f"host-python@{version}"
    if not await _exists(client, reference):
        say(f"building the base layer {reference} from this host's Python and shell")
        with tempfile.TemporaryDirectory() as scratch:
            root = Path(scratch) / "root"
            await asyncio.to_thread(build_host_rootfs, root, python=True)
            await client.layers.import_directory(
                root, kind="base", name="host-python", version=version
            )
    return reference


async def ensure_toolkit(client: DSecClient, say: Say) -> str:
    """Return the toolkit's reference: the agent, its channel and pytest."""
    import dsec.agent_channel  # noqa: PLC0415  only its file is wanted

    files = [*sorted(AGENT_DIRECTORY.glob("*.py")), Path(dsec.agent_channel.__file__)]
    version = _fingerprint(PYTEST.encode(), *(path.read_bytes() for path in files))
    reference = f"repair-agent@{version}"
    if not await _exists(client, reference):
        say(f"building the toolkit layer {reference} ({PYTEST} and the agent)")
        with tempfile.TemporaryDirectory() as scratch:
            root = Path(scratch)
            target = str(root / "opt/toolkit/site-packages")
            await asyncio.to_thread(_pip, "install", "--target", target, PYTEST)
            (root / "opt/agent").mkdir(parents=True)
            for path in files:
                shutil.copy(path, root / "opt/agent" / path.name)
            await client.layers.import_directory(
                root, kind="toolkit", name="repair-agent", version=version
            )
    return reference


def fetch_source(cache: Path) -> Path:
    """Return the unpacked source distribution of the package, fetched by name once."""
    source = cache / f"{PACKAGE}-{PACKAGE_VERSION}"
    if not source.exists():
        cache.mkdir(parents=True, exist_ok=True)
        requirement = cache / "requirement.txt"
        requirement.write_text(f"{PACKAGE}=={PACKAGE_VERSION} --hash=sha256:{PACKAGE_SHA256}\n")
        _pip(
            *("download", "--no-deps", "--no-binary", ":all:", "--require-hashes"),
            *("--dest", str(cache), "--requirement", str(requirement)),
        )
        with tarfile.open(cache / f"{source.name}.tar.gz") as archive:
            archive.extractall(cache / "unpacking", filter="data")
        (cache / "unpacking" / source.name).rename(source)
    return source


def draw_mutation(source: Path, seed: int) -> Edit:
    """Return the one edit that this seed breaks the package with."""
    possible = [
        edit
        for path in SOURCES
        for edit in edits_of_source(path, (source / path).read_text(encoding="utf-8"))
    ]
    return random.Random(seed).choice(possible)  # noqa: S311  a seeded draw, not a secret


async def _is_noticed(client: DSecClient, source: Path, edit: Edit, layers: Task) -> bool:
    """Return whether the package's own tests fail, and end, with the edit made."""
    broken = apply_edit((source / edit.path).read_text(encoding="utf-8"), edit)
    async with await client.create_sandbox(
        layers.base, workspace=layers.workspace, toolkits=(layers.toolkit,), limits=LIMITS
    ) as sandbox:
        await sandbox.write_file(f"/workspace/{edit.path}", broken.encode())
        result = await sandbox.exec(
            TEST_COMMAND, cwd="/workspace", env=TEST_ENVIRONMENT, timeout_s=15
        )
    # 1 is pytest's "tests failed"; anything else (a hang, an import error) makes a poor task.
    return result.exit_code == 1


async def _import_workspace(client: DSecClient, source: Path, name: str, edit: Edit | None) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        workspace = Path(scratch) / "workspace"
        shutil.copytree(source, workspace)
        if edit is not None:
            path = workspace / edit.path
            path.write_text(apply_edit(path.read_text(encoding="utf-8"), edit), encoding="utf-8")
        await client.layers.import_directory(
            scratch, kind="workspace", name=name, version=PACKAGE_VERSION, replace=True
        )
    return f"{name}@{PACKAGE_VERSION}"


def _remember(chosen: Path, seeds: list[int]) -> None:
    chosen.write_text("\n".join(map(str, seeds)) + "\n")


def _remembered(chosen: Path) -> list[int]:
    return [int(line) for line in chosen.read_text().split()] if chosen.exists() else []


async def ensure_tasks(
    client: DSecClient, cache: Path, first_seed: int, count: int, say: Say
) -> list[Task]:
    """Return ``count`` tasks, making the layers that are not there yet.

    A seed whose mutation the package's own tests do not notice is passed over.
    """
    base = await ensure_base(client, say)
    toolkit = await ensure_toolkit(client, say)
    chosen = cache / f"seeds-{first_seed}-{count}-{toolkit.partition('@')[2]}"
    known = _remembered(chosen)
    tasks = [
        Task(f"seed {seed}", base, f"{PACKAGE}-broken-{seed}@{PACKAGE_VERSION}", toolkit)
        for seed in known
    ]
    if tasks and all([await _exists(client, task.workspace) for task in tasks]):
        return tasks

    say(f"fetching the source distribution {PACKAGE} {PACKAGE_VERSION}")
    source = await asyncio.to_thread(fetch_source, cache)
    pristine = Task("", base, await _import_workspace(client, source, PACKAGE, None), toolkit)
    tasks, seeds, seed = [], [], first_seed
    while len(tasks) < count:
        edit = draw_mutation(source, seed)
        if await _is_noticed(client, source, edit, pristine):
            reference = await _import_workspace(client, source, f"{PACKAGE}-broken-{seed}", edit)
            tasks.append(Task(f"seed {seed}", base, reference, toolkit))
            seeds.append(seed)
            say(f"made the workspace {reference}: its own tests notice")
        seed += 1
    _remember(chosen, seeds)
    return tasks
