"""``dsec up``, ``dsec down`` and ``dsec status``: the whole platform on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dsec.cli.output import EXIT_FAILURE, EXIT_USAGE, SETTINGS, Json, Output, run

if TYPE_CHECKING:
    from dsec.stack.layout import Layout, PartRecord
    from dsec.stack.options import StackOptions
    from dsec.stack.supervisor import Supervisor

_DOWN_TIMEOUT_S: Final = 120.0
_DETACH_MARGIN_S: Final = 120.0
_POLL_S: Final = 0.05


class Kafka(StrEnum):
    """Which Kafka to run."""

    EMBEDDED = "embedded"
    APACHE = "apache"
    EXTERNAL = "external"
    AUTO = "auto"


class LogLevel(StrEnum):
    """What services log, and all that weighs more."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _layout() -> Layout:
    from dsec.connection import state_directory  # noqa: PLC0415  --help stays quick
    from dsec.stack.layout import Layout  # noqa: PLC0415  as above

    named = SETTINGS.state_directory
    return Layout(Path(named) if named else state_directory())


def up(
    *,
    state_directory: Annotated[
        str | None, typer.Option(help="Where to keep everything; default $DSEC_HOME.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when it runs.")] = False,
    kafka: Annotated[Kafka, typer.Option(help="Which Kafka.")] = Kafka.EMBEDDED,
    kafka_bootstrap: Annotated[str, typer.Option(help="Address of an external Kafka.")] = "",
    nats_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="0: any free one. Default: 4222, if that is free."),
    ] = None,
    nodes: Annotated[int, typer.Option(help="Sandbox nodes to run here.")] = 1,
    node_prefix: Annotated[str, typer.Option(help="Nodes are called PREFIX-1, …")] = "node",
    without_sandboxd: Annotated[
        bool, typer.Option("--without-sandboxd", help="No node here; needs no root.")
    ] = False,
    layers_directory: Annotated[
        Path | None, typer.Option(help="Layer store, if elsewhere (it may be shared).")
    ] = None,
    uplink: Annotated[
        bool,
        typer.Option(
            help="Lead sandboxes whose policy says so outside, by this machine's default route; "
            "has the machine forward packets while it runs."
        ),
    ] = True,
    start_timeout: Annotated[float, typer.Option(help="Seconds each part may take.")] = 60.0,
    log_level: Annotated[LogLevel, typer.Option(help="Of the services.")] = LogLevel.INFO,
    json_output: Json = False,
) -> None:
    """Start NATS, Kafka and all services on loopback; Ctrl-C or `dsec down` stops them."""
    if state_directory:
        SETTINGS.state_directory = state_directory

    async def work(output: Output) -> int:
        from dsec.stack.options import StackOptions  # noqa: PLC0415  --help stays quick
        from dsec_common.errors import DsecError  # noqa: PLC0415  as above

        layout = _layout()
        options = StackOptions(
            directory=layout.directory,
            kafka=kafka.value,
            kafka_bootstrap=kafka_bootstrap,
            nats_port=nats_port,
            nodes=nodes,
            node_prefix=node_prefix,
            sandboxd=not without_sandboxd,
            layers_directory=layers_directory.absolute() if layers_directory else None,
            uplink=uplink,
            start_timeout_s=start_timeout,
            log_level=log_level.value,
        )
        try:
            options.check()
        except DsecError as error:
            output.error(error)
            return EXIT_USAGE
        if detach:
            _refuse_second(layout)
            return await asyncio.to_thread(_detach, output, layout, start_timeout)
        return await _live(output, options)

    run(work, json=json_output)


async def _live(output: Output, options: StackOptions) -> int:
    """Run a stack in this process until a signal asks for its end."""
    from dsec.stack.supervisor import Supervisor  # noqa: PLC0415  --help stays quick

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)

    async def report(what: str, facts: Mapping[str, Any]) -> None:
        if output.json:
            output.document({"event": what, **facts})
        else:
            output.say(_sentence(what, facts))

    supervisor = Supervisor(options, report)
    output.say(f"starting in {options.directory} …")
    starting = asyncio.create_task(supervisor.start())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            _show_running(output, supervisor)
            await supervisor.run(stop)
    finally:
        stopping.cancel()
        starting.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
        if supervisor.parts():
            output.say("stopping …")
        await supervisor.stop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)
    if output.json:
        output.document({"event": "stopped"})
    return 0


def _sentence(what: str, facts: Mapping[str, Any]) -> str:
    name = facts.get("name", "")
    match what:
        case "service_ended":
            how = f" ({facts['how']})" if "how" in facts else ""
            again = f"; again in {facts['restart_in_s']:g} s" if "restart_in_s" in facts else ""
            log = f"; its log: {facts['log']}" if "log" in facts else ""
            return f"{name} ended by itself{how}{again}{log}"
        case "service_start_failed":
            return f"{name} did not start: {facts['error']}"
        case "service_restarted":
            return f"{name} runs again"
        case "leftover_ended":
            return f"ended {name}, left over from a platform that was killed"
        case "service_stopped":
            order = "" if facts["in_order"] else f", not in order; its log: {facts['log']}"
            return f"stopped {name}{order}"
        case _:
            return f"{what} {dict(facts)}"


def _show_running(output: Output, supervisor: Supervisor) -> None:
    context = supervisor.context
    assert context is not None  # noqa: S101  it runs
    if output.json:
        output.document({"event": "running", "context": context, "parts": list(supervisor.parts())})
        return
    _parts_table(output, supervisor.parts())
    output.say(
        f"\nnats      {', '.join(context.nats_servers)}\n"
        f"kafka     {context.kafka_bootstrap}\n"
        f"project   {context.project}, credentials {context.credentials}\n"
        "running; Ctrl-C or `dsec down` stops it"
    )


def _parts_table(output: Output, parts: tuple[PartRecord, ...]) -> None:
    output.table(
        ("PART", "PROCESS", "ADDRESS", "LOG"),
        (
            (
                part.name,
                str(part.process.pid) if part.process else "-",
                part.address or "-",
                part.log or "-",
            )
            for part in parts
        ),
    )


def _refuse_second(layout: Layout) -> None:
    """Say at once, not in a log, that a platform runs in this directory already."""
    from dsec.stack.layout import StackLock  # noqa: PLC0415  --help stays quick

    StackLock.take(layout).release()


def _detach(output: Output, layout: Layout, start_timeout_s: float) -> int:
    """Start the same command in a session of its own and return when it runs or has failed."""
    from dsec_common.errors import DsecError, ErrorCode  # noqa: PLC0415  --help stays quick

    layout.prepare()
    log = layout.logs / "supervisor.log"
    arguments = [word for word in sys.argv[1:] if word not in {"--detach", "-d"}]
    started_at = log.stat().st_size if log.exists() else 0
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "dsec.cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env={**os.environ, "DSEC_HOME": str(layout.directory)},
        )
    deadline = time.monotonic() + start_timeout_s + _DETACH_MARGIN_S
    while process.poll() is None and time.monotonic() < deadline:
        record = layout.read_record()
        if record and record.supervisor.pid == process.pid and record.state == "running":
            if output.json:
                output.document({"event": "running", "parts": list(record.parts)})
            else:
                _parts_table(output, record.parts)
                output.say("running; `dsec down` stops it")
            return 0
        time.sleep(_POLL_S)
    if process.poll() is None:
        process.terminate()
        process.wait()
    with log.open("rb") as file:
        file.seek(started_at)
        said = file.read().decode(errors="replace").strip()
    raise DsecError(ErrorCode.UNAVAILABLE, f"the platform did not start:\n{said[-4000:]}")


def down(
    *,
    state_directory: Annotated[str | None, typer.Option(help="As given to `dsec up`.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait.")] = _DOWN_TIMEOUT_S,
    json_output: Json = False,
) -> None:
    """Stop the platform in order, or clean up after one that was killed."""
    if state_directory:
        SETTINGS.state_directory = state_directory

    async def work(output: Output) -> int:
        return await asyncio.to_thread(_stop, output, _layout(), timeout)

    run(work, json=json_output)


def _stop(output: Output, layout: Layout, timeout_s: float) -> int:
    from dsec.stack.layout import StackLock  # noqa: PLC0415  --help stays quick
    from dsec_common.errors import DsecError, ErrorCode  # noqa: PLC0415  as above

    def say(was: str, cleaned: list[str]) -> int:
        if output.json:
            output.document({"was": was, "cleaned": cleaned})
        elif was == "killed":
            left = f"; ended what it had left: {', '.join(cleaned)}" if cleaned else ""
            output.say(f"it was killed earlier{left}; cleaned up")
        else:
            output.say("stopped" if was == "running" else "nothing runs here")
        return 0

    if not layout.directory.is_dir():
        return say("not running", [])
    lock = StackLock.try_take(layout)
    if lock is None:
        record = layout.read_record()
        if record is None or not record.supervisor.signal(signal.SIGTERM):
            raise DsecError(
                ErrorCode.CONFLICT,
                f"a platform is starting or stopping in {layout.directory}; try again in a moment",
            )
        if not record.supervisor.wait_gone(timeout_s):
            raise DsecError(
                ErrorCode.TIMEOUT,
                f"process {record.supervisor.pid} is still stopping after {timeout_s:g} s; "
                f"see {layout.logs}",
            )
        return say("running", [])
    try:
        was = "killed" if layout.record.exists() else "not running"
        return say(was, layout.clean_after_crash())
    finally:
        lock.release()


def status(
    *,
    state_directory: Annotated[str | None, typer.Option(help="As given to `dsec up`.")] = None,
    json_output: Json = False,
) -> None:
    """Show what runs here; exit code 1 when nothing does."""
    if state_directory:
        SETTINGS.state_directory = state_directory

    async def work(output: Output) -> int:
        from dsec.connection import read_context  # noqa: PLC0415  --help stays quick

        layout = _layout()
        record = layout.read_record()
        if record is None or not record.supervisor.alive:
            if output.json:
                output.document({"state": "not running", "directory": str(layout.directory)})
            else:
                output.say(f"nothing runs in {layout.directory}; start it with `dsec up`")
            return EXIT_FAILURE
        if output.json:
            output.document(
                {
                    "state": record.state,
                    "directory": str(layout.directory),
                    "supervisor": record.supervisor,
                    "context": read_context(layout.directory),
                    "parts": record.parts,
                }
            )
            return 0
        output.say(f"{record.state} in {layout.directory}")
        _parts_table(output, record.parts)
        return 0

    run(work, json=json_output)
