"""What packing costs: `dsec-pack build` of an example, from the command line to the file's end.

The first build of a round begins with an empty cache, the second has what the first one left. The
peer is a Python that ends at once: no command line can be faster.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import Options, Reach, Report, median
from dsec_common.errors import DsecError, ErrorCode

EXAMPLE = Path(__file__).parents[1] / "examples" / "forecast"
SECOND_TARGET_S = 1.0
SIZE_TARGET_MIB = 12.0
MIB = 1 << 20
_TIMED = ("first", "second", "python")


def _timed(*arguments: str | Path) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def _build(directory: Path, name: str) -> tuple[float, bytes]:
    """Return how long a build takes as a process of its own, and what it wrote."""
    output = directory / name
    program = (
        "import os, runpy, sys; os.environ['DSEC_PACK_CACHE'] = sys.argv.pop(1); "
        "runpy.run_module('dsec.cli.pack', run_name='__main__')"
    )
    taken_s = _timed("-c", program, directory / "cache", "build", EXAMPLE, "-o", output)
    return taken_s, output.read_bytes()


def _round() -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="dsec-bench-pack-") as name:
        directory = Path(name)
        first_s, first = _build(directory, "first.dsec")
        second_s, second = _build(directory, "second.dsec")
    if first != second:
        raise DsecError(ErrorCode.INTERNAL, "two builds of the same input differ")
    return {
        "first_s": first_s,
        "second_s": second_s,
        "python_s": _timed("-c", "pass"),
        "size_mib": len(first) / MIB,
    }


async def run(options: Options) -> Report:
    """Measure rounds of a first and a second build."""
    rounds = [await asyncio.to_thread(_round) for _ in range(options.rounds)]
    figures = {f"{name}_p50_s": median(it[f"{name}_s"] for it in rounds) for name in _TIMED}
    size_mib = rounds[0]["size_mib"]
    return Report(
        name="pack",
        figures={**figures, "package_mib": size_mib},
        ratios={"second_to_python_s": figures["second_p50_s"] / figures["python_p50_s"]},
        reach=(
            Reach.at_most("second_p50_s", figures["second_p50_s"], SECOND_TARGET_S),
            Reach.at_most("package_mib", size_mib, SIZE_TARGET_MIB),
        ),
    )
