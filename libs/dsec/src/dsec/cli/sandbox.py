"""``dsec sandbox``: create, list, inspect, exec, cp, rm."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from dsec.cli.output import Json, Output, UsageError, age_text, pairs, run, size_text, time_text
from dsec.cli.output import size_bytes as parse_size

app = typer.Typer(no_args_is_help=True, help="Sandboxes: create, run commands, copy files, delete.")

EXIT_TIMED_OUT: Final = 124
EXIT_PLATFORM: Final = 125
_SIGNAL_BASE: Final = 128

_REMOTE: Final = re.compile(r"([A-Za-z0-9_-]+\.[A-Za-z0-9_-]+):(.+)", re.DOTALL)


@app.command()
def create(
    base: Annotated[str, typer.Argument(help="Base layer: name@version or sha256:…")],
    *,
    workspace: Annotated[str, typer.Option(help="Workspace layer.")] = "",
    toolkit: Annotated[
        list[str] | None, typer.Option(help="Toolkit layer; repeat for more, lowest first.")
    ] = None,
    cpus: Annotated[float | None, typer.Option(help="Processors' worth of CPU time.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory, such as 512m or 2g.")] = None,
    disk: Annotated[str | None, typer.Option(help="Writable layer, such as 128m.")] = None,
    pids: Annotated[int | None, typer.Option(help="Processes and threads.")] = None,
    cu: Annotated[float | None, typer.Option(help="Compute Units of GPUs.")] = None,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", help="KEY=VALUE.")] = None,
    label: Annotated[list[str] | None, typer.Option("--label", "-l", help="KEY=VALUE.")] = None,
    agent: Annotated[str, typer.Option(help="Agent type in behaviour logs.")] = "",
    rollout: Annotated[str, typer.Option(help="Rollout id for its agent socket.")] = "",
    ttl: Annotated[float, typer.Option(help="Seconds after which it ends; 0: never.")] = 0.0,
    idempotency_key: Annotated[str, typer.Option(help="Same key, same sandbox.")] = "",
    queue: Annotated[bool, typer.Option("--queue", help="Wait for room, durably.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait.")] = 30.0,
    json_output: Json = False,
) -> None:
    """Create a sandbox and print its id."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick
        from dsec.client import limits_of  # noqa: PLC0415  as above

        limits = limits_of(
            cpus=cpus,
            memory_bytes=parse_size(memory, "--memory") if memory else None,
            disk_bytes=parse_size(disk, "--disk") if disk else None,
            pids=pids,
            cu=cu,
        )
        variables, labels = pairs(env or (), "--env"), pairs(label or (), "--label")
        async with client() as dsec:
            ask = dsec.queue_sandbox if queue else dsec.create_sandbox
            sandbox = await ask(
                base,
                workspace=workspace,
                toolkits=toolkit or (),
                limits=limits,
                env=variables,
                labels=labels,
                agent=agent,
                rollout_id=rollout,
                ttl_s=ttl,
                idempotency_key=idempotency_key,
                timeout_s=timeout,
            )
        if output.json:
            output.document(sandbox.created)
        else:
            output.text(sandbox.id)

    run(work, json=json_output)


@app.command("list")
def list_sandboxes(
    *,
    label: Annotated[list[str] | None, typer.Option("--label", "-l", help="KEY=VALUE.")] = None,
    ended: Annotated[bool, typer.Option("--all", "-a", help="Also ended ones.")] = False,
    json_output: Json = False,
) -> None:
    """List the project's sandboxes on all nodes."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        labels = pairs(label or (), "--label")
        async with client() as dsec:
            found = await dsec.list_sandboxes(labels=labels, include_ended=ended)
        if output.json:
            output.document(found)
            return
        output.table(
            ("SANDBOX", "STATE", "AGE", "MEMORY", "LAYERS", "LABELS"),
            (
                (
                    info.sandbox_id,
                    f"{info.state} ({info.end_cause})" if info.end_cause else info.state,
                    age_text(info.created_at),
                    f"{size_text(info.memory_bytes_used)} / {size_text(info.limits.memory_bytes)}",
                    ", ".join(info.layers),
                    ", ".join(f"{key}={value}" for key, value in info.labels.items()),
                )
                for info in found
            ),
            empty="no sandboxes; create one with `dsec sandbox create BASE`",
        )

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
            "cpus": f"{info.limits.cpus:g} ({info.cpu_seconds_used:.1f} s used)",
            "memory": (
                f"{size_text(info.memory_bytes_used)} of {size_text(info.limits.memory_bytes)}"
            ),
            "disk": size_text(info.limits.disk_bytes),
            "processes": f"{info.pids_used} of {info.limits.pids}",
            "agent": info.agent or "-",
            "rollout": info.rollout_id or "-",
            "expires": time_text(info.expires_at),
            "labels": ", ".join(f"{key}={value}" for key, value in info.labels.items()) or "-",
        }
        if info.end_cause:
            facts["ended"] = f"{time_text(info.ended_at)}: {info.end_cause} {info.end_detail}"
        output.facts(facts)

    run(work, json=json_output)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def exec(  # noqa: A001  the verb that users know
    sandbox_id: str,
    command: Annotated[list[str], typer.Argument(help="Program and arguments.")],
    *,
    shell: Annotated[bool, typer.Option("--shell", "-c", help="A line for /bin/sh.")] = False,
    stdin: Annotated[bool, typer.Option("--stdin", "-i", help="Pass standard input.")] = False,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", help="KEY=VALUE.")] = None,
    cwd: Annotated[str, typer.Option("--cwd", "-w", help="Working directory.")] = "/",
    user: Annotated[str, typer.Option("--user", "-u", help="Name or uid[:gid].")] = "root",
    timeout: Annotated[float, typer.Option(help="Seconds until it is ended.")] = 60.0,
    json_output: Json = False,
) -> None:
    """Run a command and leave with its exit code.

    128 + n when signal n ended it, 124 when its time ran out, 125 when the platform failed. Options
    come before the sandbox's id; what follows it is the command's.
    """

    async def work(output: Output) -> int:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        words = command[1:] if command[0] == "--" else command
        if not words:
            raise UsageError("name the command to run after the sandbox's id")
        variables = pairs(env or (), "--env")
        data = sys.stdin.buffer.read() if stdin else b""
        async with client() as dsec:
            result = await dsec.sandbox(sandbox_id).exec(
                " ".join(words) if shell else words,
                env=variables,
                cwd=cwd,
                user=user,
                stdin=data,
                timeout_s=timeout,
            )
        if output.json:
            output.document(_result_document(result))
        else:
            sys.stdout.buffer.write(result.stdout)
            sys.stdout.buffer.flush()
            sys.stderr.buffer.write(result.stderr)
            sys.stderr.buffer.flush()
            for name, cut in (
                ("stdout", result.stdout_truncated),
                ("stderr", result.stderr_truncated),
            ):
                if cut:
                    output.say(f"dsec: {name} was longer and is cut here")
            if result.oom:
                output.say("dsec: ended: the sandbox's memory ran out; see --memory of create")
            if result.timed_out:
                output.say(f"dsec: ended after {result.duration_s:.1f} s: its time ran out")
        if result.timed_out:
            return EXIT_TIMED_OUT
        if result.signal is not None:
            return _SIGNAL_BASE + result.signal
        return result.exit_code or 0

    run(work, json=json_output, failure=EXIT_PLATFORM)


def _result_document(result: Any) -> dict[str, Any]:
    """Return a result with its output as text; as base64, too, where text would lose bytes."""
    import base64  # noqa: PLC0415  only here

    document: dict[str, Any] = {
        "sandbox_id": result.sandbox_id,
        "exit_code": result.exit_code,
        "signal": result.signal,
        "stdout": result.stdout_text,
        "stderr": result.stderr_text,
        "stdout_truncated": result.stdout_truncated,
        "stderr_truncated": result.stderr_truncated,
        "timed_out": result.timed_out,
        "oom": result.oom,
        "duration_s": result.duration_s,
    }
    for name in ("stdout", "stderr"):
        data = getattr(result, name)
        if document[name].encode() != data:
            document[f"{name}_base64"] = base64.b64encode(data).decode()
    return document


@app.command()
def cp(
    source: Annotated[str, typer.Argument(help="PATH, or SANDBOX:PATH.")],
    target: Annotated[str, typer.Argument(help="PATH, or SANDBOX:PATH.")],
    *,
    user: Annotated[str, typer.Option("--user", "-u", help="Name or uid[:gid].")] = "root",
    json_output: Json = False,
) -> None:
    """Copy a file, or a directory's files, to or from a sandbox."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        away, here = _REMOTE.fullmatch(source), _REMOTE.fullmatch(target)
        if (away is None) == (here is None):
            raise UsageError("one of the two is SANDBOX:PATH, the other a local path")
        async with client() as dsec:
            if here is not None:
                path = here[2] + Path(source).name if here[2].endswith("/") else here[2]
                amount = await dsec.sandbox(here[1]).upload(source, path, user=user)
                tree = Path(source).is_dir()  # noqa: ASYNC240  a command line's only task
            else:
                assert away is not None  # noqa: S101  one of them is
                local = Path(target)
                if local.is_dir():  # noqa: ASYNC240  as above
                    local /= Path(away[2]).name
                amount = await dsec.sandbox(away[1]).download(away[2], local, user=user)
                tree = local.is_dir()
        if output.json:
            output.document({"files" if tree else "size_bytes": amount})
        else:
            output.say(f"copied {amount} files" if tree else f"copied {size_text(amount)}")

    run(work, json=json_output)


@app.command()
def rm(sandbox_ids: list[str], *, json_output: Json = False) -> None:
    """Delete sandboxes; each is gone with all it held when its line appears."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        ended = {}
        async with client() as dsec:
            for sandbox_id in sandbox_ids:
                ended[sandbox_id] = await dsec.sandbox(sandbox_id).delete()
                if not output.json:
                    output.text(sandbox_id)
        if output.json:
            output.document([{"sandbox_id": key, "end_cause": why} for key, why in ended.items()])

    run(work, json=json_output)
