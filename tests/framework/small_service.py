"""A service of a few lines for tests of the supervisor: ``python -m small_service``.

It keeps its runtime file as real services do and does what its last argument says: ``run``,
``ignore-term``, ``fail``, ``refuse`` (its configuration) or ``hang`` (never running).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path


def main() -> int:
    runtime_file, behaviour = Path(sys.argv[1]), sys.argv[2]
    if behaviour == "ignore-term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif behaviour != "hang":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if behaviour == "fail":
        sys.stderr.write(json.dumps({"level": "error", "event": "failed", "error": "no disk"}))
        return 1
    if behaviour == "refuse":
        sys.stderr.write("small-service: unknown setting 'nodes'")
        return 2
    if behaviour != "hang":
        temporary = runtime_file.with_suffix(".new")
        temporary.write_text(json.dumps({"pid": os.getpid(), "http_port": 1, "state": "running"}))
        temporary.replace(runtime_file)
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
