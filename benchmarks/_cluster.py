"""The cluster and the mixes that the simulating benchmarks share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from dsec.simulation.scenario import Scenario, read_scenario, simulate, work_of

if TYPE_CHECKING:
    from dsec.simulation.report import Report

EXAMPLES: Final = Path(__file__).parents[1] / "examples" / "clusters"


def scenario_of(name: str, seed: int, hours: float) -> Scenario:
    """Return an example's scenario with another seed, for so many hours; 0 for its own."""
    scenario = read_scenario(EXAMPLES / f"{name}.yaml")
    mix = scenario.mix
    assert mix is not None
    mix = msgspec.structs.replace(mix, seed=seed, hours=hours or mix.hours)
    return msgspec.structs.replace(scenario, mix=mix)


def reports_of(scenario: Scenario) -> dict[str, Report]:
    """Return what came of each policy of a scenario."""
    results = simulate(scenario, work_of(scenario, EXAMPLES))
    return {told.policy: told for told, _ in results}
