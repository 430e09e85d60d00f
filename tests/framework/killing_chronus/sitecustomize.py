"""Kills a Chronus between two of its writes: Python reads this file at its start, by PYTHONPATH.

The file that ``DSEC_KILL_FILE`` names says when: ``before_intent``, ``after_intent``,
``before_result`` or ``after_result`` of a rollout's action. It is removed first, so that the
Chronus that is started next lives.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsec_chronus.effects import WriteFrame
    from dsec_chronus.journal import Journal


def kill_when(asked: Path) -> None:
    """Have this process killed at the moment that the file says."""
    from dsec_chronus.journal import Journal  # noqa: PLC0415  only in the process that is meant
    from dsec_chronus.records import ActionBegun, ActionEnded  # noqa: PLC0415

    append = Journal.append

    def reached(moment: str) -> None:
        if asked.exists() and asked.read_text() == moment:
            asked.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    async def appended(self: Journal, wanted: WriteFrame) -> int:
        kinds = {type(record) for record in wanted.records}
        moments = [
            name
            for kind, name in ((ActionBegun, "intent"), (ActionEnded, "result"))
            if kind in kinds
        ]
        for name in moments:
            reached(f"before_{name}")
        sequence = await append(self, wanted)
        for name in moments:
            reached(f"after_{name}")
        return sequence

    Journal.append = appended  # type: ignore[method-assign]


if "dsec_chronus" in sys.orig_argv or any("dsec-chronus" in word for word in sys.orig_argv):
    kill_when(Path(os.environ["DSEC_KILL_FILE"]))
