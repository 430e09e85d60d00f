"""The picture of a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dsec.simulation.outcome import Outcome
from dsec.simulation.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(results: Sequence[tuple[Report, Outcome]], until_s: float, path: Path) -> None:
    """Write a PNG: use and waiting over time, waits, cost and fairness beside each other.

    Where there is an elastic engine, also what leases hold beyond their promise, and the nodes of
    the provider.

    Needs matplotlib (the extra ``simulate``).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  an extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    is_elastic = any(outcome.moves for _, outcome in results)
    figure = Figure(figsize=(12, 12.5 if is_elastic else 9), layout="constrained")
    FigureCanvasAgg(figure)
    used, waiting, waits, summary, *elastic = figure.subplots(3 if is_elastic else 2, 2).flat
    if is_elastic:
        _plot_elastic(elastic, results, until_s)
    for told, outcome in results:
        hours = [time / 3600 for time in outcome.times_s if time <= until_s]
        parts = [
            100 * useful / total if total else 0.0
            for useful, total in zip(outcome.useful_cu, outcome.total_cu, strict=True)
        ]
        label = f"{told.policy}: {100 * told.utilisation:.1f} %"
        used.step(hours, parts[: len(hours)], where="post", linewidth=0.9, label=label)
        waiting.step(
            hours, outcome.waiting[: len(hours)], where="post", linewidth=0.9, label=told.policy
        )
        ordered = sorted(served.wait_s for served in outcome.served)
        rank = [100 * (at + 1) / max(1, len(ordered)) for at in range(len(ordered))]
        waits.plot([max(wait, 0.01) for wait in ordered], rank, label=told.policy)
    used.set(title="Useful work", xlabel="hours", ylabel="% of all Compute Units", ylim=(0, 102))
    waiting.set(title="Waiting", xlabel="hours", ylabel="requests")
    waits.set(title="Waits", xlabel="seconds", ylabel="% that waited at most", xscale="log")
    for axes in (used, waiting, waits):
        axes.legend(loc="best", fontsize="small")
        axes.grid(alpha=0.3)
    names = [told.policy for told, _ in results]
    at = range(len(names))
    bars = summary.bar(
        [x - 0.2 for x in at], [told.cost_per_cu_hour for told, _ in results], 0.4, label="price"
    )
    summary.bar_label(bars, fmt="%.2f")
    fair = summary.bar(
        [x + 0.2 for x in at], [told.fairness for told, _ in results], 0.4, label="fairness"
    )
    summary.bar_label(fair, fmt="%.2f")
    summary.set(title="Price of a useful CU-hour; fairness between projects (Jain)")
    summary.set_xticks(list(at), names)
    summary.margins(y=0.25)
    summary.legend(loc="upper center", ncols=2, fontsize="small")
    figure.savefig(path, dpi=110)


def _plot_elastic(
    axes: Sequence[Axes], results: Sequence[tuple[Report, Outcome]], until_s: float
) -> None:
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415  an extra

    shares, nodes = axes
    for told, outcome in results:
        moves = outcome.moves
        if moves is None:
            continue
        hours = [time / 3600 for time in outcome.times_s if time <= until_s]
        parts = [
            100 * max(0.0, elastic) / total if total else 0.0
            for elastic, total in zip(moves.elastic_cu, outcome.total_cu, strict=True)
        ]
        shares.step(hours, parts[: len(hours)], where="post", linewidth=0.9, label=told.policy)
        nodes.step(hours, moves.nodes[: len(hours)], where="post", linewidth=1.2, label=told.policy)
    shares.set(
        title="Held beyond what was promised", xlabel="hours", ylabel="% of all Compute Units"
    )
    shares.set_ylim(bottom=0)
    nodes.set(title="Nodes of the provider", xlabel="hours", ylabel="nodes")
    nodes.set_ylim(bottom=0)
    nodes.yaxis.set_major_locator(MaxNLocator(integer=True))
    for ax in axes:
        ax.legend(loc="best", fontsize="small")
        ax.grid(alpha=0.3)
