"""The host's own limits that all sandboxes share, raised so that no sandbox uses them up.

What a sandbox may take is limited by its own memory and processes, to which the kernel charges all
of this. A lower limit for the whole host protects nobody: it lets one sandbox of a gigabyte, with a
descriptor in every 256 bytes, keep every other process of the host without files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from dsec_sandboxd.kernel.protocol import SLOTS_MAX

#: Terminals of one sandbox (``PTYS_MAX`` of ``native/child.c``).
TERMINALS_PER_SANDBOX: Final = 16
#: Terminals that the kernel keeps for the host itself.
_TERMINALS_RESERVED: Final = 4096

LEAST: Final = {
    "fs/file-max": (1 << 63) - 1,  # as service managers set it since the kernel charges files
    "kernel/pty/max": SLOTS_MAX * TERMINALS_PER_SANDBOX + _TERMINALS_RESERVED,
}
"""What each limit below ``/proc/sys`` is at least, on a host that runs sandboxes."""


def raise_host_limits(root: Path = Path("/proc/sys")) -> tuple[str, ...]:
    """Raise the shared limits that are lower than ``LEAST``; never lower one.

    Returns:
        The names of those that this process may not raise, for ``KernelFacts.missing``.
    """
    refused = []
    for name, least in LEAST.items():
        try:
            if int((root / name).read_text()) < least:
                (root / name).write_text(str(least))
        except OSError:
            refused.append(name)
    return tuple(refused)
