"""A shell task for OpenEnv's clients: ``uvicorn --factory examples.openenv.server:app``.

The platform is found as everywhere; ``DSEC_BASE`` names the base layer, by default ``host@1``.
"""

from __future__ import annotations

import os
from typing import Any

from dsec.adapters.episodes import ShellTask, Verifier
from dsec.adapters.openenv import environment_app
from dsec.sync import DSecClient


def app() -> Any:
    """Return the application; it is connected as long as the process lives."""
    task = ShellTask(
        {"base": os.environ.get("DSEC_BASE", "host@1"), "memory_bytes": 64 << 20},
        Verifier(["cmp", "/work/answer", "/verify/answer"], files={"/verify/answer": "42\n"}),
        prompt="Write 42 to the file answer, then submit.",
    )
    return environment_app(DSecClient().connect(), task)
