"""How full a mixed cluster gets: 20 A100 and 15 L40, simulated with the cores as they are.

Eight hours of arrivals at random moments that need 1.3 times what the cluster has, so that what is
not used is lost to packing; the first hour, while it fills, does not count. The mix, by number
(`examples/clusters/a100-l40.yaml`): 35 % of 8 to 30 CU, 30 % of 30 to 60, 25 % of 65 that can use
97, 8 % of 100, 2 % of 130 on two cards; medians of 20 to 60 minutes. Useful are units that whoever
holds them can use. The peer gives whole cards, as device plug-ins do, to whoever comes first and
fits, the same way round; first fit of the same slices stands beside it. Each round has a seed of
its own, the same in every run; medians of the rounds.
"""

from __future__ import annotations

from typing import Final

from benchmarks._cluster import reports_of, scenario_of
from benchmarks.report import Options, Reach, Report, median

UTILISATION_MIN: Final = 0.93
TO_WHOLE_CARDS_MIN: Final = 1.35


async def run(options: Options) -> Report:
    """Simulate; ``count`` is the hours of arrivals."""
    rounds = [
        reports_of(scenario_of("a100-l40", seed, options.count))
        for seed in range(1, options.rounds + 1)
    ]
    ours = median(each["scheduler"].utilisation for each in rounds)
    ratio = median(
        each["scheduler"].utilisation / each["whole-cards"].utilisation for each in rounds
    )
    return Report(
        name="packing",
        figures={
            "utilisation": ours,
            "utilisation_whole_cards": median(it["whole-cards"].utilisation for it in rounds),
            "utilisation_first_fit": median(it["first-fit"].utilisation for it in rounds),
            "fairness": median(it["scheduler"].fairness for it in rounds),
            "longest_wait_s": max(it["scheduler"].waits["standard"].max_s for it in rounds),
            "longest_wait_first_fit_s": max(
                it["first-fit"].waits["standard"].max_s for it in rounds
            ),
        },
        ratios={"to_whole_cards": ratio},
        reach=(
            Reach.at_least("utilisation", ours, UTILISATION_MIN),
            Reach.at_least("to_whole_cards", ratio, TO_WHOLE_CARDS_MIN),
        ),
    )
