"""Whether CUDA's Multi-Process Service runs here."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_PID_FILE: Final = "nvidia-cuda-mps-control.pid"
_NAME: Final = "nvidia-cuda-mps"


def mps_runs(pipes: Path, processes: Path = Path("/proc")) -> bool:
    """Return whether the control daemon lives: its file names a process that bears its name."""
    try:
        pid = int((pipes / _PID_FILE).read_text(encoding="ascii"))
        return (processes / str(pid) / "comm").read_text(encoding="utf-8").startswith(_NAME)
    except (OSError, ValueError):
        return False
