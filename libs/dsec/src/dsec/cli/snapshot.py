"""``dsec snapshot``: create, list, inspect, restore, fork, rollback, pack-diff, rm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli.options import Env, Labels, Ttl
from dsec.cli.output import Json, Output, age_text, pairs, run, size_text, time_text

if TYPE_CHECKING:
    from dsec_common.wire.snapshot import SnapshotInfo

app = typer.Typer(
    no_args_is_help=True, help="Snapshots: keep what a sandbox changed, fork it, put it back."
)


@app.command()
def create(
    sandbox_id: str,
    *,
    name: Annotated[str, typer.Option(help="For people; need not be unique.")] = "",
    label: Labels = None,
    memory: Annotated[bool, typer.Option("--memory", help="Also process memory.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Until it is on the disk.")] = False,
    json_output: Json = False,
) -> None:
    """Take a snapshot of a running sandbox and print its id."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        labels = pairs(label or (), "--label")
        async with client() as dsec:
            sandbox = dsec.sandbox(sandbox_id)
            snapshot = await sandbox.snapshot(name, labels=labels, memory=memory, wait_durable=wait)
        if output.json:
            output.document(snapshot.info)
        else:
            output.text(snapshot.id)

    run(work, json=json_output)


@app.command("list")
def list_snapshots(
    *,
    sandbox: Annotated[str, typer.Option(help="Only those taken of this sandbox.")] = "",
    label: Labels = None,
    node: Annotated[str, typer.Option(help="Only those on this node.")] = "",
    json_output: Json = False,
) -> None:
    """List the project's snapshots as a tree."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        labels = pairs(label or (), "--label")
        async with client() as dsec:
            found = await dsec.snapshots.list(sandbox_id=sandbox, labels=labels, node=node)
        infos = [snapshot.info for snapshot in found if snapshot.info is not None]
        if output.json:
            output.document(infos)
            return
        output.table(
            ("SNAPSHOT", "NAME", "AGE", "SIZE", "DURABLE", "USED BY", "LABELS"),
            (
                (
                    "  " * depth + info.snapshot_id,
                    info.name or "-",
                    age_text(info.created_at),
                    size_text(info.size_bytes),
                    "yes" if info.durable else "not yet",
                    str(info.references),
                    ", ".join(f"{key}={value}" for key, value in info.labels.items()),
                )
                for depth, info in in_tree_order(infos)
            ),
            empty="no snapshots; take one with `dsec snapshot create SANDBOX`",
        )

    run(work, json=json_output)


def in_tree_order(infos: Iterable[SnapshotInfo]) -> list[tuple[int, SnapshotInfo]]:
    """Return each snapshot with its depth, children right after their parent."""
    known = {info.snapshot_id: info for info in infos}
    children: dict[str, list[SnapshotInfo]] = {}
    for info in known.values():
        children.setdefault(info.parent if info.parent in known else "", []).append(info)
    ordered: list[tuple[int, SnapshotInfo]] = []
    waiting = [(0, info) for info in reversed(children.get("", []))]
    while waiting:
        depth, info = waiting.pop()
        ordered.append((depth, info))
        below = children.get(info.snapshot_id, [])
        waiting += [(depth + 1, child) for child in reversed(below)]
    return ordered


@app.command()
def inspect(snapshot_id: str, *, json_output: Json = False) -> None:
    """Show one snapshot."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            info = await dsec.snapshots.get(snapshot_id).inspect()
        if output.json:
            output.document(info)
            return
        facts = {
            "snapshot": info.snapshot_id,
            "name": info.name or "-",
            "of": info.sandbox_id,
            "parent": info.parent or "-",
            "taken": time_text(info.created_at),
            "layers": ", ".join(info.layers),
            "size": size_text(info.size_bytes),
            "durable": "yes" if info.durable else f"not yet {info.detail}".strip(),
            "used by": str(info.references),
            "stood still": f"{info.frozen_ms:.1f} ms",
            "labels": ", ".join(f"{key}={value}" for key, value in info.labels.items()) or "-",
        }
        output.facts(facts)

    run(work, json=json_output)


@app.command()
def restore(
    snapshot_id: str,
    *,
    env: Env = None,
    label: Labels = None,
    ttl: Ttl = 0.0,
    json_output: Json = False,
) -> None:
    """Create a sandbox with a snapshot's files and print its id."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        variables, labels = pairs(env or (), "--env"), pairs(label or (), "--label")
        async with client() as dsec:
            sandbox = await dsec.create_sandbox(
                snapshot=snapshot_id, env=variables, labels=labels, ttl_s=ttl
            )
        if output.json:
            output.document(sandbox.created)
        else:
            output.text(sandbox.id)

    run(work, json=json_output)


@app.command()
def fork(
    sandbox_id: str,
    count: Annotated[int, typer.Argument(help="How many children.")] = 1,
    *,
    label: Labels = None,
    ttl: Annotated[float, typer.Option(help="Seconds after which each ends; 0: never.")] = 0.0,
    json_output: Json = False,
) -> None:
    """Make children of a running sandbox and print their ids; 1 when one could not be made."""

    async def work(output: Output) -> int:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick
        from dsec_common.errors import DsecError  # noqa: PLC0415  as above

        labels = pairs(label, "--label") if label else None
        async with client() as dsec:
            children = await dsec.sandbox(sandbox_id).fork(count, labels=labels, ttl_s=ttl)
        failed = [child for child in children if isinstance(child, DsecError)]
        if output.json:
            output.document(
                [
                    {"code": child.code.value, "message": child.message}
                    if isinstance(child, DsecError)
                    else {"sandbox_id": child.id}
                    for child in children
                ]
            )
        else:
            for child in children:
                if isinstance(child, DsecError):
                    output.say(f"dsec: {child}")
                else:
                    output.text(child.id)
        return 1 if failed else 0

    run(work, json=json_output)


@app.command()
def rollback(sandbox_id: str, snapshot_id: str, *, json_output: Json = False) -> None:
    """Put a sandbox back to a snapshot; all its processes end."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            duration_ms = await dsec.sandbox(sandbox_id).roll_back(snapshot_id)
        if output.json:
            output.document({"sandbox_id": sandbox_id, "duration_ms": duration_ms})
        else:
            output.text(sandbox_id)

    run(work, json=json_output)


@app.command("pack-diff")
def pack_diff(
    snapshot_id: str,
    reference: Annotated[str, typer.Argument(help="NAME@VERSION of the layer.")],
    *,
    kind: Annotated[str, typer.Option(help="workspace or toolkit.")] = "workspace",
    exclude: Annotated[
        list[str] | None, typer.Option(help="Path to leave out; * and ** match.")
    ] = None,
    clean: Annotated[bool, typer.Option("--clean", help="Leave out what builds leave.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace it.")] = False,
    json_output: Json = False,
) -> None:
    """Make a layer of what a snapshot changed."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        name, _, version = reference.partition("@")
        async with client() as dsec:
            layer = await dsec.snapshots.get(snapshot_id).pack_diff(
                name, version, kind=kind, exclude=exclude or (), clean=clean, replace=replace
            )
        if output.json:
            output.document(layer)
        else:
            output.text(f"{layer.reference} {layer.digest}")

    run(work, json=json_output)


@app.command()
def rm(snapshot_ids: list[str], *, json_output: Json = False) -> None:
    """Delete snapshots; what was made from them keeps what it needs."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            for snapshot_id in snapshot_ids:
                await dsec.snapshots.get(snapshot_id).delete()
                if not output.json:
                    output.text(snapshot_id)
        if output.json:
            output.document([{"snapshot_id": snapshot_id} for snapshot_id in snapshot_ids])

    run(work, json=json_output)
