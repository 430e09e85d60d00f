"""Runs benchmarks: ``python -m benchmarks NAME… [--json]``, or ``all``."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import traceback
from typing import TYPE_CHECKING, Final, cast

import uvloop
from rich.console import Console

import benchmarks
from benchmarks.report import Options, Report, all_met, to_json, to_table
from dsec_common.errors import DsecError
from dsec_common.logging import configure_logging

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from typing import Any

    Run = Callable[[Options], Coroutine[Any, Any, Report]]

MET: Final = 0
NOT_MET: Final = 1
NOT_MEASURED: Final = 2

_NOT_BENCHMARKS: Final = frozenset({"__main__", "memory", "peers", "platform", "report"})


def names() -> list[str]:
    """Return the names of all benchmarks: the modules of this package, without its own tools."""
    found = (module.name for module in pkgutil.iter_modules(benchmarks.__path__))
    return sorted(name for name in found if name not in _NOT_BENCHMARKS and name[0] != "_")


def load(name: str) -> Run:
    """Return the ``run`` of one benchmark. Only the asked-for modules are imported."""
    return cast("Run", importlib.import_module(f"benchmarks.{name}").run)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 0 when all is met, 1 when not, 2 when some was not measured."""
    known = names()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names",
        nargs="+",
        metavar="NAME",
        choices=[*known, "all"],
        help=f"what to measure: {', '.join(known)} or all",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per name")
    parser.add_argument(
        "--rounds",
        type=_positive,
        default=Options().rounds,
        help="turns of ours and the peer (default %(default)s)",
    )
    parser.add_argument(
        "--count",
        type=_positive,
        default=0,
        help="operations in each round (default: the benchmark's own)",
    )
    asked = parser.parse_args(arguments)
    chosen = known if "all" in asked.names else list(dict.fromkeys(asked.names))
    options = Options(rounds=asked.rounds, count=asked.count)
    return measure({name: load(name) for name in chosen}, options, as_json=asked.json)


def measure(chosen: dict[str, Run], options: Options, *, as_json: bool) -> int:
    """Run the chosen benchmarks one after the other, printing each as soon as it is done.

    One that fails keeps no other from being measured.
    """
    reports = []
    for name, run in chosen.items():
        try:
            report = uvloop.run(run(options))
        except DsecError as error:
            print(f"{name} was not measured: {error}", file=sys.stderr)
            continue
        except Exception:  # noqa: BLE001  what it says is for whoever mends the benchmark
            print(f"{name} was not measured: it failed", file=sys.stderr)
            traceback.print_exc()
            continue
        if as_json:
            print(to_json(report), flush=True)
        else:
            Console().print(to_table(report))
        reports.append(report)
    if not all_met(reports):
        return NOT_MET
    return MET if len(reports) == len(chosen) else NOT_MEASURED


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


if __name__ == "__main__":
    configure_logging("benchmark", level="error")
    sys.exit(main())
