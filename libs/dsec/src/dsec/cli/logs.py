"""``dsec logs`` and ``dsec trace``: what agents did."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dsec.cli.output import SETTINGS, Json, Output, run, time_text

if TYPE_CHECKING:
    from dsec_common.behavior import BehaviorLog
    from dsec_common.log import LogConsumer

#: Without ``--follow`` the reading ends when no record has come for this long; the first may take
#: longer, since Kafka is asked for its topics before.
_FIRST_IDLE_S: Final = 3.0
_IDLE_S: Final = 1.0
_CONNECT_S: Final = 10.0


def logs(
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new ones.")] = False,
    sandbox: Annotated[str, typer.Option(help="Only this sandbox's.")] = "",
    from_beginning: Annotated[
        bool, typer.Option("--from-beginning", help="With --follow: what is there first.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="All fields.")] = False,
    kafka: Annotated[
        str, typer.Option(envvar="DSEC_KAFKA_BOOTSTRAP", help="host:port of Kafka.")
    ] = "",
    json_output: Json = False,
) -> None:
    """Print the project's behaviour log, read from Kafka, one record a line.

    Without --follow it prints what is there and ends. Records are in order within each sandbox.
    """

    async def work(output: Output) -> None:
        from pathlib import Path  # noqa: PLC0415  --help stays quick

        from dsec.connection import resolve_connection  # noqa: PLC0415  as above
        from dsec_common.errors import DsecError, ErrorCode  # noqa: PLC0415  as above
        from dsec_common.log import KafkaConfig, LogConsumer, StartAt  # noqa: PLC0415  as above
        from dsec_common.subjects import ScopedId  # noqa: PLC0415  as above

        if sandbox:
            ScopedId.parse(sandbox)
        directory = SETTINGS.state_directory
        context = resolve_connection(
            SETTINGS.servers,
            SETTINGS.credentials,
            kafka_bootstrap=kafka,
            directory=Path(directory) if directory else None,
        )
        if not context.kafka_bootstrap:
            raise DsecError(
                ErrorCode.INVALID,
                "no Kafka to read logs from: give --kafka host:port or set DSEC_KAFKA_BOOTSTRAP",
            )
        consumer = LogConsumer(
            KafkaConfig(bootstrap_servers=context.kafka_bootstrap),
            projects=(context.project,),
            start_at=StartAt.EARLIEST if from_beginning or not follow else StartAt.LATEST,
            where=(lambda record: record.sandbox_id == sandbox) if sandbox else None,
        )
        try:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    await consumer.start()
            except TimeoutError:
                raise DsecError(
                    ErrorCode.UNAVAILABLE,
                    f"no Kafka at {context.kafka_bootstrap} within {_CONNECT_S:g} s; start it or "
                    "correct the address",
                ) from None
            async for record in _records(consumer, follow=follow):
                if output.json:
                    output.document(record)
                else:
                    output.text(record.to_text(full=full))
        finally:
            await consumer.stop()

    run(work, json=json_output)


async def _records(consumer: LogConsumer, *, follow: bool) -> AsyncIterator[BehaviorLog]:
    idle_s = _FIRST_IDLE_S
    while True:
        coming = asyncio.ensure_future(anext(consumer))
        try:
            done, _ = await asyncio.wait({coming}, timeout=None if follow else idle_s)
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
        if not done:
            return
        idle_s = _IDLE_S
        yield coming.result()


def trace(sandbox_id: str, *, json_output: Json = False) -> None:
    """Show a sandbox's steps in order, as the tracer has read them."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            found = await dsec.trace(sandbox_id)
        if output.json:
            output.document(found)
            return
        output.table(
            ("SEQ", "TIME", "AGENT", "ACTION", "STATUS", "LATENCY", "DETAILS"),
            (
                (
                    str(step.seq),
                    time_text(step.time),
                    step.agent,
                    step.action,
                    step.status,
                    f"{step.latency_ms:.1f} ms",
                    " ".join(f"{key}={value}" for key, value in step.attributes.items()),
                )
                for step in found.steps
            ),
            empty="no steps",
        )
        if found.gaps:
            output.say(f"not seen (yet): {', '.join(map(str, found.gaps))}")

    run(work, json=json_output)
