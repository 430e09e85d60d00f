"""What our figures are compared with, measured in the same run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.cgroups_layout import detect_layout
from dsec_sandboxd.kernel.seccomp import compile_filter

if TYPE_CHECKING:
    from collections.abc import Iterator

_NATIVE: Final = Path(__file__).parent / "native"
_BARE: Final = _NATIVE / "bin" / "bare"


class BareFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the bare kernel program measured; latencies from just before ``clone3``."""

    count: int
    processes: int
    create_to_ready_p50_ms: float
    create_to_ready_p99_ms: float
    create_to_first_exec_p50_ms: float
    create_to_first_exec_p99_ms: float
    rate_per_s: float


class BareForks(msgspec.Struct, frozen=True, kw_only=True):
    """What the bare kernel program measured of copies, and of children of a copy."""

    count: int
    processes: int
    snapshot_p50_ms: float
    rollback_p50_ms: float
    fork_rate_per_s: float


class BareAlive(msgspec.Struct, frozen=True, kw_only=True):
    """What the bare kernel program measured of sandboxes that live together."""

    count: int
    bytes_each: float


async def run_bare_alive(count: int) -> BareAlive:
    """Have ``count`` bare sandboxes alive at once and tell their memory; see :func:`run_bare`."""
    return msgspec.json.decode(await _measure(1, count, "--alive"), type=BareAlive)


async def run_bare_forks(processes: int, count: int) -> BareForks:
    """Make ``count`` children of one copy of 1 MiB, all alive at once; see :func:`run_bare`."""
    output = await _measure(processes, count, "--shared-network", "--fork")
    return msgspec.json.decode(output, type=BareForks)


class GuardedForks(msgspec.Struct, frozen=True, kw_only=True):
    """What the program measured that guards its children as the platform does."""

    count: int
    processes: int
    fork_rate_per_s: float


async def run_guarded_forks(processes: int, count: int) -> GuardedForks:
    """Make ``count`` guarded children of one copy of 1 MiB, all alive; see :func:`run_bare`.

    Each has its cgroups with limits, its ids, its masks and its filter. Nothing is left behind.
    """
    await _run("make", "-s", "-C", str(_NATIVE))
    layout = detect_layout()
    trees = {"unified": layout.unified} | (layout.v1 if layout.mode == "hybrid" else {})
    with tempfile.TemporaryDirectory(prefix="dsec-guarded-") as directory:
        layers = await _make_layers(Path(directory))
        program = Path(directory) / "filter"
        program.write_bytes(compile_filter())
        groups = {name: root / f"guarded-{os.getpid()}" for name, root in trees.items()}
        try:
            for group in groups.values():
                group.mkdir()
            output = await _run(
                str(_BARE.with_name("guarded")),
                "--layers",
                *map(str, layers),
                *("--count", str(count), "--processes", str(processes)),
                *("--filter", str(program)),
                *(word for name, group in groups.items() for word in (f"--{name}", str(group))),
            )
        finally:
            for group in groups.values():
                _remove(group)
    return msgspec.json.decode(output, type=GuardedForks)


def _remove(group: Path) -> None:
    """Remove a directory of cgroups whose processes have ended; those of a killed program, too."""
    for member in group.iterdir() if group.exists() else ():
        if member.is_dir():
            with contextlib.suppress(OSError):
                member.rmdir()
    with contextlib.suppress(OSError):
        group.rmdir()


async def run_bare(processes: int, count: int, *, shared_network: bool = False) -> BareFigures:
    """Create, use and end ``count`` bare sandboxes in ``processes`` processes at once.

    Compiles the program when it is missing or older than its source. Nothing is left behind.

    Args:
        processes: how many processes create sandboxes, each one after the other.
        count: sandboxes in all, rounded down to a multiple of ``processes``.
        shared_network: leave out the network namespace, as a platform with a pool of them does.

    Raises:
        DsecError: ``unavailable`` without a compiler, ``mkfs.erofs`` or root; the program's own
            message is part of it.
    """
    flags = ["--shared-network"] if shared_network else []
    return msgspec.json.decode(await _measure(processes, count, *flags), type=BareFigures)


async def _measure(processes: int, count: int, *flags: str) -> bytes:
    await _run("make", "-s", "-C", str(_NATIVE))
    with tempfile.TemporaryDirectory(prefix="dsec-bare-") as directory:
        layers = await _make_layers(Path(directory))
        return await _run(
            str(_BARE),
            "--layers",
            *map(str, layers),
            "--count",
            str(count),
            "--processes",
            str(processes),
            *flags,
        )


async def _make_layers(directory: Path) -> list[Path]:
    """Return three small EROFS images: a base with one command, a workspace and a toolkit."""
    images = []
    for name, files in (("base", ()), ("workspace", ("task.txt",)), ("toolkit", ("agent.txt",))):
        tree = directory / name
        tree.mkdir()
        if name == "base":
            (tree / "proc").mkdir()
            (tree / "bin").mkdir()
            shutil.copy(_BARE.with_name("bare-init"), tree / "bin" / "true")
        for file in files:
            (tree / file).write_text(f"the {name} layer\n", encoding="utf-8")
        images.append(directory / f"{name}.erofs")
        await _run("mkfs.erofs", "--quiet", str(images[-1]), str(tree))
    return images


async def _run(*command: str) -> bytes:
    with _reported(command[0]):
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            output, errors = await process.communicate()
        except BaseException:
            process.kill()
            await process.wait()
            raise
    if process.returncode != 0:
        message = errors.decode(errors="replace").strip() or f"exit code {process.returncode}"
        raise DsecError(ErrorCode.UNAVAILABLE, f"{command[0]} failed: {message}")
    return output


@contextlib.contextmanager
def _reported(program: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise DsecError(
            ErrorCode.UNAVAILABLE, f"{program} is not installed: it is needed for this benchmark"
        ) from error
