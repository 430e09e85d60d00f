"""``dsec sandbox``: create, list, inspect, exec, cp, rm."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dsec.cli.network import Allow, Deny, Network, PolicyFile, RuleSet, policy_of
from dsec.cli.options import (
    Agent,
    AgentVersion,
    Base,
    Contract,
    CoreScheduling,
    CpuClass,
    CpuQuota,
    Cpus,
    Disk,
    Env,
    IdempotencyKey,
    Inodes,
    Labels,
    Memory,
    OomGroup,
    Pids,
    Snapshot,
    Toolkits,
    Ttl,
    Warm,
    Workspace,
    gpu_asked,
    limits_asked,
)
from dsec.cli.output import Json, Output, UsageError, pairs, run, size_text, time_text

app = typer.Typer(no_args_is_help=True, help="Sandboxes: create, run commands, copy files, delete.")


@app.command()
def create(
    base: Base = "",
    *,
    snapshot: Snapshot = "",
    workspace: Workspace = "",
    toolkit: Toolkits = None,
    cpus: Cpus = None,
    cpu_quota: CpuQuota = False,
    cpu_class: CpuClass = "latency_sensitive",
    core_scheduling: CoreScheduling = False,
    memory: Memory = None,
    oom_group: OomGroup = False,
    disk: Disk = None,
    inodes: Inodes = None,
    pids: Pids = None,
    cu: Annotated[float | None, typer.Option(help="Compute Units of GPUs.")] = None,
    min_cu: Annotated[float, typer.Option(help="At least so many; for a range.")] = 0.0,
    max_cu: Annotated[float, typer.Option(help="At most so many.")] = 0.0,
    gpu_memory: Annotated[str, typer.Option(help="GPU memory, such as 20G.")] = "",
    gpu_count: Annotated[int, typer.Option(help="On so many cards; 0: as few as can be.")] = 0,
    same_island: Annotated[bool, typer.Option("--same-island", help="Joined by NVLink.")] = False,
    gpu_model: Annotated[list[str] | None, typer.Option(help="Only on this model.")] = None,
    service_class: Annotated[str, typer.Option(help="realtime, standard or batch.")] = "standard",
    priority: Annotated[int, typer.Option(help="Of those that wait for units.")] = 0,
    request_id: Annotated[str, typer.Option(help="To ask or cancel by while it waits.")] = "",
    env: Env = None,
    cwd: Annotated[
        str, typer.Option("--cwd", "-w", help="Of commands that name none; else its image's, or /.")
    ] = "",
    user: Annotated[
        str,
        typer.Option("--user", "-u", help="Of commands that name none; else its image's, or root."),
    ] = "",
    label: Labels = None,
    agent: Agent = "",
    agent_version: AgentVersion = "",
    contract: Contract = None,
    rollout: Annotated[str, typer.Option(help="Rollout id for its agent socket.")] = "",
    warm: Warm = "prefer",
    ttl: Ttl = 0.0,
    idle_ttl: Annotated[
        float, typer.Option(help="Seconds without use until --idle-action; 0: never.")
    ] = 0.0,
    idle_action: Annotated[str, typer.Option(help="end or pause.")] = "end",
    network: Network = "",
    allow: Allow = None,
    deny: Deny = None,
    rule_set: RuleSet = None,
    network_policy: PolicyFile = None,
    setup_policy: PolicyFile = None,
    idempotency_key: IdempotencyKey = "",
    queue: Annotated[bool, typer.Option("--queue", help="Wait for room, durably.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait.")] = 30.0,
    json_output: Json = False,
) -> None:
    """Create a sandbox and print its id."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        limits = limits_asked(
            cpus=cpus,
            cpu_quota=cpu_quota,
            cpu_class=cpu_class,
            core_scheduling=core_scheduling,
            memory=memory,
            oom_group=oom_group,
            disk=disk,
            inodes=inodes,
            pids=pids,
            cu=cu,
        )
        gpu = gpu_asked(
            min_cu=min_cu,
            max_cu=max_cu,
            memory=gpu_memory,
            count=gpu_count,
            same_island=same_island,
            models=tuple(gpu_model or ()),
        )
        if queue and warm != "prefer":
            raise UsageError("a queued request takes what there is: leave out --warm or --queue")
        variables, labels = pairs(env or (), "--env"), pairs(label or (), "--label")
        extra: Any = {} if queue else {"warm": warm}
        async with client() as dsec:
            ask = dsec.queue_sandbox if queue else dsec.create_sandbox
            sandbox = await ask(
                base,
                **extra,
                snapshot=snapshot,
                workspace=workspace,
                toolkits=toolkit or (),
                limits=limits,
                env=variables,
                cwd=cwd,
                user=user,
                labels=labels,
                agent=agent,
                agent_version=agent_version,
                contract=contract,
                rollout_id=rollout,
                ttl_s=ttl,
                idle_ttl_s=idle_ttl,
                idle_action=idle_action,
                network=policy_of(network, allow, deny, rule_set, network_policy),
                setup_network=policy_of("", None, None, None, setup_policy),
                idempotency_key=idempotency_key,
                gpu=gpu,
                service_class=service_class,
                priority=priority,
                request_id=request_id,
                timeout_s=timeout,
            )
        if output.json:
            output.document(sandbox.created)
        else:
            output.text(sandbox.id)

    run(work, json=json_output)


@app.command()
def inspect(sandbox_id: str, *, json_output: Json = False) -> None:
    """Show one sandbox; the reason of its end is kept for a while."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            info = await dsec.sandbox(sandbox_id).inspect()
        if output.json:
            output.document(info)
            return
        facts = {
            "sandbox": info.sandbox_id,
            "state": str(info.state),
            "created": time_text(info.created_at),
            "layers": ", ".join(info.layers),
            "cpus": f"{info.limits.cpus:g}",
            "memory": size_text(info.limits.memory_bytes),
            "disk": size_text(info.limits.disk_bytes),
            "processes": str(info.limits.pids),
            "agent": info.agent or "-",
            "rollout": info.rollout_id or "-",
            "expires": time_text(info.expires_at),
            "labels": ", ".join(f"{key}={value}" for key, value in info.labels.items()) or "-",
        }
        if info.idle_ttl_s:
            facts["idle"] = f"{info.idle_s:.0f} s of {info.idle_ttl_s:g} s, then {info.idle_action}"
        if info.paused_at:
            facts["paused"] = time_text(info.paused_at)
        if info.behind:
            failed = f"; that failed: {info.synchronise_error}" if info.synchronise_error else ""
            facts["behind"] = f"{info.behind}{failed}"
        if info.memory_bytes_used is not None:
            facts["cpus"] += f" ({info.cpu_seconds_used or 0.0:.1f} s used)"
            facts["memory"] = f"{size_text(info.memory_bytes_used)} of {facts['memory']}"
            facts["processes"] = f"{info.pids_used} of {facts['processes']}"
        if info.end_cause:
            facts["ended"] = f"{time_text(info.ended_at)}: {info.end_cause} {info.end_detail}"
        output.facts(facts)

    run(work, json=json_output)


@app.command()
def explain(request_id: str, *, json_output: Json = False) -> None:
    """Say why a request waits for Compute Units, and what would change that."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            why = await dsec.explain_waiting(request_id)
        if output.json:
            output.document(why)
            return
        output.facts(
            {
                "request": why.request_id,
                "class": f"{why.service_class}, priority {why.priority}",
                "waits for": f"{why.waited_s:.0f} s",
                "before it": str(why.ahead),
                "because": why.reason,
            }
        )
        for change in why.would_change:
            output.text(f"  {change}")

    run(work, json=json_output)


@app.command()
def cancel(request_id: str, *, json_output: Json = False) -> None:
    """Give up a request that waits for Compute Units or in the queue."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            await dsec.cancel_waiting(request_id)
        output.text(f"{request_id} waits no more")

    run(work, json=json_output)
