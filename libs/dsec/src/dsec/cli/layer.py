"""``dsec layer``: import, build, list, inspect, tag, rm."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsec.cli.output import Json, Output, UsageError, age_text, run, size_text, time_text
from dsec.cli.pack import PublicKey, signer_demanded
from dsec.cli.progress import ImportProgress, tell_line

if TYPE_CHECKING:
    from dsec.pack.package import Package

app = typer.Typer(no_args_is_help=True, help="Layers: the read-only trees sandboxes are made of.")


class Kind(StrEnum):
    """Which of a sandbox's layers it is."""

    BASE = "base"
    WORKSPACE = "workspace"
    TOOLKIT = "toolkit"
    DATA = "data"


class Git(StrEnum):
    """What an import does with git repositories."""

    KEEP = "keep"
    CUT = "cut"
    DROP = "drop"


@app.command("import")
def import_layer(
    path: Annotated[
        Path | None,
        typer.Argument(help="A directory, a tar, an OCI layout, a `docker save` archive, a .dsec."),
    ] = None,
    *,
    name: Annotated[str, typer.Option(help="Its name; a package's is the agent's.")] = "",
    version: Annotated[
        str, typer.Option(help="Its version; together name@version. A package's is the agent's.")
    ] = "",
    kind: Annotated[
        Kind | None, typer.Option(help="Which layer of a sandbox it is; a base, or a package.")
    ] = None,
    oci: Annotated[bool, typer.Option("--oci", help="Refuse what is no container image.")] = False,
    image: Annotated[
        str, typer.Option("--image", help="Which image of several, as name:tag; implies --oci.")
    ] = "",
    tags: Annotated[
        list[str] | None, typer.Option("--tag", help="Let name:TAG mean it; may be repeated.")
    ] = None,
    from_host: Annotated[
        bool, typer.Option("--from-host", help="Build a base of this host's shell and Python.")
    ] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Move an existing reference.")] = False,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", help="Leave out paths, such as '**/*.log'; may be repeated."),
    ] = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="Leave out caches, histories, backups; cut git.")
    ] = False,
    git: Annotated[
        Git | None, typer.Option("--git", help="What becomes of repositories; cut with --clean.")
    ] = None,
    public_key: PublicKey = "",
    json_output: Json = False,
) -> None:
    """Make a layer and put it into the stores of all nodes.

    Progress goes to standard error: as a bar on a terminal, as JSON lines with --json.
    """

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        if (path is None) != from_host:
            raise UsageError("give either a PATH or --from-host")
        package = None if path is None else _package_at(path, public_key)
        if package is None and not (name and version):
            raise UsageError("give --name and --version")
        if package and (kind not in {None, Kind.TOOLKIT} or exclude or clean or git or oci):
            raise UsageError("a package is a toolkit, and nothing of it is left out")
        with ExitStack() as stack:
            progress = ImportProgress(stack, json=output.json)
            source = path
            async with client() as dsec:
                if source is None:
                    output.say("building a root file system of this host's shell and Python …")
                    source = await asyncio.to_thread(_host_root, stack)
                named: dict[str, Any] = {
                    "name": name,
                    "version": version,
                    "tags": tags or (),
                    "replace": replace,
                    "progress": progress,
                }
                if package is not None:
                    layer = await dsec.layers.import_package(package, **named)
                else:
                    named["kind"] = (kind or Kind.BASE).value
                    named |= {"exclude": exclude or (), "clean": clean}
                    named["git"] = git.value if git else None
                    if oci or image:
                        layer = await dsec.layers.import_oci(source, image=image, **named)
                    else:
                        layer = await dsec.layers.import_path(source, **named)
        if output.json:
            output.document(layer)
        else:
            if layer.left_out:
                output.say(f"left out {layer.left_out} entries")
            output.text(f"{layer.reference}  {layer.digest}  {size_text(layer.size_bytes)}")

    run(work, json=json_output)


def _package_at(path: Path, public_key: str) -> Package | None:
    """Return the package that a file is, with the signature that is demanded; None for others."""
    from dsec.pack.package import is_package, read_package_file  # noqa: PLC0415  --help stays quick

    return read_package_file(path, signer_demanded(public_key)) if is_package(path) else None


@app.command()
def build(
    recipe: Annotated[Path, typer.Argument(help="A TOML file: a base, packages, files, commands.")],
    *,
    name: Annotated[str, typer.Option(help="Its name.")],
    version: Annotated[str, typer.Option(help="Its version; together name@version.")],
    tags: Annotated[
        list[str] | None, typer.Option("--tag", help="Let name:TAG mean it; may be repeated.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Move an existing reference.")] = False,
    json_output: Json = False,
) -> None:
    """Build a layer in a sandbox: packages, files and commands on a base."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick
        from dsec.recipes import build_layer, read_recipe  # noqa: PLC0415  as above

        wanted = read_recipe(recipe)

        def tell(step: str, done: int, count: int) -> None:
            if output.json:
                tell_line(step, done, count)
            else:
                output.say(f"[{done + 1}/{count}] {step}")

        async with client() as dsec:
            layer = await build_layer(
                dsec,
                wanted,
                name=name,
                version=version,
                tags=tags or (),
                replace=replace,
                progress=tell,
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
def list_layers(
    *,
    kind: Annotated[Kind | None, typer.Option(help="Only layers of this kind.")] = None,
    name: Annotated[
        str, typer.Option(help="Only this name; with * at its end, names that begin so.")
    ] = "",
    tag: Annotated[str, typer.Option(help="Only what this tag means.")] = "",
    json_output: Json = False,
) -> None:
    """List the project's layers in the stores of all nodes."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            layers = await dsec.layers.list(kind=kind.value if kind else None, name=name, tag=tag)
        if output.json:
            output.document(layers)
            return
        output.table(
            ("LAYER", "TAGS", "KIND", "SIZE", "AGE", "DIGEST", "NODES"),
            (
                (
                    layer.reference,
                    ", ".join(layer.tags),
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
    reference: Annotated[str, typer.Argument(help="name@version, name:tag or sha256:…")],
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
        said = layer.defaults
        output.facts(
            {
                "layer": layer.reference,
                "kind": str(layer.kind),
                "digest": layer.digest,
                "size": size_text(layer.size_bytes),
                "entries": str(layer.entries),
                "created": time_text(layer.created_at),
                "made of": layer.source_digest or "a directory",
                "commands have": ""
                if said is None
                else " ".join(
                    [f"{name}={value}" for name, value in said.env.items()]
                    + [f"cwd {said.cwd}" for _ in said.cwd[:1]]
                    + [f"user {said.user}" for _ in said.user[:1]]
                ),
                "tags": ", ".join(layer.tags),
                "nodes": ", ".join(layer.nodes),
                "before": "; ".join(
                    f"{before.digest} since {time_text(before.at)}" for before in layer.history
                ),
            }
        )

    run(work, json=json_output)


@app.command()
def tag(
    reference: Annotated[str, typer.Argument(help="name@version")],
    tag: Annotated[str, typer.Argument(help="The tag; name:TAG means the version afterwards.")],
    *,
    json_output: Json = False,
) -> None:
    """Let a tag mean a version from now on; sandboxes keep what they have."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        async with client() as dsec:
            layer = await dsec.layers.tag(reference, tag)
        if output.json:
            output.document(layer)
        else:
            output.text(f"{layer.reference.partition('@')[0]}:{tag}  {layer.reference}")

    run(work, json=json_output)


@app.command()
def rm(
    references: Annotated[list[str], typer.Argument(help="name@version or name:tag")],
    *,
    json_output: Json = False,
) -> None:
    """Remove versions or tags; an image goes when nothing refers to it."""

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
