"""The cgroup contract where version 2 is all there is: on a stock kernel in an emulated machine.

Whole sandboxes cannot be made there: overlays from descriptors need Linux 6.13, and the newest
kernel that Debian 12 has for such a machine is 6.12. So what a sandbox needs of its cgroups
(limits, ends for want of memory, freezing and reclaiming, being found again) is tried on the
drivers alone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from guest_kernel import KernelUnavailableError, cached_kernel

GUEST = Path(__file__).parents[1] / "framework" / "pure_v2_guest.py"


@pytest.mark.timeout(400)
def test_limits_hold_on_a_host_with_version_2_controllers() -> None:
    if shutil.which("qemu-system-x86_64") is None:
        pytest.skip("no qemu-system-x86_64 to emulate a machine with")
    try:
        kernel = cached_kernel()
    except KernelUnavailableError as error:
        pytest.skip(f"no kernel for an emulated machine: {error}")
    ended = subprocess.run(
        [sys.executable, str(GUEST), str(kernel)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert " passed" in ended.stdout
    assert "skipped" not in ended.stdout.splitlines()[-2]
