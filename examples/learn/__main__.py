"""A policy learns a shell task in sandboxes: ``python -m examples.learn``.

Starts the platform on this machine, trains a tabular policy over groups of rollouts, prints how
often each group solved its task and draws it. Exit code 0 only when the last quarter of the groups
solved it clearly more often than the first. With ``--learning-rate 0`` the policy stays random, and
the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

from rich.console import Console

from dsec import DSecClient, DsecError
from dsec_common.logging import configure_logging
from examples.here import platform
from examples.learn.plot import plot
from examples.learn.trainer import Settings, Training, train
from examples.repair.tasks import ensure_base

BAR_WIDTH = 40
console = Console(highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """Print one line of progress."""
    console.print(f"[bold]·[/] {text}")


def tell(number: int, success_rate: float) -> None:
    """Print what a group achieved."""
    bar = "█" * round(BAR_WIDTH * success_rate)
    console.print(f"group {number + 1:>3}  {bar:<{BAR_WIDTH}}  {100 * success_rate:.0f} %")


async def learn(directory: Path, settings: Settings) -> Training:
    """Run the platform and the training in it, and leave no sandbox."""
    async with platform(directory, "learn", say) as supervisor:
        context = supervisor.context
        if context is None:
            raise RuntimeError("the platform runs and says no addresses")
        async with DSecClient(context.nats_servers, context.credentials) as client:
            base = await ensure_base(client, say)
            started = time.monotonic()
            training = await train(client, base, settings, tell)
            say(
                f"{settings.groups * settings.size} rollouts in "
                f"{time.monotonic() - started:.1f} s; "
                f"solved: {100 * training.first_quarter:.0f} % in the first quarter, "
                f"{100 * training.last_quarter:.0f} % in the last"
            )
            return training


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m examples.learn", description=__doc__)
    default = Settings()
    parser.add_argument("--groups", type=int, default=default.groups, help="of rollouts (20)")
    parser.add_argument("--size", type=int, default=default.size, help="rollouts at once (12)")
    parser.add_argument("--seed", type=int, default=default.seed, help="of tasks and draws (1)")
    parser.add_argument("--learning-rate", type=float, default=default.learning_rate, help="(2)")
    parser.add_argument("--directory", type=Path, default=Path(".dsec/learn"), help="state")
    parser.add_argument("--plot", type=Path, default=Path(".dsec/learn/learn.png"), help="picture")
    options = parser.parse_args()
    if options.groups < 1 or options.size < 1:
        parser.error("there has to be a group, and a rollout in it")
    settings = Settings(options.groups, options.size, options.seed, options.learning_rate)
    configure_logging("learn", level="error")
    try:
        training = asyncio.run(learn(options.directory, settings))
    except DsecError as error:
        console.print(f"[red]error[/] {error.message}")
    except (RuntimeError, TimeoutError, ExceptionGroup) as error:
        console.print(f"[red]error[/] {error!r}")
    except KeyboardInterrupt:
        console.print("interrupted; everything was stopped")
    else:
        plot(training.success_rates, settings.size, options.plot)
        say(f"drawn in {options.plot}")
        return 0 if training.has_learnt else 1
    return 1


if __name__ == "__main__":
    sys.exit(main())
