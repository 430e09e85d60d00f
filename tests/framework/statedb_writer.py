"""Writes to a StateDB until it is killed, and says after each write that it has returned.

``python statedb_writer.py DIRECTORY FROM``: each write *n* puts ``n`` under ``step`` and its own
key together; every tenth is held by a snapshot, and every third of those is gone back to.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dsec_common.statedb import StateDB


def main() -> None:
    """Write for ever."""
    space = StateDB(Path(sys.argv[1])).namespace("rollout")
    number = int(sys.argv[2])
    while True:
        version = space.write({"step": b"%d" % number, f"key-{number:06}": b"x" * 100})
        if number % 10 == 0:
            held = space.snapshot()
            if number % 30 == 0:
                space.put("step", b"undone")
                space.rollback(held)
            version = space.version
        print(number, version, flush=True)  # noqa: T201  whoever kills it reads this
        number += 1


if __name__ == "__main__":
    main()
