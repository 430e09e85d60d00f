"""``dsec run``, and of ``dsec sandbox``: list, pause, resume, touch, label."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsec.cli.network import Allow, Deny, Network, PolicyFile, RuleSet, policy_of
from dsec.cli.options import (
    Agent,
    AgentVersion,
    Base,
    Command,
    CommandTimeout,
    Contract,
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
    Pids,
    Shell,
    Snapshot,
    Stdin,
    Toolkits,
    Ttl,
    User,
    Warm,
    Workspace,
    limits_asked,
    words_of,
)
from dsec.cli.output import Json, Output, age_text, pairs, run, size_text, time_text
from dsec.cli.results import exit_code_of_failure, show_result
from dsec.cli.sandbox import app

if TYPE_CHECKING:
    from dsec_common.wire.sandbox import SandboxInfo


@app.command("list")
def list_sandboxes(
    *,
    label: Labels = None,
    state: Annotated[
        list[str] | None, typer.Option("--state", help="Only in this state; repeat for more.")
    ] = None,
    agent: Annotated[str, typer.Option(help="Only of this agent type.")] = "",
    rollout: Annotated[str, typer.Option(help="Only of this rollout.")] = "",
    created_after: Annotated[
        float, typer.Option(help="Only created at this Unix time or later.")
    ] = 0.0,
    created_before: Annotated[float, typer.Option(help="Only created before it.")] = 0.0,
    ended: Annotated[bool, typer.Option("--all", "-a", help="Also ended ones.")] = False,
    limit: Annotated[int, typer.Option(help="One page of at most so many; 0: all pages.")] = 0,
    cursor: Annotated[str, typer.Option(help="The page after, as the one before said.")] = "",
    json_output: Json = False,
) -> None:
    """List the project's sandboxes on all nodes.

    With --limit or --cursor one page: its JSON is an object with "sandboxes" and "next_cursor".
    """

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        filters: Any = {
            "labels": pairs(label or (), "--label"),
            "states": state or (),
            "agent": agent,
            "rollout_id": rollout,
            "created_after": created_after,
            "created_before": created_before,
            "include_ended": ended,
            "usage": True,
        }
        async with client() as dsec:
            if limit or cursor:
                page = await dsec.list_page(limit=limit, cursor=cursor, **filters)
                found = list(page.sandboxes)
                for node in page.silent_nodes:
                    output.say(f"dsec: node {node} did not answer; its sandboxes are not shown")
                if output.json:
                    output.document(page)
            else:
                page = None
                found = await dsec.list_sandboxes(**filters)
                if output.json:
                    output.document(found)
        if output.json:
            return
        output.table(
            ("SANDBOX", "STATE", "AGE", "MEMORY", "LAYERS", "LABELS"),
            (
                (
                    info.sandbox_id,
                    f"{info.state} ({info.end_cause})" if info.end_cause else info.state,
                    age_text(info.created_at),
                    _memory_text(info),
                    ", ".join(info.layers),
                    ", ".join(f"{key}={value}" for key, value in info.labels.items()),
                )
                for info in found
            ),
            empty="no sandboxes; create one with `dsec sandbox create BASE`",
        )
        if page is not None and page.next_cursor:
            output.say(f"more: --cursor {page.next_cursor}")

    run(work, json=json_output)


def _memory_text(info: SandboxInfo) -> str:
    used, limit = info.memory_bytes_used, size_text(info.limits.memory_bytes)
    return f"- / {limit}" if used is None else f"{size_text(used)} / {limit}"


def _change(sandbox_id: str, json_output: bool, change: Any) -> None:
    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            info = await change(dsec.sandbox(sandbox_id))
        if output.json:
            output.document(info)
        else:
            ends = f", ends {time_text(info.expires_at)}" if info.expires_at else ""
            output.text(f"{info.sandbox_id} {info.state}{ends}")

    run(work, json=json_output)


@app.command()
def pause(sandbox_id: str, *, json_output: Json = False) -> None:
    """Stop every process of a sandbox; the next request has it go on."""
    _change(sandbox_id, json_output, lambda sandbox: sandbox.pause())


@app.command()
def resume(sandbox_id: str, *, json_output: Json = False) -> None:
    """Have a paused sandbox go on."""
    _change(sandbox_id, json_output, lambda sandbox: sandbox.resume())


@app.command()
def touch(
    sandbox_id: str,
    *,
    ttl: Annotated[
        float | None, typer.Option(help="New seconds to live, from now; 0: no end.")
    ] = None,
    idle_ttl: Annotated[float | None, typer.Option(help="New idle seconds; 0: none.")] = None,
    json_output: Json = False,
) -> None:
    """Begin a sandbox's time to live and its idle time anew."""
    _change(sandbox_id, json_output, lambda sandbox: sandbox.touch(ttl, idle_ttl_s=idle_ttl))


@app.command()
def label(
    sandbox_id: str,
    changes: Annotated[list[str], typer.Argument(help="KEY=VALUE, or KEY- to remove it.")],
    *,
    json_output: Json = False,
) -> None:
    """Change some of a sandbox's labels."""
    removed = [word[:-1] for word in changes if word.endswith("-") and "=" not in word]
    given = [word for word in changes if not (word.endswith("-") and "=" not in word)]

    async def change(sandbox: Any) -> Any:
        return await sandbox.set_labels({**pairs(given, "a label"), **dict.fromkeys(removed)})

    _change(sandbox_id, json_output, change)


def run_command(
    base: Base,
    command: Command,
    *,
    snapshot: Snapshot = "",
    workspace: Workspace = "",
    toolkit: Toolkits = None,
    cpus: Cpus = None,
    cpu_quota: CpuQuota = False,
    cpu_class: CpuClass = "latency_sensitive",
    memory: Memory = None,
    disk: Disk = None,
    inodes: Inodes = None,
    pids: Pids = None,
    env: Env = None,
    label: Labels = None,
    agent: Agent = "",
    agent_version: AgentVersion = "",
    contract: Contract = None,
    network: Network = "",
    allow: Allow = None,
    deny: Deny = None,
    rule_set: RuleSet = None,
    network_policy: PolicyFile = None,
    warm: Warm = "prefer",
    ttl: Ttl = 0.0,
    shell: Shell = False,
    stdin: Stdin = False,
    cwd: Cwd = "",
    user: User = "",
    timeout: CommandTimeout = 60.0,
    create_timeout: CreateTimeout = 30.0,
    json_output: Json = False,
) -> None:
    """Run one command in a sandbox of its own and leave with its exit code.

    The sandbox goes when the command has ended. 128 + n when signal n ended it, 124 when its time
    ran out, 125 when the platform failed, 126 when it cannot be executed, 127 when it is not there.
    Options come before the base layer's name; with --snapshot no layer is named.
    """

    async def work(output: Output) -> int:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        words = [base, *command] if snapshot else command
        line = words_of(words, shell=shell, after="the base layer")
        policy = policy_of(network, allow, deny, rule_set, network_policy)
        variables, labels = pairs(env or (), "--env"), pairs(label or (), "--label")
        limits = limits_asked(
            cpus=cpus,
            cpu_quota=cpu_quota,
            cpu_class=cpu_class,
            memory=memory,
            disk=disk,
            inodes=inodes,
            pids=pids,
        )
        data = sys.stdin.buffer.read() if stdin else b""
        async with client() as dsec:
            result = await dsec.run(
                "" if snapshot else base,
                line,
                snapshot=snapshot,
                workspace=workspace,
                toolkits=toolkit or (),
                limits=limits,
                env=variables,
                labels=labels,
                agent=agent,
                agent_version=agent_version,
                contract=contract,
                network=policy,
                warm=warm,
                ttl_s=ttl,
                cwd=cwd,
                user=user,
                stdin=data,
                timeout_s=timeout,
                create_timeout_s=create_timeout,
            )
        return show_result(output, result)

    run(work, json=json_output, failure=exit_code_of_failure)
