"""What the command lines have in common: seed, time, kills, and what a run's end is told by."""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import msgspec
import uvloop

from dsec_common.errors import DsecError
from soak.chaos_run import RunOptions

_SHOWN_MAX: Final = 100


class Told(Protocol):
    """What came of a run."""

    @property
    def violations(self) -> list[str]:
        """What must not be and was."""

    @property
    def clean(self) -> bool:
        """Whether all is as it must be."""

    def line(self) -> str:
        """Return the whole in one line."""


T = TypeVar("T", bound=Told)
Options = TypeVar("Options", bound=RunOptions)


class CommandLine(NamedTuple):
    """One of them.

    Attributes:
        program: how it is called.
        name: what its lines on standard error begin with.
        about: for its help.
        seconds_from: the environment variable that says how long.
        seconds: how long without it.
        counts: what there can be any number of, and how many by default.
        kill_every_s: by default.
    """

    program: str
    name: str
    about: str
    seconds_from: str
    seconds: float
    counts: Mapping[str, int]
    kill_every_s: float

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Return what is asked for, with a seed in any case, and say so.

        Raises:
            SystemExit: with 2, after the reason: it cannot be meant.
        """
        parser = argparse.ArgumentParser(prog=self.program, description=self.about)
        parser.add_argument(
            "--seed",
            type=int,
            default=None,
            help="repeats the same choices (default: a random one)",
        )
        parser.add_argument(
            "--seconds",
            type=float,
            default=os.environ.get(self.seconds_from, f"{self.seconds:g}"),
            help=f"how long (default: {self.seconds_from}, or {self.seconds:g})",
        )
        for name, count in self.counts.items():
            parser.add_argument(f"--{name}", type=int, default=count, help="default %(default)s")
        parser.add_argument(
            "--kill-every-s",
            type=float,
            default=self.kill_every_s,
            help="on average (default %(default)s); 0 kills nothing",
        )
        parser.add_argument(
            "--json", action="store_true", help="print the summary as one JSON object"
        )
        asked = parser.parse_args(arguments)
        counts = [getattr(asked, name) for name in self.counts]
        if not asked.seconds > 0 or min(counts) < 1 or not asked.kill_every_s >= 0:
            *first, last = "seconds", *self.counts
            names = f"{', '.join(first)} and {last}"
            parser.error(f"{names} are more than 0, and kill-every-s is 0 or more")
        if asked.seed is None:
            asked.seed = random.SystemRandom().randrange(10**6)
        print(f"{self.name}: seed {asked.seed}, {asked.seconds:g} s", file=sys.stderr, flush=True)
        return asked

    def run(
        self,
        arguments: Sequence[str] | None,
        kind: type[Options],
        work: Callable[[Options], Coroutine[Any, Any, T]],
        tell: Callable[[T], None],
    ) -> int:
        """Do what is asked for, print what came of it, and return how to exit.

        Args:
            arguments: of the command line; None for this process's own.
            kind: of the options that they make, with a field for each of ``counts``.
            work: does it.
            tell: prints what only this one's summary says.

        Returns:
            0 when all is as it must be, 1 when it is not, 2 when nothing could be started.

        Raises:
            SystemExit: see :meth:`parse`.
        """
        asked = self.parse(arguments)
        counts = {name: getattr(asked, name) for name in self.counts}
        options = kind(
            seed=asked.seed, seconds=asked.seconds, kill_every_s=asked.kill_every_s, **counts
        )
        try:
            summary = uvloop.run(work(options))
        except DsecError as error:
            print(f"{self.name}: {error}", file=sys.stderr)
            return 2
        if asked.json:
            print(msgspec.json.encode(summary).decode())
        else:
            tell(summary)
            for violation in summary.violations[:_SHOWN_MAX]:
                print(f"violation: {violation}")
            print(summary.line())
        return 0 if summary.clean else 1
