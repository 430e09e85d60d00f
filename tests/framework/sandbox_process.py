"""The processes of a sandbox's commands, as the host numbers them."""

from __future__ import annotations

from dsec_common.subjects import ScopedId
from dsec_sandboxd.kernel.cgroups_layout import detect_layout


def process_in(sandbox_id: str) -> int | None:
    """Return the first process of a sandbox's first command; None while none runs."""
    scoped = ScopedId.parse(sandbox_id)
    directory = detect_layout().unified / f"dsec-{scoped.owner}" / scoped.local
    for group in sorted(directory.glob("exec-*/cgroup.procs")):
        processes = group.read_text().split()
        if processes:
            return int(processes[0])
    return None
