"""Of ``dsec sandbox``: exec, shell, ps."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dsec.cli.options import COMMAND_LAST, Command, Cwd, Env, Shell, Stdin, User, words_of
from dsec.cli.output import Json, Output, UsageError, age_text, pairs, run
from dsec.cli.results import EXIT_TIMED_OUT, SIGNAL_BASE, exit_code_of_failure, show_result
from dsec.cli.sandbox import app

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsec.sandbox import Sandbox

__all__ = ["app"]

_TIMEOUT_S: Final = 60.0


@app.command(context_settings=COMMAND_LAST)
def exec(  # noqa: A001  the verb that users know
    sandbox_id: str,
    command: Command,
    *,
    shell: Shell = False,
    stdin: Stdin = False,
    terminal: Annotated[bool, typer.Option("--tty", "-t", help="Run it on a terminal.")] = False,
    env: Env = None,
    cwd: Cwd = "",
    user: User = "",
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds until it is ended; 60 when not given, with --tty never."),
    ] = None,
    json_output: Json = False,
) -> None:
    """Run a command and leave with its exit code.

    128 + n when signal n ended it, 124 when its time ran out, 125 when the platform failed, 126
    when it cannot be executed, 127 when it is not there. Options come before the sandbox's id; what
    follows it is the command's. Output, and with -i or -t input, passes while it runs, in any
    amount; with --json there is one document at the end. An interrupt ends the command, too.
    """

    async def work(output: Output) -> int:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        line = words_of(command, shell=shell, after="the sandbox's id")
        if terminal and output.json:
            raise UsageError("a terminal's output is no JSON: leave out --tty or --json")
        variables = pairs(env or (), "--env")
        async with client() as dsec:
            sandbox = dsec.sandbox(sandbox_id)
            if not output.json:
                limit_s = timeout if timeout is not None else 0.0 if terminal else _TIMEOUT_S
                return await _joined(
                    sandbox,
                    line,
                    output,
                    variables=variables,
                    cwd=cwd,
                    user=user,
                    takes_input=stdin or terminal,
                    terminal=terminal,
                    timeout_s=limit_s,
                )
            result = await sandbox.exec(
                line,
                env=variables,
                cwd=cwd,
                user=user,
                stdin=sys.stdin.buffer.read() if stdin else b"",
                timeout_s=_TIMEOUT_S if timeout is None else timeout,
            )
            return show_result(output, result)

    run(work, json=json_output, failure=exit_code_of_failure)


@app.command()
def shell(
    sandbox_id: str,
    *,
    program: Annotated[str, typer.Option("--shell", help="Which shell.")] = "/bin/sh",
    env: Env = None,
    cwd: Cwd = "",
    user: User = "",
) -> None:
    """Open a shell on a terminal in a sandbox; leave with its exit code."""

    async def work(output: Output) -> int:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            return await _joined(
                dsec.sandbox(sandbox_id),
                [program],
                output,
                variables=pairs(env or (), "--env"),
                cwd=cwd,
                user=user,
                takes_input=True,
                terminal=True,
                timeout_s=0.0,
            )

    run(work, json=False, failure=exit_code_of_failure)


async def _joined(
    sandbox: Sandbox,
    command: str | Sequence[str],
    output: Output,
    *,
    variables: dict[str, str],
    cwd: str,
    user: str,
    takes_input: bool,
    terminal: bool,
    timeout_s: float,
) -> int:
    from dsec.cli.attaching import attach, terminal_size  # noqa: PLC0415  --help stays quick

    if terminal and "TERM" in os.environ:
        variables = {"TERM": os.environ["TERM"], **variables}
    process = await sandbox.start(
        command,
        env=variables,
        cwd=cwd,
        user=user,
        stdin=takes_input,
        terminal=terminal_size() if terminal else None,
        timeout_s=timeout_s,
    )
    async with process:
        info = await attach(process, terminal=terminal, takes_input=takes_input)
    if process.truncated:
        output.say("dsec: some of the output came too fast to be kept and is missing")
    if info.oom:
        output.say("dsec: ended: the sandbox's memory ran out; see --memory of create")
    if info.timed_out:
        output.say(f"dsec: ended after {info.duration_s:.1f} s: its time ran out")
        return EXIT_TIMED_OUT
    if info.signal is not None:
        return SIGNAL_BASE + info.signal
    return info.exit_code or 0


@app.command()
def ps(sandbox_id: str, *, json_output: Json = False) -> None:
    """List the commands that were started in a sandbox; ended ones are kept for a while."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            found = await dsec.sandbox(sandbox_id).processes()
        if output.json:
            output.document(found)
            return
        output.table(
            ("EXEC", "STATE", "AGE", "CODE", "COMMAND"),
            (
                (
                    info.exec_id,
                    str(info.state),
                    age_text(info.started_at),
                    "-"
                    if info.exit_code is None and info.signal is None
                    else str(info.exit_code if info.signal is None else f"signal {info.signal}"),
                    " ".join(info.argv)[:80],
                )
                for info in found
            ),
            empty="no commands were started; `dsec sandbox exec -i` starts one",
        )

    run(work, json=json_output)
