"""Has a daemon with this directory on its path die just before it writes down a certain thing.

An action called ``kill-3`` has it killed before the third write of that action, once.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections import Counter
from pathlib import Path

_writes: Counter[str] = Counter()


def _die_in_time() -> None:
    from dsec_sandboxd.actions.records import ActionRecord  # noqa: PLC0415  only for a daemon
    from dsec_sandboxd.actions.store import ActionStore  # noqa: PLC0415

    put = ActionStore.put

    def put_or_die(store: ActionStore, action: ActionRecord) -> None:
        asked = re.fullmatch(r"kill-(\d+)", action.name)
        _writes[action.action_id] += 1
        if asked and _writes[action.action_id] == int(asked[1]):
            with contextlib.suppress(FileExistsError):
                (Path(os.environ["KILLED_ONCE"]) / action.name).touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        put(store, action)

    ActionStore.put = put_or_die  # type: ignore[method-assign, assignment]


if "KILLED_ONCE" in os.environ:
    _die_in_time()
