"""The bare kernel program that creation is compared with."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks import peers
from dsec_common.errors import DsecError, ErrorCode


@pytest.mark.parametrize(("processes", "count"), [(1, 5), (2, 11)])
async def test_it_creates_uses_and_ends_real_sandboxes(processes: int, count: int) -> None:
    figures = await peers.run_bare(processes, count)
    assert (figures.count, figures.processes) == (count - count % processes, processes)
    assert 0 < figures.create_to_ready_p50_ms < figures.create_to_first_exec_p50_ms
    assert figures.create_to_first_exec_p50_ms <= figures.create_to_first_exec_p99_ms < 1_000
    assert figures.rate_per_s > 1


async def test_a_shared_network_namespace_is_less_work() -> None:
    fresh, shared = [], []
    for _ in range(3):  # the best of some turns: others use this machine too
        fresh.append((await peers.run_bare(1, 20)).create_to_ready_p50_ms)
        shared.append((await peers.run_bare(1, 20, shared_network=True)).create_to_ready_p50_ms)
    assert min(shared) < min(fresh)


async def test_what_it_cannot_do_is_told_in_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(DsecError, match="usage: bare") as caught:
        await peers.run_bare(2, 1)
    assert caught.value.code is ErrorCode.UNAVAILABLE
    image = tmp_path / "not-erofs"
    image.write_bytes(b"\0" * 8192)
    layers = [str(image)] * 3
    program = await asyncio.create_subprocess_exec(
        str(peers._BARE), "--layers", *layers, "--count", "1", "--processes", "1", stderr=-1
    )
    _, errors = await program.communicate()
    assert program.returncode == 1
    assert str(image).encode() in errors
