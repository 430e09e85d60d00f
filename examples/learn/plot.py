"""The picture of what was learnt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

#: Groups in the moving mean.
WINDOW = 4


def plot(success_rates: Sequence[float], size: int, path: Path) -> None:
    """Write a PNG of the success rate over rollouts, each group of ``size`` and a moving mean.

    Needs matplotlib (the extra ``simulate``).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  an extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    rollouts = [size * (number + 1) for number in range(len(success_rates))]
    percents = [100 * rate for rate in success_rates]
    recent = [percents[max(0, at - WINDOW + 1) : at + 1] for at in range(len(percents))]
    axes.plot(rollouts, percents, "o", markersize=4, alpha=0.5, label=f"a group of {size}")
    axes.plot(rollouts, [sum(few) / len(few) for few in recent], label=f"mean of {WINDOW} groups")
    axes.set(
        title="A tabular policy learns a shell task",
        xlabel="rollouts",
        ylabel="% that solved their task",
        ylim=(-3, 103),
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
