"""How far an import is, on standard error: a bar for people, JSON lines for programs."""

from __future__ import annotations

import json as json_text
import sys
from contextlib import ExitStack
from typing import Any, Final

_LINE_EVERY_BYTES: Final = 8 << 20


class ImportProgress:
    """Called with ``(stage, done_bytes, total_bytes)``; a total of 0 means that it is not known.

    On a terminal it is a bar; with ``json`` a line for each new stage, every few MiB and at each
    stage's end; else nothing.
    """

    def __init__(self, stack: ExitStack, *, json: bool) -> None:
        self._json = json
        self._stage = ""
        self._told_bytes = 0
        self._bar: Any = None
        if not json and sys.stderr.isatty():
            self._bar = stack.enter_context(_bar())
            self._task = self._bar.add_task("start", total=None)

    def __call__(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        """Show it."""
        begins = stage != self._stage
        self._stage = stage
        if self._bar is not None:
            if begins:
                self._bar.reset(self._task, description=stage)
            self._bar.update(self._task, completed=done_bytes, total=total_bytes or None)
        elif self._json and (
            begins
            or done_bytes - self._told_bytes >= _LINE_EVERY_BYTES
            or done_bytes == total_bytes > self._told_bytes
        ):
            self._told_bytes = done_bytes
            _print({"stage": stage, "done_bytes": done_bytes, "total_bytes": total_bytes})


def tell_line(step: str, done: int, count: int) -> None:
    """Say as a JSON line which step of ``count`` begins."""
    _print({"stage": step, "done": done, "total": count})


def _print(line: dict[str, str | int]) -> None:
    print(json_text.dumps(line), file=sys.stderr, flush=True)


def _bar() -> Any:
    from rich.console import Console  # noqa: PLC0415  only imports pay for it
    from rich.progress import (  # noqa: PLC0415  as above
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TransferSpeedColumn,
    )

    return Progress(
        TextColumn("{task.description:<10}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
