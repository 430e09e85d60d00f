"""What a command says: tables for people, JSON for programs, errors that say what to do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec
import typer

from dsec_common.errors import DsecError, ErrorCode

EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
EXIT_PIPE_CLOSED: Final = 141

#: Control characters but tabs and ends of lines, the directions of writing, halves of characters.
_OBEYED: Final = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)

Json = Annotated[
    bool,
    typer.Option("--json", help="JSON on standard output; errors as JSON on standard error."),
]


class Settings:
    """What the options before the command say; one per process."""

    debug: bool = False
    json: bool = False
    servers: str | None = None
    credentials: str | None = None
    state_directory: str | None = None


SETTINGS: Final = Settings()


class UsageError(Exception):
    """The command line cannot be meant; exit code 2."""


class Output:
    """Where a command's results go.

    Standard output carries only results: with ``--json`` exactly one document, or one a line for
    streams. Everything else goes to standard error. What is for people drives no terminal, whatever
    agents called their files: see :func:`visible`.
    """

    def __init__(self, *, json: bool) -> None:
        self.json = json

    def document(self, value: Any) -> None:
        """Write one JSON document, on one line."""
        sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
        sys.stdout.flush()

    def text(self, line: str) -> None:
        """Write a line for people."""
        sys.stdout.write(visible(line) + "\n")
        sys.stdout.flush()

    def say(self, line: str) -> None:
        """Tell people how it goes; programs are not told."""
        if not self.json:
            sys.stderr.write(visible(line) + "\n")
            sys.stderr.flush()

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str = ""
    ) -> None:
        """Write a table, or ``empty`` on standard error when there are no rows."""
        from rich.console import Console  # noqa: PLC0415  only tables pay for it
        from rich.table import Table  # noqa: PLC0415  as above
        from rich.text import Text  # noqa: PLC0415  as above

        rows = list(rows)
        if not rows:
            self.say(empty or "nothing to show")
            return
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 3, 0, 0))
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            # What users named must not be read as markup.
            table.add_row(*(Text(visible(cell)) for cell in row))
        console = Console()
        if console.is_terminal:
            console.print(table)
        else:
            # Not for eyes: no wrapping, so that every row stays one line.
            Console(width=10_000, soft_wrap=True).print(table)

    def facts(self, facts: dict[str, str]) -> None:
        """Write one thing's properties, one a line."""
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            self.text(f"{name:<{width}}  {value}")

    def usage(self, message: str) -> None:
        """Tell why the command line cannot be meant."""
        if self.json:
            self.error(DsecError(ErrorCode.INVALID, message))
        else:
            sys.stderr.write(f"{visible(message)}\n")

    def error(self, error: DsecError) -> None:
        """Tell what failed, where, and what to do."""
        if self.json:
            body = {
                "code": error.code,
                "message": error.message,
                "retryable": error.retryable,
                "retry_after_s": error.retry_after_s,
                "details": error.details,
            }
            sys.stderr.write(msgspec.json.encode({"error": body}).decode() + "\n")
        else:
            red, plain = ("\x1b[1;31m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
            said = visible(error.message)
            sys.stderr.write(f"{red}error{plain} ({error.code}): {said}\n")


def visible(text: str) -> str:
    """Return text with what a terminal would obey written as Python's source has it."""
    return _OBEYED.sub(lambda one: one[0].encode("unicode_escape").decode(), text)


def run(
    work: Callable[[Output], Awaitable[int | None]],
    *,
    json: bool,
    failure: Callable[[DsecError | None], int] = lambda _: EXIT_FAILURE,
) -> None:
    """Run a command's work and leave the process with its exit code.

    Args:
        work: returns the exit code; None means 0.
        json: whether the caller wants JSON.
        failure: returns the exit code of a failure; None is one of this machine's.
    """
    from dsec_common.logging import configure_logging  # noqa: PLC0415  not needed for --help

    output = Output(json=json or SETTINGS.json)
    configure_logging("dsec-cli", level="debug" if SETTINGS.debug else "error")

    async def live() -> int | None:
        return await work(output)

    try:
        code = asyncio.run(live())
        sys.stdout.flush()
    except DsecError as error:
        if SETTINGS.debug:
            raise
        output.error(error)
        raise typer.Exit(failure(error)) from None
    except UsageError as error:
        output.usage(str(error))
        raise typer.Exit(EXIT_USAGE) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:  # whoever reads has read enough
        _let_go_of_standard_output()
        raise typer.Exit(EXIT_PIPE_CLOSED) from None
    except OSError as error:
        if SETTINGS.debug:
            raise
        what = f"{error.filename}: " if error.filename else ""
        missing = isinstance(error, FileNotFoundError)
        kind = ErrorCode.NOT_FOUND if missing else ErrorCode.INVALID
        output.error(DsecError(kind, f"{what}{error.strerror or error}"))
        raise typer.Exit(failure(None)) from None
    if code:
        raise typer.Exit(code)


def _let_go_of_standard_output() -> None:
    """Have what is still to be printed at the process's end go nowhere, without a complaint."""
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    with contextlib.suppress(OSError, ValueError):
        os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def size_text(size_bytes: int) -> str:
    """Return a size for people: ``1.5 MiB``."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:  # noqa: PLR2004  a KiB
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def age_text(since: float) -> str:
    """Return how long ago a Unix time was: ``3m``."""
    seconds = max(time.time() - since, 0)
    for limit, unit in ((60, "s"), (3600, "m"), (86_400, "h")):
        if seconds < limit:
            return f"{seconds // (limit // 60 if unit != 'h' else 3600):.0f}{unit}"
    return f"{seconds // 86_400:.0f}d"


def time_text(moment: float) -> str:
    """Return a Unix time as UTC, to the second."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if moment else "-"


def pairs(values: Sequence[str], what: str) -> dict[str, str]:
    """Return ``KEY=VALUE`` words as a dict."""
    found: dict[str, str] = {}
    for word in values:
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise UsageError(f"{what} is KEY=VALUE, not {word!r}")
        found[key] = value
    return found


_SIZE_UNITS: Final = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}


def size_bytes(text: str, what: str = "") -> int:
    """Return the bytes of ``512``, ``256m`` or ``1.5g`` (powers of 1024)."""
    body = text.strip().lower().removesuffix("ib").removesuffix("b")
    unit = body[-1:] if body[-1:].isalpha() else ""
    try:
        return int(float(body.removesuffix(unit)) * _SIZE_UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        where = f"{what}: " if what else ""
        raise UsageError(f"{where}{text!r} is not a size; write 512m or 2g") from None
