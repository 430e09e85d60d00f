"""Whether CUDA's Multi-Process Service runs here."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_PID_FILE: Final = "nvidia-cuda-mps-control.pid"
_NAME: Final = b"nvidia-cuda-mps"


def mps_runs(pipes: Path, processes: Path = Path("/proc")) -> bool:
    """Return whether the control daemon lives: its file names a process that bears its name."""
    try:
        pid = int((pipes / _PID_FILE).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return False
    return is_mps(pid, processes)


def is_mps(pid: int, processes: Path = Path("/proc")) -> bool:
    """Return whether a process bears the name of MPS's daemons; one that is gone does not."""
    try:
        return (processes / str(pid) / "comm").read_bytes().startswith(_NAME)
    except OSError:
        return False
