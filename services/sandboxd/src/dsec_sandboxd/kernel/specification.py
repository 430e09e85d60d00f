"""Specifications, checked whole before anything is made."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_sandboxd.kernel.cgroups import CgroupLimits
from dsec_sandboxd.kernel.cgroups_layout import LimitText
from dsec_sandboxd.kernel.protocol import (
    CREATE_BEST_EFFORT,
    CREATE_CORE_SCHEDULING,
    CREATE_HAS_PIPES_MOUNT,
    CREATE_HAS_RUN_MOUNT,
    CREATE_ON_SNAPSHOT,
    HOSTNAME_BYTES,
    LAYERS_MAX,
    SETTING_DEVICE,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsec_sandboxd.kernel.interface import DeviceNode, SandboxSpec

_LOCAL: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_HOSTNAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")


def check_spec(spec: SandboxSpec, missing: tuple[str, ...] = ()) -> CgroupLimits:
    """Return the limits of a specification that the kernel can enforce.

    Args:
        spec: what is asked for.
        missing: what this host lacks, as ``KernelFacts.missing`` says.

    Raises:
        DsecError: ``invalid``, naming the field; ``unsupported`` for what this host lacks.
    """
    if spec.core_scheduling and "core_scheduling" in missing:
        raise DsecError(
            ErrorCode.UNSUPPORTED,
            "this host cannot keep sandboxes apart by processor core: its kernel has no core "
            "scheduling, or its processors no hardware threads; create without core_scheduling, or "
            "on another node",
            details={"missing": "core_scheduling"},
        )
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
        end_all_on_oom=spec.oom_group,
        best_effort=spec.best_effort,
    )


def device_texts(devices: Sequence[DeviceNode]) -> list[LimitText]:
    """Return devices as the spawner's request carries them, among its texts."""
    return [
        LimitText(SETTING_DEVICE, device.name, b"%d:%d" % (device.major, device.minor))
        for device in devices
    ]


def create_flags(spec: SandboxSpec, *, has_run_mount: bool) -> int:
    """Return the flags of the spawner's request for a checked specification."""
    chosen = {
        CREATE_HAS_RUN_MOUNT: has_run_mount,
        CREATE_BEST_EFFORT: spec.best_effort,
        CREATE_CORE_SCHEDULING: spec.core_scheduling,
        CREATE_ON_SNAPSHOT: spec.on_snapshot,
        CREATE_HAS_PIPES_MOUNT: has_run_mount and spec.mps_pipes is not None,
    }
    return sum(flag for flag, wanted in chosen.items() if wanted)
