"""Agents repair a broken package in sandboxes, trained over Chronus: ``python -m examples.repair``.

Starts the platform on this machine (embedded NATS and Kafka), makes the layers it needs, runs
several rollouts at once, prints the behaviour logs that a plain Kafka consumer reads, deletes
everything and prints a summary. Exit code 0 only when every package was repaired, its own tests
pass, and every step was in the log.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from aiokafka import AIOKafkaConsumer
from rich.console import Console
from rich.table import Table

from dsec import BehaviorLog, DSecClient, DsecError
from dsec_common.logging import configure_logging
from dsec_common.topics import BEHAVIOR_LOGS
from examples.here import platform
from examples.repair.tasks import ensure_tasks
from examples.repair.trainer import Outcome, run_rollout

LOG_PATIENCE_S = 15.0
console = Console(highlight=False, soft_wrap=True)
# A table needs room even where the output is a file.
TABLE_WIDTH = 120


def say(text: str) -> None:
    """Print one line of progress."""
    console.print(f"[bold]·[/] {text}")


class LogReader:
    """A plain Kafka consumer, as a trainer would write it, that prints what it reads."""

    def __init__(self, bootstrap: str) -> None:
        self.records: list[BehaviorLog] = []
        self._consumer = AIOKafkaConsumer(
            BEHAVIOR_LOGS,
            bootstrap_servers=bootstrap,
            auto_offset_reset="latest",
            value_deserializer=BehaviorLog.parse,
        )

    async def start(self) -> None:
        """Begin at the end of the topic."""
        await self._consumer.start()
        await self._consumer.seek_to_end()
        # A position is looked up lazily: ask for it, so that nothing from here on is missed.
        for partition in self._consumer.assignment():
            await self._consumer.position(partition)

    async def read_until_ended(self, sandboxes: set[str]) -> None:
        """Read and print until every sandbox's last record has come."""
        waiting = set(sandboxes)
        async with asyncio.timeout(LOG_PATIENCE_S):
            while waiting:
                message = await self._consumer.getone()
                record = message.value
                self.records.append(record)
                if record.sandbox_id in sandboxes:
                    console.print(f"  {record.to_text()}", markup=False)
                if record.action == "delete":
                    waiting.discard(record.sandbox_id)

    async def stop(self) -> None:
        """Leave the broker."""
        await self._consumer.stop()


def gaps(records: Sequence[BehaviorLog], sandbox_id: str) -> list[int]:
    """Return the sequence numbers that a sandbox's log lacks."""
    seen = {record.seq for record in records if record.sandbox_id == sandbox_id}
    return sorted(set(range(1, max(seen, default=0) + 1)) - seen)


def summary(outcomes: Sequence[Outcome], records: Sequence[BehaviorLog]) -> Table:
    """Return the table of what came of each rollout."""
    table = Table(title="rollouts", title_justify="left", width=TABLE_WIDTH)
    for column in ("task", "created in", "stages", "edits tried", "reward", "log records", "time"):
        table.add_column(column, justify="left" if column == "task" else "right")
    table.add_column("own tests")
    table.add_column("repair", no_wrap=True)
    for outcome in outcomes:
        count = sum(record.sandbox_id == outcome.sandbox_id for record in records)
        table.add_row(
            outcome.task.name,
            f"{outcome.create_ms:.1f} ms",
            str(outcome.stages),
            str(outcome.tried),
            f"{outcome.reward:+.2f}",
            str(count),
            f"{outcome.seconds:.1f} s",
            "[green]pass[/]" if outcome.verified else "[red]fail[/]",
            outcome.edit,
        )
    return table


async def demo(options: argparse.Namespace) -> int:
    """Run the whole story and return the exit code."""
    directory: Path = options.directory
    started = time.monotonic()
    async with platform(directory, "demo", say) as supervisor:
        context = supervisor.context
        if context is None:
            raise RuntimeError("the platform runs and says no addresses")
        console.print("[bold]platform[/] (NATS, Kafka, five services)")
        for part in supervisor.parts():
            say(f"{part.name}  {part.address}")
        client = DSecClient(context.nats_servers, context.credentials)
        async with client:
            console.print("[bold]layers[/]")
            tasks = await ensure_tasks(
                client, directory / "cache", options.seed, options.rollouts, say
            )
            for task in tasks:
                say(f"{task.base}  {task.workspace}  {task.toolkit}")
            set_up_s = time.monotonic() - started

            console.print(f"[bold]{len(tasks)} rollouts at once[/]")
            reader = LogReader(context.kafka_bootstrap)
            await reader.start()
            try:
                job_started = time.monotonic()
                outcomes = await asyncio.gather(*(run_rollout(client, task) for task in tasks))
                job_s = time.monotonic() - job_started
                console.print("[bold]behaviour logs[/] read back from Kafka")
                await reader.read_until_ended({outcome.sandbox_id for outcome in outcomes})
            finally:
                await reader.stop()
            left = await client.list_sandboxes()
    console.print(summary(outcomes, reader.records))
    lost = {
        o.sandbox_id: missing for o in outcomes if (missing := gaps(reader.records, o.sandbox_id))
    }
    repaired = sum(outcome.verified for outcome in outcomes)
    console.print(
        f"{repaired} of {len(outcomes)} packages repaired, {len(reader.records)} log records, "
        f"{sum(outcome.stages for outcome in outcomes)} stages, {len(left)} sandboxes left; "
        f"set-up {set_up_s:.1f} s, job {job_s:.1f} s, all {time.monotonic() - started:.1f} s"
    )
    for sandbox_id, missing in lost.items():
        console.print(f"[red]the log of {sandbox_id} lacks {missing}[/]")
    return 0 if repaired == len(outcomes) and not lost and not left else 1


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m examples.repair", description=__doc__)
    parser.add_argument("--rollouts", type=int, default=4, help="how many at once (default 4)")
    parser.add_argument("--seed", type=int, default=6, help="first mutation seed (default 6)")
    parser.add_argument("--directory", type=Path, default=Path(".dsec/demo"), help="state")
    options = parser.parse_args()
    configure_logging("demo", level="error")
    try:
        return asyncio.run(demo(options))
    except DsecError as error:
        console.print(f"[red]error[/] {error.message}")
    except (RuntimeError, TimeoutError) as error:
        console.print(f"[red]error[/] {error!r}")
    except KeyboardInterrupt:
        console.print("interrupted; everything was stopped")
    return 1


if __name__ == "__main__":
    sys.exit(main())
