"""Of ``dsec sandbox``: action, actions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from dsec.cli.network import Allow, Deny, Network, RuleSet, policy_of
from dsec.cli.options import Command, Cwd, Env, Shell, User, gpu_asked, words_of
from dsec.cli.output import Json, Output, pairs, run, size_bytes, time_text
from dsec.cli.results import exit_code_of_failure, show_result

if TYPE_CHECKING:
    from dsec_common.wire.action import ActionInfo

#: So much longer than its command may an action last: a command that is late is told as that.
_AFTER_S: Final = 60.0


def action(
    sandbox_id: str,
    command: Command,
    *,
    name: Annotated[str, typer.Option(help="What people call it.")] = "",
    cu: Annotated[float, typer.Option(help="Compute Units of GPUs.")] = 0.0,
    volume: Annotated[
        list[str] | None,
        typer.Option(help="NAME=SIZE for a new volume, NAME=LAYER for a layer; repeat for more."),
    ] = None,
    network: Network = "",
    allow: Allow = None,
    deny: Deny = None,
    rule_set: RuleSet = None,
    parent: Annotated[str, typer.Option(help="The action that it is a part of.")] = "",
    shell: Shell = False,
    env: Env = None,
    cwd: Cwd = "",
    user: User = "",
    timeout: Annotated[float, typer.Option(help="Seconds until it is ended.")] = 60.0,
    json_output: Json = False,
) -> None:
    """Run a command as an action: with resources of its own, which are returned at its end.

    It leaves with the command's exit code, as exec does. The volumes are in the directory that the
    variable DSEC_ACTION_VOLUMES names. Options come before the sandbox's id.
    """

    async def work(output: Output) -> int:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        line = words_of(command, shell=shell, after="the sandbox's id")
        volumes = {key: _volume(what) for key, what in pairs(volume or (), "--volume").items()}
        async with client() as dsec:
            asked = dsec.sandbox(sandbox_id).action(
                name or (line if isinstance(line, str) else line[0])[:64],
                gpu=gpu_asked(min_cu=cu, max_cu=cu),
                volumes=volumes,
                network=policy_of(network, allow, deny, rule_set, None),
                timeout_s=timeout + _AFTER_S,
                parent=parent,
            )
            await asked.begin()
            outcome = "failed"
            try:
                result = await asked.exec(
                    line,
                    env=pairs(env or (), "--env"),
                    cwd=cwd,
                    user=user,
                    timeout_s=timeout,
                )
                outcome = "ok" if result.exit_code == 0 else "failed"
            finally:
                await asked.end(outcome)
        return show_result(output, result)

    run(work, json=json_output, failure=exit_code_of_failure)


def _volume(text: str) -> int | str:
    """Return the size in bytes that a text is, or the layer that it names."""
    return text if "@" in text or ":" in text else size_bytes(text, "--volume")


def actions(sandbox_id: str, *, json_output: Json = False) -> None:
    """List a sandbox's actions: what each was given, when, and how it ended.

    They are kept as long as the sandbox's record, which outlives it for a while.
    """

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            found = await dsec.sandbox(sandbox_id).actions()
        if output.json:
            output.document(found)
            return
        output.table(
            ("ACTION", "NAME", "STATE", "BEGAN", "LASTED", "ACQUIRED", "PART OF"),
            (
                (
                    info.action_id,
                    info.name,
                    str(info.outcome or info.state),
                    time_text(info.began_at) if info.began_at else "-",
                    f"{info.ended_at - info.began_at:.3f} s"
                    if info.ended_at and info.began_at
                    else "-",
                    _acquired(info),
                    info.parent or "-",
                )
                for info in found
            ),
            empty="it has had no actions; `dsec sandbox action` runs a command as one",
        )

    run(work, json=json_output)


def _acquired(info: ActionInfo) -> str:
    words = [f"{info.cu:g} CU"] if info.cu else []
    words += [f"{it.kind}:{it.name}" for it in info.acquired if it.kind != "units"]
    return " ".join(words) or "-"
