"""Build hook: compiles the C programs of sandboxd (spawner and PID 1) with warnings as errors."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("services/sandboxd/src/dsec_sandboxd/native")


class NativeBuildHook(BuildHookInterface[Any]):
    """Runs ``make`` in the native folder, on Linux, and packs what it built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel (or the editable install) is put together."""
        del version
        native = Path(self.root) / NATIVE
        if not (native / "Makefile").exists():
            return
        subprocess.run(["make", "-s", "-C", str(native)], check=True)
        build_data["pure_python"] = False
        build_data["artifacts"].append(f"{NATIVE}/bin/*")
