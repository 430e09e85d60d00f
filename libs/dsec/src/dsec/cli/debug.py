"""``dsec debug``: what operators do when something is stuck."""

from __future__ import annotations

from typing import Annotated

import typer

from dsec.cli.output import Json, Output, UsageError, run

app = typer.Typer(no_args_is_help=True, help="For operators, when something is stuck.")


@app.command("force-unlock")
def force_unlock(
    *,
    every: Annotated[
        bool, typer.Option("--all", help="All leases of the project, on all nodes.")
    ] = False,
    node: Annotated[str, typer.Option(help="All leases of the project on this node.")] = "",
    lease: Annotated[str, typer.Option(help="Just this lease.")] = "",
    reason: Annotated[str, typer.Option(help="Why, for the audit event.")] = "",
    json_output: Json = False,
) -> None:
    """End leases on Compute Units, whoever holds them; a sandbox that lives on one ends.

    The units are free at once. Leases end by themselves when their sandbox does, or nobody renews
    them, so this is for what ought not to be: each use is an event of the project, `unlocked`.
    """

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        if sum((every, bool(node), bool(lease))) != 1:
            raise UsageError("name one of --all, --node and --lease")
        async with client() as dsec:
            unlocked = await dsec.force_unlock(lease_id=lease, node=node, reason=reason)
        if output.json:
            output.document(unlocked)
            return
        output.table(
            ("LEASE", "HOLDER", "CU", "TOKEN"),
            (
                (one.lease_id, one.holder or "-", f"{one.cu:g}", str(one.token))
                for one in unlocked.leases
            ),
            empty="the project holds no such lease",
        )

    run(work, json=json_output)
