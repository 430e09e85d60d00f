"""``dsec simulate``: what a cluster would do with a trace."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from dsec.cli.output import SETTINGS, Json, Output, UsageError, run


@contextlib.contextmanager
def _only_results_on_standard_output() -> Iterator[None]:
    """Have what C libraries print go to standard error: HiGHS says now and then what it does."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


def simulate(
    *,
    scenario: Annotated[Path, typer.Argument(help="A YAML file: cluster, queues, mix or trace.")],
    plot: Annotated[bool, typer.Option("--plot", help="Write a picture beside the file.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Where --plot writes to.")] = None,
    json_output: Json = False,
) -> None:
    """Run the cores of broker and scheduler over a trace on a virtual clock, and compare.

    Nothing is asked of a running cluster. The same file has the same answer.
    """

    async def work(output: Output) -> None:
        try:
            from dsec.simulation import scenario as simulation  # noqa: PLC0415  an extra, as below
            from dsec.simulation.plot import plot as draw  # noqa: PLC0415
        except ImportError as error:
            raise UsageError(f"{error.name} is missing: pip install 'dsec[simulate]'") from None
        path = picture or scenario.with_suffix(".png")
        is_drawn = plot or picture is not None
        if is_drawn and not path.parent.is_dir():
            raise UsageError(f"there is no directory {path.parent} to write {path.name} to")
        try:
            asked = simulation.read_scenario(scenario)
            works = simulation.work_of(asked, scenario.parent)
            with _only_results_on_standard_output():
                results = simulation.simulate(asked, works)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if is_drawn:
            try:
                draw(results, max(it.at_s for it in works), path)
            except ImportError:
                raise UsageError("no matplotlib: pip install 'dsec[simulate]'") from None
            output.say(f"wrote {path}")
        reports = [told for told, _ in results]
        if output.json:
            output.document({"reports": reports})
            return
        output.table(
            ("POLICY", "USEFUL", "HELD", "COST", "PER CU-HOUR", "FAIRNESS"),
            [
                (
                    it.policy,
                    f"{100 * it.utilisation:.1f} %",
                    f"{100 * it.held:.1f} %",
                    f"{it.cost:.0f}",
                    f"{it.cost_per_cu_hour:.3f}",
                    f"{it.fairness:.3f}",
                )
                for it in reports
            ],
        )
        output.table(
            ("POLICY", "CLASS", "ASKED", "NEVER", "P50", "P99", "LONGEST", "IN SLA"),
            [
                (
                    it.policy,
                    name,
                    f"{waits.count}",
                    f"{waits.never}",
                    f"{waits.p50_s:.1f} s",
                    f"{waits.p99_s:.1f} s",
                    f"{waits.max_s:.1f} s",
                    f"{100 * waits.in_sla:.1f} %",
                )
                for it in reports
                for name, waits in it.waits.items()
            ],
        )

        elastic = [(it.policy, it.elastic) for it in reports if it.elastic is not None]
        if elastic:
            output.table(
                ("POLICY", "ELASTIC", "SHRINKS", "RECOVERIES", "ORDERED", "GIVEN UP", "NODE-HOURS"),
                [
                    (
                        name,
                        f"{100 * it.share:.1f} %",
                        f"{it.shrinks}",
                        f"{it.recoveries}",
                        f"{it.nodes_ordered}",
                        f"{it.nodes_given_up}",
                        f"{it.node_hours:.1f}",
                    )
                    for name, it in elastic
                ],
            )

    run(work, json=json_output or SETTINGS.json)
