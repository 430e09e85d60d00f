"""What a node daemon that was killed leaves: sandboxes, cgroups, mounts, its way outside.

A daemon that starts again under the same name removes them itself; this is for when none will.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Final

from dsec_common.forwarding import put_back_unneeded
from dsec_common.host_side import remove_table, table_of

CGROUP_ROOT: Final = Path("/sys/fs/cgroup")

_GONE_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.01


def hold_node_name(node: str) -> socket.socket | None:
    """Take a node's name on this machine until the socket is closed; None while another has it.

    Two daemons of one name would take each other's cgroups for leftovers. An abstract socket is a
    lock that vanishes with its holder and lies in no directory.
    """
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        holder.bind(f"\0dsec-node-{node}")
    except OSError:
        holder.close()
        return None
    return holder


def sweep_node(node: str) -> bool:
    """End every sandbox of a node and remove its cgroups; return whether there was anything.

    Its rules on the host go, too, and what the host does for no other node any more; its device
    goes with its run directory.

    Only call it when the node's daemon is dead.
    """
    name = f"dsec-{node}"
    trees = [
        tree for tree in (CGROUP_ROOT / name, *(CGROUP_ROOT.glob(f"*/{name}"))) if tree.is_dir()
    ]
    for tree in trees:
        # Only trees of version 2 have it; sandboxes are in one of those on every host.
        with contextlib.suppress(OSError):
            (tree / "cgroup.kill").write_text("1")
    deadline = time.monotonic() + _GONE_TIMEOUT_S
    left = trees
    while left and time.monotonic() < deadline:
        left = [tree for tree in left if not _remove_tree(tree)]
        if left:
            time.sleep(_POLL_S)
    remove_table(table_of(node))
    put_back_unneeded()
    return bool(trees)


def _remove_tree(tree: Path) -> bool:
    """Remove a cgroup and those in it, as far as they are empty; return whether all are gone."""
    for root, _, _ in os.walk(tree, topdown=False):
        with contextlib.suppress(OSError):
            Path(root).rmdir()
    return not tree.exists()


def remove_run_directory(directory: Path) -> None:
    """Unmount what is mounted below ``directory`` and remove it."""
    below = f"{directory}/"
    for line in reversed(Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()):
        point = line.split()[4]
        if f"{point}/".startswith(below):
            subprocess.run(["umount", "--lazy", point], check=False, stderr=subprocess.DEVNULL)
    shutil.rmtree(directory, ignore_errors=True)
