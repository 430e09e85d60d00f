"""``dsec layer``: import, list, inspect, rm."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from dsec.cli.output import Json, Output, UsageError, age_text, run, size_text, time_text

app = typer.Typer(no_args_is_help=True, help="Layers: the read-only trees sandboxes are made of.")


class Kind(StrEnum):
    """Which of a sandbox's three layers it is."""

    BASE = "base"
    WORKSPACE = "workspace"
    TOOLKIT = "toolkit"


class _ProgressBar:
    """A bar on standard error while an import runs; nothing where no one watches."""

    def __init__(self, stack: ExitStack, *, shown: bool) -> None:
        self._progress: Any = None
        if not shown:
            return
        from rich.console import Console  # noqa: PLC0415  only imports pay for it
        from rich.progress import (  # noqa: PLC0415  as above
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TransferSpeedColumn,
        )

        self._progress = stack.enter_context(
            Progress(
                TextColumn("{task.description:<10}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
        )
        self._stage = ""
        self._task = self._progress.add_task("start", total=None)

    def __call__(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        if self._progress is None:
            return
        if stage != self._stage:
            self._stage = stage
            self._progress.reset(self._task, description=stage)
        self._progress.update(self._task, completed=done_bytes, total=total_bytes or None)


@app.command("import")
def import_layer(
    path: Annotated[
        Path | None,
        typer.Argument(help="A directory, a tar, an OCI layout or a `docker save` archive."),
    ] = None,
    *,
    name: Annotated[str, typer.Option(help="Its name.")],
    version: Annotated[str, typer.Option(help="Its version; together name@version.")],
    kind: Annotated[Kind, typer.Option(help="Which layer of a sandbox it is.")] = Kind.BASE,
    oci: Annotated[bool, typer.Option("--oci", help="PATH is a container image.")] = False,
    from_host: Annotated[
        bool, typer.Option("--from-host", help="Build a base of this host's shell and Python.")
    ] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Move an existing reference.")] = False,
    json_output: Json = False,
) -> None:
    """Make a layer and put it into the stores of all nodes."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        if (path is None) != from_host:
            raise UsageError("give either a PATH or --from-host")
        with ExitStack() as stack:
            shown = not output.json and sys.stderr.isatty()
            source = path
            async with client() as dsec:
                if source is None:
                    output.say("building a root file system of this host's shell and Python …")
                    source = await asyncio.to_thread(_host_root, stack)
                layers = dsec.layers
                if oci:
                    make: Any = layers.import_oci
                else:
                    is_tree = source.is_dir()
                    make = layers.import_directory if is_tree else layers.import_tar
                layer = await make(
                    source,
                    kind=kind.value,
                    name=name,
                    version=version,
                    replace=replace,
                    progress=_ProgressBar(stack, shown=shown),
                )
        if output.json:
            output.document(layer)
        else:
            output.text(f"{layer.reference}  {layer.digest}  {size_text(layer.size_bytes)}")

    run(work, json=json_output)


def _host_root(stack: ExitStack) -> Path:
    from dsec.rootfs import build_host_rootfs  # noqa: PLC0415  only for --from-host

    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dsec-rootfs-")))
    root = directory / "root"
    build_host_rootfs(root, python=True, programs=())
    return root


@app.command("list")
def list_layers(*, json_output: Json = False) -> None:
    """List the project's layers in the stores of all nodes."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            layers = await dsec.layers.list()
        if output.json:
            output.document(layers)
            return
        output.table(
            ("LAYER", "KIND", "SIZE", "AGE", "DIGEST", "NODES"),
            (
                (
                    layer.reference,
                    str(layer.kind),
                    size_text(layer.size_bytes),
                    age_text(layer.created_at),
                    layer.digest[:19],
                    ", ".join(layer.nodes),
                )
                for layer in layers
            ),
            empty="no layers; make one with `dsec layer import`",
        )

    run(work, json=json_output)


@app.command()
def inspect(
    reference: Annotated[str, typer.Argument(help="name@version or sha256:…")],
    *,
    json_output: Json = False,
) -> None:
    """Show one layer and where it is."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            layer = await dsec.layers.inspect(reference)
        if output.json:
            output.document(layer)
            return
        output.facts(
            {
                "layer": layer.reference,
                "kind": str(layer.kind),
                "digest": layer.digest,
                "size": size_text(layer.size_bytes),
                "entries": str(layer.entries),
                "created": time_text(layer.created_at),
                "nodes": ", ".join(layer.nodes),
            }
        )

    run(work, json=json_output)


@app.command()
def rm(references: list[str], *, json_output: Json = False) -> None:
    """Remove references; an image goes when nothing refers to it."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            for reference in references:
                await dsec.layers.remove(reference)
                if not output.json:
                    output.text(reference)
        if output.json:
            output.document([{"reference": reference} for reference in references])

    run(work, json=json_output)
