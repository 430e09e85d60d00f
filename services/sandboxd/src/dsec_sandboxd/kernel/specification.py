"""Specifications, checked whole before anything is made."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from dsec_common.errors import invalid
from dsec_sandboxd.kernel.cgroups import CgroupLimits
from dsec_sandboxd.kernel.protocol import HOSTNAME_BYTES, LAYERS_MAX

if TYPE_CHECKING:
    from dsec_sandboxd.kernel.interface import SandboxSpec

_LOCAL: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_HOSTNAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")


def check_spec(spec: SandboxSpec) -> CgroupLimits:
    """Return the limits of a specification that the kernel can enforce.

    Raises:
        DsecError: ``invalid``, naming the field.
    """
    if _LOCAL.fullmatch(spec.local) is None:
        raise invalid(f"{spec.local[:80]!r} is not a sandbox id: use [a-z0-9][a-z0-9_-]*, up to 63")
    if not 1 <= len(spec.layers) <= LAYERS_MAX:
        raise invalid(f"a sandbox has 1 to {LAYERS_MAX} layers, not {len(spec.layers)}")
    if _HOSTNAME.fullmatch(spec.hostname) is None or len(spec.hostname) >= HOSTNAME_BYTES:
        raise invalid(f"{spec.hostname[:80]!r} is not a host name")
    if not 0 < spec.disk_bytes <= spec.memory_bytes:
        raise invalid(
            f"disk_bytes is {spec.disk_bytes}: the writable layer is in memory, so it is from 1 to "
            f"memory_bytes ({spec.memory_bytes})"
        )
    if not 0 < spec.inodes < 1 << 32:
        raise invalid(f"inodes is {spec.inodes}: from 1 to {(1 << 32) - 1} are possible")
    return CgroupLimits(
        memory_bytes=spec.memory_bytes,
        cpus=spec.cpus,
        pids=spec.pids,
        cpu_quota=spec.cpu_quota,
        end_all_on_oom=False,
    )
