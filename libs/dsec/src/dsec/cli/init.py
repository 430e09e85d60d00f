"""``dsec-init``: look at this machine before it becomes a node, and write its ``nodes.yaml``."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from dsec.cli.output import Json, Output, UsageError, run, size_text
from dsec_common.compute.model import Card, CardMode
from dsec_common.compute.units import DEFAULT_TABLE
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.nodes_file import NODES_FILE, NodesFile, read_nodes_file
from dsec_common.wire.node import Gpu

if TYPE_CHECKING:
    from dsec_sandboxd.discovery.report import Discovery

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def init(
    *,
    auto_discover: Annotated[
        bool, typer.Option("--auto-discover", help="Look, and write nodes.yaml if it is not there.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Look, and write nothing.")] = False,
    nodes_file: Annotated[
        str, typer.Option(envvar="DSEC_NODES_FILE", help="Where nodes.yaml is, or will be.")
    ] = NODES_FILE,
    node: Annotated[
        str, typer.Option(envvar="DSEC_NODE", help="The node's name; else the host's.")
    ] = "",
    json_output: Json = False,
) -> None:
    """Print what this machine has, what it counts for, and why some of it counts for nothing."""

    async def work(output: Output) -> None:
        if not auto_discover and not dry_run:
            raise UsageError("say --auto-discover to write nodes.yaml, or --dry-run to only look")
        _look(output, Path(nodes_file), node, may_write=auto_discover and not dry_run)

    run(work, json=json_output)


def _look(output: Output, path: Path, node: str, *, may_write: bool) -> None:
    is_there = path.exists()
    found = _discover(node, read_nodes_file(str(path)) if is_there else NodesFile())
    writes = may_write and not is_there
    if writes:
        _write(path, nodes_text(found))
    if output.json:
        output.document({"written": str(path) if writes else None, "found": found})
        return
    _print(output, found)
    if writes:
        output.say(f"wrote {path}")
    elif is_there:
        output.say(f"{path} is there and holds; it was not changed")
    else:
        output.say(f"would write {path}:\n\n{nodes_text(found)}")


def _discover(node: str, nodes: NodesFile) -> Discovery:
    try:
        from dsec_sandboxd.config import SandboxdConfig  # noqa: PLC0415  a node's part, an extra
        from dsec_sandboxd.discovery.report import discover  # noqa: PLC0415  as above
    except ImportError as error:
        raise DsecError(
            ErrorCode.UNSUPPORTED,
            f"this installation has no node daemon ({error}): pip install 'dsec[sandboxd]'",
        ) from None
    try:
        config = msgspec.convert({"node": node}, SandboxdConfig)
    except msgspec.ValidationError as error:
        raise UsageError(f"--node: {error}") from None
    return discover(config, nodes)


def _print(output: Output, found: Discovery) -> None:
    machine = found.machine
    numa = ", ".join(
        f"{it.number}: {len(it.processors)} processors, {size_text(it.memory_bytes)}"
        for it in machine.numa
    )
    output.facts(
        {
            "node": found.node,
            "processors": f"{found.cpus:g} ({machine.processor_model or 'unknown model'}, "
            f"{machine.sockets} sockets, {machine.cores} cores, {machine.threads} threads)",
            "numa": numa or "-",
            "memory": size_text(found.memory_bytes),
            "disk": (
                f"{size_text(machine.disk_bytes)}, {size_text(found.disk_bytes_available)} free"
            ),
            "kernel": f"{machine.kernel} ({' '.join(machine.features)})",
            "driver": machine.driver or "-",
        }
    )
    if found.gpus:
        cards = {card.uuid: card for card in found.cards}
        output.table(
            ("GPU", "MODEL", "CU", "MEMORY", "PCIE", "NVLINK", "NUMA", "DIVIDED", "UUID"),
            (
                (
                    str(gpu.index),
                    _model(cards.get(gpu.uuid), gpu.model),
                    f"{cards[gpu.uuid].cu_total:g}" if gpu.uuid in cards else "0",
                    size_text(gpu.memory_bytes),
                    f"{gpu.pcie_bytes_per_s / 1e9:.1f} GB/s" if gpu.pcie_bytes_per_s else "-",
                    gpu.island or "-",
                    str(gpu.numa_node) if gpu.numa_node >= 0 else "-",
                    f"{len(gpu.mig)} instances" if gpu.mode is CardMode.MIG else gpu.mode.value,
                    gpu.uuid,
                )
                for gpu in found.gpus
            ),
        )
    for reason in found.reasons:
        output.text(f"- {reason}")
    output.text(f"{found.cu_total:g} CU")


def _model(card: Card | None, told: str) -> str:
    return card.model if card is not None and card.model else told or "?"


def nodes_text(found: Discovery) -> str:
    """Return a ``nodes.yaml`` for this machine; what needs a decision stands in it as a comment."""
    lines = [
        "# What is said here of nodes goes before what the machines tell.",
        "# cu_table: {NAME: CU}, prices: {NAME: COST}, labels: {KEY: VALUE} hold for all nodes.",
        "nodes:",
        f"  {found.node}:",
    ]
    unknown = {gpu.model for gpu, card in _pairs(found) if gpu.healthy and not card.model}
    for told in sorted(unknown):
        near = difflib.get_close_matches(told.upper(), DEFAULT_TABLE, n=1, cutoff=0.2)
        lines += [
            f"    # The table has no {told!r}: it counts CU 0 until a model of the table is named",
            "    # here, or it has a row of its own in cu_table.",
            f"    # gpu_model: {(near or ['A100'])[0]}",
        ]
    known = ", ".join(sorted({card.model for card in found.cards if card.model}))
    lines.append(f"    labels: {{}}{f'  # {known}' if known else ''}")
    return "\n".join(lines) + "\n"


def _pairs(found: Discovery) -> list[tuple[Gpu, Card]]:
    cards = {card.uuid: card for card in found.cards}
    return [(gpu, cards[gpu.uuid]) for gpu in found.gpus if gpu.uuid in cards]


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise DsecError(
            ErrorCode.DENIED, f"cannot write {path}: {error.strerror}; run it as root"
        ) from error


def main() -> None:
    """Run the command line of this process."""
    sys.exit(app())


if __name__ == "__main__":
    main()
