"""The options that several commands have in common, worded once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli.output import UsageError, size_bytes

if TYPE_CHECKING:
    from dsec_common.compute.model import GpuDemand
    from dsec_common.wire.sandbox import Limits

Base = Annotated[
    str, typer.Argument(help="Base layer: name@version or sha256:…; none with --snapshot")
]
RequiredBase = Annotated[str, typer.Argument(help="Base layer: name@version or sha256:…")]
Command = Annotated[list[str], typer.Argument(help="Program and arguments.")]
Workspace = Annotated[str, typer.Option(help="Workspace layer.")]
Toolkits = Annotated[
    list[str] | None,
    typer.Option("--toolkit", help="Toolkit or data layer; repeat for more, lowest first."),
]
Snapshot = Annotated[str, typer.Option(help="Begin with a snapshot's files and layers.")]

Cpus = Annotated[
    float | None,
    typer.Option(help="Processors' worth of CPU time, as a share while others want it, too."),
]
CpuQuota = Annotated[
    bool, typer.Option("--cpu-quota", help="Never more than --cpus, idle processors or not.")
]
CpuClass = Annotated[
    str, typer.Option(help="latency_sensitive, or best_effort: on what the others leave.")
]
CoreScheduling = Annotated[
    bool, typer.Option("--core-scheduling", help="No processor core with another sandbox.")
]
Memory = Annotated[str | None, typer.Option(help="Memory, such as 512m or 2g.")]
OomGroup = Annotated[
    bool, typer.Option("--oom-group", help="Out of memory it ends whole, not one process.")
]
Disk = Annotated[str | None, typer.Option(help="Writable layer, such as 128m; in its memory.")]
Inodes = Annotated[int | None, typer.Option(help="Files and directories in the writable layer.")]
Pids = Annotated[int | None, typer.Option(help="Processes and threads.")]

Env = Annotated[list[str] | None, typer.Option("--env", "-e", help="KEY=VALUE.")]
Labels = Annotated[list[str] | None, typer.Option("--label", "-l", help="KEY=VALUE.")]
Agent = Annotated[str, typer.Option(help="Agent type in behaviour logs.")]
AgentVersion = Annotated[
    str, typer.Option(help="Version of the registered agent; else its active one.")
]
Contract = Annotated[
    Path | None,
    typer.Option(
        "--contract", help="An agent's contract (YAML): it says what other options leave open."
    ),
]
Warm = Annotated[str, typer.Option(help="A sandbox made ahead: prefer, require or bypass.")]
Ttl = Annotated[float, typer.Option(help="Seconds after which it ends; 0: never.")]
IdempotencyKey = Annotated[str, typer.Option(help="Same key, same sandbox.")]

Shell = Annotated[bool, typer.Option("--shell", "-c", help="A line for /bin/sh.")]
Stdin = Annotated[bool, typer.Option("--stdin", "-i", help="Pass standard input.")]
Cwd = Annotated[str, typer.Option("--cwd", "-w", help="Working directory; else the sandbox's.")]
User = Annotated[str, typer.Option("--user", "-u", help="Name or uid[:gid]; else the sandbox's.")]
CommandTimeout = Annotated[float, typer.Option(help="Seconds until it is ended.")]
CreateTimeout = Annotated[float, typer.Option(help="Seconds to wait for the sandbox.")]

#: Options come before the first word that is none; what follows is the command's.
COMMAND_LAST = {"allow_interspersed_args": False}


def words_of(command: list[str], *, shell: bool, after: str) -> str | list[str]:
    """Return the command that was written: its words, or with ``shell`` a line.

    Raises:
        UsageError: there is none.
    """
    words = command[1:] if command[0] == "--" else command
    if not words:
        raise UsageError(f"name the command to run after {after}")
    return " ".join(words) if shell else words


def limits_asked(
    *,
    cpus: float | None = None,
    cpu_quota: bool = False,
    cpu_class: str = "latency_sensitive",
    core_scheduling: bool = False,
    memory: str | None = None,
    oom_group: bool = False,
    disk: str | None = None,
    inodes: int | None = None,
    pids: int | None = None,
    cu: float | None = None,
) -> Limits:
    """Return the limits that the options mean.

    Raises:
        UsageError: a size that is none.
        DsecError: ``invalid`` for a CPU class that is none.
    """
    from dsec.creating import cpu_class_named, limits_of  # noqa: PLC0415  --help stays quick

    return limits_of(
        cpus=cpus,
        cpu_quota=cpu_quota,
        cpu_class=cpu_class_named(cpu_class),
        core_scheduling=core_scheduling,
        memory_bytes=size_bytes(memory, "--memory") if memory else None,
        oom_group=oom_group,
        disk_bytes=size_bytes(disk, "--disk") if disk else None,
        inodes=inodes,
        pids=pids,
        cu=cu,
    )


def gpu_asked(
    *,
    min_cu: float = 0.0,
    max_cu: float = 0.0,
    memory: str = "",
    count: int = 0,
    same_island: bool = False,
    models: tuple[str, ...] = (),
) -> GpuDemand | None:
    """Return the demand that the options mean; None without units.

    With one bound that is the other, too.

    Raises:
        UsageError: a size that is none, or options that say nothing without units.
    """
    from dsec_common.compute.model import GpuDemand  # noqa: PLC0415  --help stays quick

    if not (min_cu or max_cu):
        if memory or count or same_island or models:
            raise UsageError("say how many Compute Units, too: --min-cu, --max-cu or both")
        return None
    return GpuDemand(
        min_cu=min_cu or max_cu,
        max_cu=max_cu or min_cu,
        memory_bytes=size_bytes(memory, "--gpu-memory") if memory else 0,
        count=count,
        same_island=same_island,
        models=models,
    )
