"""``dsec-pack``: an agent's code and all that it imports, as one file: build, inspect, verify."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsec.cli.output import Json, Output, UsageError, run, size_text

if TYPE_CHECKING:
    from dsec.pack.package import Package

app = typer.Typer(
    name="dsec-pack",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Packages of agents: built, looked into, checked.",
)

PackageFile = Annotated[Path, typer.Argument(help="A package, as `dsec-pack build` wrote it.")]
PublicKey = Annotated[
    str,
    typer.Option(
        envvar="DSEC_PACK_PUBLIC_KEY",
        help="Demand this key's signature: the key, or a file with it.",
    ),
]


def signer_demanded(public_key: str) -> str:
    """Return the key whose signature ``--public-key`` demands; empty for none."""
    if not public_key:
        return ""
    from dsec.pack import signing  # noqa: PLC0415  --help stays quick

    return signing.public_key(public_key)


@app.command()
def build(
    source: Annotated[
        Path | None, typer.Argument(help="A directory, or the one file that is run.")
    ] = None,
    *,
    code: Annotated[Path | None, typer.Option("--code", help="The same as the argument.")] = None,
    contract: Annotated[
        Path | None, typer.Option("--asdl", help="The contract; else the YAML beside the code.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where it goes; else NAME-VERSION.dsec here."),
    ] = None,
    entry: Annotated[str, typer.Option(help="The file of the directory that is run.")] = "",
    include: Annotated[
        list[str] | None, typer.Option(help="A module that no import names; repeat.")
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="A module or distribution that the base has, or files; repeat."),
    ] = None,
    require: Annotated[
        list[str] | None, typer.Option(help="As a line of requirements.txt; repeat.")
    ] = None,
    trace: Annotated[
        str, typer.Option(metavar="COMMAND", help="Run it, and take what it imports, too.")
    ] = "",
    no_fetch: Annotated[
        bool, typer.Option("--no-fetch", help="Fetch nothing: all is installed.")
    ] = False,
    sign_key: Annotated[
        Path | None, typer.Option(help="Sign it with this key, of `dsec-pack keygen`.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Find what an agent imports, and write it with the agent's code to one file."""

    async def work(out: Output) -> None:
        from dsec.pack.building import Wanted, build_package, write_package  # noqa: PLC0415  quick
        from dsec.pack.signing import SigningKey  # noqa: PLC0415  as above

        given = source or code
        if given is None or (source and code):
            raise UsageError("give a directory or a file, once")
        built = build_package(
            given,
            Wanted(
                contract=contract,
                entry=entry,
                include=tuple(include or ()),
                exclude=tuple(exclude or ()),
                require=tuple(require or ()),
                trace=trace,
                may_fetch=not no_fetch,
                sign_key=None if sign_key is None else SigningKey.read(sign_key),
            ),
        )
        manifest = built.package.manifest
        target = output or Path(f"{manifest.name}-{manifest.version}.dsec")
        write_package(built, target)
        for module, where in built.left_out.items():
            out.say(f"{where} does without {module}, which is not installed")
        if out.json:
            out.document({"file": str(target), **_document(built.package)})
        else:
            out.text(f"{target}  {size_text(built.package.size_bytes)}  {_names(built.package)}")

    run(work, json=json_output)


@app.command()
def inspect(
    package: PackageFile,
    *,
    files: Annotated[bool, typer.Option("--files", help="Each file with its hash.")] = False,
    json_output: Json = False,
) -> None:
    """Show what is in a package; all of it is checked first."""

    async def work(out: Output) -> None:
        from dsec.pack.package import read_package_file  # noqa: PLC0415  --help stays quick

        found = read_package_file(package)
        manifest = found.manifest
        if out.json:
            out.document(_document(found, files=True))
            return
        out.facts(
            {
                "agent": f"{manifest.name} {manifest.version}",
                "runs": manifest.entry,
                "python": manifest.python,
                "built for": str(manifest.target or "any platform"),
                "signed by": found.signed_by or "nobody",
                "size": f"{size_text(found.size_bytes)}, {size_text(_unpacked(found))} unpacked, "
                f"{len(manifest.files)} files",
                "sha256": found.sha256,
            }
        )
        if files:
            rows: Iterable[Any] = (
                (one.path, size_text(one.size_bytes), one.sha256) for one in manifest.files
            )
            out.table(("FILE", "SIZE", "SHA256"), rows)
        else:
            out.table(
                ("DISTRIBUTION", "VERSION", "NATIVE"),
                (
                    (one.name, one.version, ", ".join(one.tags) if one.native else "-")
                    for one in manifest.distributions
                ),
                empty="no distributions: it needs nothing but Python",
            )

    run(work, json=json_output)


@app.command()
def verify(
    package: PackageFile,
    *,
    public_key: PublicKey = "",
    target: Annotated[
        str, typer.Option(help="Refuse one that does not run there, such as cp311-linux-x86_64.")
    ] = "",
    json_output: Json = False,
) -> None:
    """Check every byte of a package, and who signed it; exit 1 when something is wrong."""

    async def work(out: Output) -> None:
        from dsec.pack.manifest import Target  # noqa: PLC0415  --help stays quick
        from dsec.pack.package import read_package_file  # noqa: PLC0415  as above
        from dsec_common.errors import DsecError  # noqa: PLC0415  as above

        there = Target.parse(target) if target else Target.here()
        found = read_package_file(package, signer_demanded(public_key))
        fits = True
        try:
            found.manifest.check_target(there)
        except DsecError as error:
            if target:
                raise
            fits = False
            out.say(f"{error.message} (that is this machine; elsewhere it may run)")
        if out.json:
            out.document({**_document(found), "target": str(there), "fits": fits})
            return
        signed = f"signed by {found.signed_by}" if found.signed_by else "not signed"
        out.text(f"{package}  {_names(found)}  {len(found.manifest.files)} files, {signed}")

    run(work, json=json_output)


@app.command()
def unpack(
    package: PackageFile,
    directory: Annotated[Path, typer.Argument(help="A directory that is not there yet.")],
    *,
    public_key: PublicKey = "",
    json_output: Json = False,
) -> None:
    """Write a package's files to a new directory; its program ``run`` is the agent."""

    async def work(out: Output) -> None:
        from dsec.pack.layering import run_program  # noqa: PLC0415  --help stays quick
        from dsec.pack.package import read_package_file  # noqa: PLC0415  as above

        found = read_package_file(package, signer_demanded(public_key))
        found.unpack(directory, {"run": run_program()})
        if out.json:
            out.document({"directory": str(directory), "run": str(directory / "run")})
        else:
            out.text(str(directory / "run"))

    run(work, json=json_output)


@app.command()
def keygen(
    path: Annotated[Path, typer.Argument(help="A new file for the private key.")],
    *,
    json_output: Json = False,
) -> None:
    """Make a key to sign with, and print its public half."""

    async def work(out: Output) -> None:
        from dsec.pack.signing import write_new_key  # noqa: PLC0415  --help stays quick

        key = write_new_key(path)
        if out.json:
            out.document({"file": str(path), "public_key": key.public_key})
        else:
            out.text(key.public_key)

    run(work, json=json_output)


def _unpacked(package: Package) -> int:
    return sum(one.size_bytes for one in package.manifest.files)


def _names(package: Package) -> str:
    return f"{package.manifest.name} {package.manifest.version}"


def _document(package: Package, *, files: bool = False) -> dict[str, Any]:
    manifest = package.manifest
    return {
        "name": manifest.name,
        "version": manifest.version,
        "entry": manifest.entry,
        "python": manifest.python,
        "built_for": None if manifest.target is None else str(manifest.target),
        "signed_by": package.signed_by,
        "size_bytes": package.size_bytes,
        "unpacked_bytes": _unpacked(package),
        "sha256": package.sha256,
        "distributions": manifest.distributions,
        **({"files": manifest.files} if files else {}),
    }


def main() -> None:
    """Run the command line of this process."""
    sys.exit(app())


if __name__ == "__main__":
    main()
