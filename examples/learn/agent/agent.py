"""The agent in the sandbox: it runs what its trainer says and tells which files there are then."""

import os
import subprocess
from pathlib import Path

from agent_channel import AgentChannel

WORK = Path(os.environ["WORK"])


def observed() -> dict[str, list[str]]:
    """Return the names of the files that hold something."""
    return {"files": sorted(path.name for path in WORK.iterdir() if path.stat().st_size)}


with AgentChannel() as trainer:
    feedback = trainer.step("begun", observed())
    while not feedback["done"]:
        command = ["/bin/sh", "-c", feedback["payload"]["command"]]
        subprocess.run(command, cwd=WORK, check=False, stderr=subprocess.DEVNULL)
        feedback = trainer.step("ran", observed())
