"""``dsec pool``: set, list, remove; and ``dsec call``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from dsec.cli.options import (
    Agent,
    AgentVersion,
    Command,
    CommandTimeout,
    CpuClass,
    CpuQuota,
    Cpus,
    CreateTimeout,
    Cwd,
    Disk,
    Env,
    Inodes,
    Labels,
    Memory,
    OomGroup,
    Pids,
    RequiredBase,
    Shell,
    Stdin,
    Toolkits,
    User,
    Warm,
    Workspace,
    limits_asked,
    words_of,
)
from dsec.cli.output import Json, Output, UsageError, pairs, run
from dsec.cli.results import EXIT_PLATFORM, exit_code_of_failure, show_result

app = typer.Typer(no_args_is_help=True, help="Warm pools: sandboxes made ahead of need.")

_HEADERS: Final = ("POOL", "LAYERS", "READY", "NODES", "NOTE")


def _row(pool: Any) -> tuple[str, ...]:
    layers = (pool.base, *([pool.workspace] if pool.workspace else []), *pool.toolkits)
    notes = dict.fromkeys(f"{node.node}: {node.note}" for node in pool.nodes if node.note)
    return (
        pool.key,
        ", ".join(layers),
        f"{pool.ready}/{pool.size}",
        str(len(pool.nodes)),
        "; ".join(notes) or "-",
    )


@app.command("set")
def set_pool(
    base: RequiredBase,
    *,
    size: Annotated[int, typer.Option("--size", "-n", help="Sandboxes that wait, on all nodes.")],
    workspace: Workspace = "",
    toolkit: Toolkits = None,
    cpus: Cpus = None,
    cpu_quota: CpuQuota = False,
    cpu_class: CpuClass = "latency_sensitive",
    memory: Memory = None,
    oom_group: OomGroup = False,
    disk: Disk = None,
    json_output: Json = False,
) -> None:
    """Have sandboxes of these layers wait; again with the same layers changes the size."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            pool = await dsec.pools.set(
                base,
                size=size,
                workspace=workspace,
                toolkits=toolkit or (),
                limits=limits_asked(
                    cpus=cpus,
                    cpu_quota=cpu_quota,
                    cpu_class=cpu_class,
                    memory=memory,
                    oom_group=oom_group,
                    disk=disk,
                ),
            )
        if output.json:
            output.document(pool)
        else:
            output.table(_HEADERS, [_row(pool)])

    run(work, json=json_output)


@app.command("list")
def list_pools(*, json_output: Json = False) -> None:
    """List the project's pools, how many sandboxes wait, and why fewer than wanted."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            pools = await dsec.pools.list()
        if output.json:
            output.document(pools)
        else:
            rows = [_row(pool) for pool in pools]
            output.table(_HEADERS, rows, empty="no pools; set one with `dsec pool set BASE -n 10`")

    run(work, json=json_output)


@app.command("remove")
def remove_pool(
    pool: Annotated[str, typer.Argument(help="Its name, as `dsec pool list` shows it.")],
    *,
    json_output: Json = False,
) -> None:
    """Drop a pool and what waits in it; sandboxes that were handed out live on."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            await dsec.pools.remove(key=pool)
        if output.json:
            output.document({"removed": pool})
        else:
            output.text(f"removed {pool}")

    run(work, json=json_output)


def call(
    base: RequiredBase,
    command: Command,
    *,
    workspace: Workspace = "",
    toolkit: Toolkits = None,
    file: Annotated[
        list[str] | None, typer.Option("--file", "-f", help="PATH=LOCAL, written before.")
    ] = None,
    collect: Annotated[
        list[str] | None, typer.Option("--collect", "-o", help="PATH=LOCAL, fetched afterwards.")
    ] = None,
    cpus: Cpus = None,
    cpu_quota: CpuQuota = False,
    cpu_class: CpuClass = "latency_sensitive",
    memory: Memory = None,
    oom_group: OomGroup = False,
    disk: Disk = None,
    inodes: Inodes = None,
    pids: Pids = None,
    env: Env = None,
    label: Labels = None,
    agent: Agent = "",
    agent_version: AgentVersion = "",
    warm: Warm = "prefer",
    shell: Shell = False,
    stdin: Stdin = False,
    cwd: Cwd = "",
    user: User = "",
    request_id: Annotated[str, typer.Option(help="The same id again does not run again.")] = "",
    timeout: CommandTimeout = 60.0,
    create_timeout: CreateTimeout = 30.0,
    json_output: Json = False,
) -> None:
    """Call a function: one task in a sandbox that waits, with files in and out.

    Exit codes are those of ``dsec run``.
    """

    async def work(output: Output) -> int:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        line = words_of(command, shell=shell, after="the base layer")
        limits = limits_asked(
            cpus=cpus,
            cpu_quota=cpu_quota,
            cpu_class=cpu_class,
            memory=memory,
            oom_group=oom_group,
            disk=disk,
            inodes=inodes,
            pids=pids,
        )
        given = pairs(file or (), "--file")
        wanted = pairs(collect or (), "--collect")
        try:
            contents = {path: Path(local).read_bytes() for path, local in given.items()}  # noqa: ASYNC240  once, before anything runs
        except OSError as error:
            raise UsageError(f"--file: {error}") from error
        async with client() as dsec:
            called = await dsec.call(
                base,
                line,
                files=contents,
                collect=tuple(wanted),
                workspace=workspace,
                toolkits=toolkit or (),
                limits=limits,
                env=pairs(env or (), "--env"),
                labels=pairs(label or (), "--label"),
                agent=agent,
                agent_version=agent_version,
                warm=warm,
                stdin=sys.stdin.buffer.read() if stdin else b"",
                cwd=cwd,
                user=user,
                request_id=request_id,
                timeout_s=timeout,
                create_timeout_s=create_timeout,
            )
        for path, data in called.files.items():
            Path(wanted[path]).write_bytes(data)  # noqa: ASYNC240  once, at the end
        if called.result is None:
            called.check()
        if called.error is not None:
            output.say(f"dsec: {called.status}: {called.error.message}")
        assert called.result is not None  # noqa: S101  check() raises without one
        code = show_result(output, called.result)
        return code if code or called.ok else EXIT_PLATFORM

    run(work, json=json_output, failure=exit_code_of_failure)
