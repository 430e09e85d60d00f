"""What our figures are compared with, measured in the same run."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from dsec_common.errors import DsecError, ErrorCode

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
    await _run("make", "-s", "-C", str(_NATIVE))
    with tempfile.TemporaryDirectory(prefix="dsec-bare-") as directory:
        layers = await _make_layers(Path(directory))
        flags = ["--shared-network"] if shared_network else []
        output = await _run(
            str(_BARE),
            "--layers",
            *map(str, layers),
            "--count",
            str(count),
            "--processes",
            str(processes),
            *flags,
        )
    return msgspec.json.decode(output, type=BareFigures)


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
