"""``dsec node``: list, inspect."""

from __future__ import annotations

import typer

from dsec.cli.output import Json, Output, age_text, run, size_text
from dsec_common.wire.node import NodeHeartbeat, NodeInfo

app = typer.Typer(no_args_is_help=True, help="Nodes: what they have and what is taken.")


@app.command("list")
def list_nodes(*, json_output: Json = False) -> None:
    """List all nodes and the cluster's Compute Units."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            reply = await dsec.nodes()
        if output.json:
            output.document(reply)
            return
        output.table(
            ("NODE", "STATE", "SEEN", "SANDBOXES", "CPUS", "MEMORY", "CU", "GPUS"),
            (
                (
                    node.node,
                    "ready" if node.ready else f"not ready: {node.reason}",
                    age_text(node.last_seen_at),
                    f"{node.heartbeat.allocated.sandboxes}/{node.heartbeat.capacity.sandboxes}",
                    f"{node.heartbeat.allocated.cpus:g}/{node.heartbeat.capacity.cpus:g}",
                    (
                        f"{size_text(node.heartbeat.allocated.memory_bytes)} / "
                        f"{size_text(node.heartbeat.capacity.memory_bytes)}"
                    ),
                    f"{node.cu_allocated:g}/{node.cu_total:g}",
                    str(len(node.heartbeat.gpus)),
                )
                for node in reply.nodes
            ),
            empty="no nodes; start one with `dsec up`",
        )
        for node in reply.nodes:
            for note in _worth_saying(node):
                output.text(f"{node.node}: {note}")
        if reply.nodes:
            ready = sum(node.ready for node in reply.nodes)
            output.text(f"{ready} Ready, {reply.cu_total:g} CU")

    run(work, json=json_output)


def _gpus_text(beat: NodeHeartbeat) -> str:
    busy = {reading.uuid: f", {reading.utilisation:.0%} busy" for reading in beat.gpu_readings}
    return (
        "; ".join(
            f"{gpu.index}: {gpu.model or '?'}"
            + (f" ({gpu.mode}{busy.get(gpu.uuid, '')})" if gpu.healthy else " (unhealthy)")
            for gpu in beat.gpus
        )
        or "-"
    )


def _worth_saying(node: NodeInfo) -> tuple[str, ...]:
    """Return every reason why something of a node counts for nothing.

    A machine without GPUs has no driver either, which nobody needs to be told of in a list.
    """
    missing = node.heartbeat.missing.get("gpu", "")
    return node.notes + ((missing,) if missing and node.heartbeat.machine.driver else ())


@app.command()
def inspect(name: str, *, json_output: Json = False) -> None:
    """Show one node."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            node = await dsec.node(name)
        if output.json:
            output.document(node)
            return
        beat = node.heartbeat
        output.facts(
            {
                "node": node.node,
                "state": "ready" if node.ready else f"not ready: {node.reason}",
                "seen": f"{age_text(node.last_seen_at)} ago",
                "version": beat.version or "-",
                "processors": f"{beat.physical.cpus:g}",
                "memory": (
                    f"{size_text(beat.physical.memory_bytes)}, "
                    f"{size_text(beat.memory_bytes_available)} available"
                ),
                "sandboxes": f"{beat.allocated.sandboxes} of {beat.capacity.sandboxes}",
                "cpus handed out": f"{beat.allocated.cpus:g} of {beat.capacity.cpus:g}",
                "memory handed out": (
                    f"{size_text(beat.allocated.memory_bytes)} of "
                    f"{size_text(beat.capacity.memory_bytes)}"
                ),
                "compute units": f"{node.cu_allocated:g} of {node.cu_total:g}",
                "gpus": _gpus_text(beat),
                "driver": beat.machine.driver or "-",
                "disk": (
                    f"{size_text(beat.machine.disk_bytes)}, "
                    f"{size_text(beat.disk_bytes_available)} free"
                ),
                "kernel": f"{beat.machine.kernel} ({' '.join(beat.machine.features)})",
                "layer store": beat.store_id or "-",
                "notes": "; ".join(node.notes) or "-",
                "missing": "; ".join(f"{key}: {why}" for key, why in beat.missing.items()) or "-",
            }
        )

    run(work, json=json_output)
