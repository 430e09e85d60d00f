"""Processors wait awake from the first request until a while after the last."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from dsec_sandboxd.quick_wakes import DEVICE, QuickWakes

AT_ONCE = 0


def latency_us() -> int:
    """Return the longest wake that the kernel allows now."""
    return int.from_bytes(Path(DEVICE).read_bytes()[:4], "little")


async def until_let_go(wakes: QuickWakes) -> None:
    async with asyncio.timeout(10):
        while wakes.held:
            await asyncio.sleep(0.005)


async def test_the_kernel_is_told_while_requests_come_and_not_after() -> None:
    if not os.access(DEVICE, os.W_OK):
        pytest.skip(f"{DEVICE} may not be written here")
    with QuickWakes(0.02) as wakes:
        assert not wakes.held
        wakes.note()
        assert wakes.held
        assert latency_us() == AT_ONCE
        await until_let_go(wakes)
        wakes.note()  # and again
        assert wakes.held
    assert not wakes.held


async def test_each_request_prolongs_it(tmp_path: Path) -> None:
    device = tmp_path / "device"
    device.touch()
    with QuickWakes(0.02, str(device)) as wakes:
        wakes.note()
        for _ in range(10):
            await asyncio.sleep(0.01)
            assert wakes.held
            wakes.note()
        await until_let_go(wakes)
        words = device.read_bytes()
    # One word at the start, one for the ten requests, and one at their end.
    assert len(words) == 3 * 4
    assert words[4:8] == bytes(4)


@pytest.mark.parametrize("hold_s", [0.0, 0.1])
async def test_without_it_or_its_device_nothing_is_held(hold_s: float, tmp_path: Path) -> None:
    device = tmp_path / "device"
    if hold_s == 0:
        device.touch()
    with QuickWakes(hold_s, str(device)) as wakes:
        wakes.note()
        assert not wakes.held
    assert hold_s or device.read_bytes() == b""


async def test_a_device_that_fails_later_is_let_go_of() -> None:
    with QuickWakes(0.1, "/dev/full") as wakes:
        wakes.note()
        assert not wakes.held
        wakes.note()
        assert not wakes.held
