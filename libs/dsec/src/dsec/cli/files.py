"""``dsec sandbox``: cp, ls, stat, mkdir, mv, rm, watch; paths are written ``SANDBOX:PATH``."""

from __future__ import annotations

import re
import stat as stat_bits
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dsec.cli.output import Json, Output, UsageError, run, size_text, time_text
from dsec_common.errors import DsecError, ErrorCode

if TYPE_CHECKING:
    from dsec.sandbox import Sandbox
    from dsec_common.wire.files import FileInfo

_REMOTE: Final = re.compile(r"([A-Za-z0-9_-]+\.[A-Za-z0-9_-]+):(.+)", re.DOTALL)
_LETTERS: Final = {"file": "-", "directory": "d", "symlink": "l", "other": "?"}

Remote = Annotated[str, typer.Argument(help="SANDBOX:PATH.")]
User = Annotated[str, typer.Option("--user", "-u", help="Name or uid[:gid].")]


def _remote(text: str) -> tuple[str, str]:
    """Return sandbox and path, or complain."""
    found = _REMOTE.fullmatch(text)
    if found is None:
        raise UsageError(f"{text!r} is not SANDBOX:PATH, such as node-1.01jq8:/work")
    return found[1], found[2]


def cp(
    source: Annotated[str, typer.Argument(help="PATH, or SANDBOX:PATH.")],
    target: Annotated[str, typer.Argument(help="PATH, or SANDBOX:PATH.")],
    *,
    user: User = "root",
    json_output: Json = False,
) -> None:
    """Copy a file or a directory to or from a sandbox, or inside one.

    It goes into a target that is a directory; of DIRECTORY/. only what is in it goes.
    """

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        away, here = _REMOTE.fullmatch(source), _REMOTE.fullmatch(target)
        if away is not None and here is not None:
            await _copy_inside(output, (away[1], away[2]), (here[1], here[2]), user)
            return
        if away is None and here is None:
            raise UsageError("one of the two, or both, are SANDBOX:PATH")
        async with client() as dsec:
            if here is not None:
                sandbox = dsec.sandbox(here[1])
                path = await _place(sandbox, source, here[2], user)
                amount = await sandbox.upload(source, path, user=user)
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


async def _place(sandbox: Sandbox, source: str, target: str, user: str) -> str:
    """Return the path that a copy has: a directory that is there is gone into, as ``cp`` does.

    What is in a directory goes, without that itself, when the source ends in ``/.``.
    """
    name = PurePosixPath(source).name
    if source.endswith("/.") or name in {"", ".."}:
        return target.rstrip("/") or "/"
    if target.endswith("/"):
        return target + name
    try:
        await sandbox.stat(f"{target}/.", user=user)  # of a link, what it leads to
    except DsecError:
        return target
    return f"{target}/{name}"


async def _copy_inside(
    output: Output, source: tuple[str, str], target: tuple[str, str], user: str
) -> None:
    from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

    if source[0] != target[0]:
        raise UsageError("both are of one sandbox; from one to another copy by a local path")
    async with client() as dsec:
        sandbox = dsec.sandbox(source[0])
        path = await _place(sandbox, source[1], target[1], user)
        entries = await sandbox.copy(source[1], path, user=user)
    if output.json:
        output.document({"entries": entries})
    else:
        output.say(f"copied {entries} files, directories and links")


async def _listed(sandbox: Sandbox, path: str, user: str) -> list[FileInfo]:
    try:
        return await sandbox.list_directory(path, user=user)
    except DsecError as error:
        if error.code is not ErrorCode.NOT_FOUND:
            raise
        return [await sandbox.stat(path, user=user)]


def ls(path: Remote, *, user: User = "root", json_output: Json = False) -> None:
    """List a directory of a sandbox, or one file."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        sandbox_id, inside = _remote(path)
        async with client() as dsec:
            entries = await _listed(dsec.sandbox(sandbox_id), inside, user)
        if output.json:
            output.document(entries)
            return
        output.table(
            ("MODE", "OWNER", "SIZE", "CHANGED", "NAME"),
            (
                (
                    f"{_LETTERS[entry.kind]}{stat_bits.filemode(entry.mode)[1:]}",
                    f"{entry.user_id}:{entry.group_id}",
                    size_text(entry.size_bytes),
                    time_text(entry.modified_at),
                    f"{entry.path} -> {entry.link_target}" if entry.link_target else entry.path,
                )
                for entry in entries
            ),
            empty="no files there",
        )

    run(work, json=json_output)


def stat(path: Remote, *, user: User = "root", json_output: Json = False) -> None:
    """Show what a path of a sandbox is; a link is not followed."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        sandbox_id, inside = _remote(path)
        async with client() as dsec:
            found = await dsec.sandbox(sandbox_id).stat(inside, user=user)
        if output.json:
            output.document(found)
            return
        facts = {
            "path": found.path,
            "kind": str(found.kind),
            "size": f"{found.size_bytes} bytes",
            "mode": f"{found.mode:04o}",
            "owner": f"{found.user_id}:{found.group_id}",
            "changed": time_text(found.modified_at),
        }
        output.facts(facts | ({"leads to": found.link_target} if found.link_target else {}))

    run(work, json=json_output)


def mkdir(path: Remote, *, user: User = "root", json_output: Json = False) -> None:
    """Make a directory and those above it; an existing one is fine."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        sandbox_id, inside = _remote(path)
        async with client() as dsec:
            await dsec.sandbox(sandbox_id).make_directory(inside, user=user)
        if output.json:
            output.document({"path": inside})

    run(work, json=json_output)


def mv(
    path: Remote,
    target: Annotated[str, typer.Argument(help="PATH in the same sandbox, or SANDBOX:PATH.")],
    *,
    keep: Annotated[bool, typer.Option("--keep", help="Fail if there is something.")] = False,
    user: User = "root",
    json_output: Json = False,
) -> None:
    """Move a file or a directory inside a sandbox."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        sandbox_id, inside = _remote(path)
        there = _REMOTE.fullmatch(target)
        if there is not None and there[1] != sandbox_id:
            raise UsageError("a move stays in its sandbox; copy with `dsec sandbox cp`")
        async with client() as dsec:
            sandbox = dsec.sandbox(sandbox_id)
            place = await _place(sandbox, inside, there[2] if there else target, user)
            await sandbox.move(inside, place, replace=not keep, user=user)
        if output.json:
            output.document({"path": inside, "target": place})

    run(work, json=json_output)


def rm(
    what: Annotated[list[str], typer.Argument(help="Sandboxes, or files: SANDBOX:PATH.")],
    *,
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Directories and all in them.")
    ] = False,
    user: User = "root",
    json_output: Json = False,
) -> None:
    """Delete sandboxes, each gone with all it held when its line appears; or files of sandboxes."""
    files = [_REMOTE.fullmatch(text) for text in what]

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        if any(files) and not all(files):
            raise UsageError("name sandboxes or files (SANDBOX:PATH), not both at once")
        documents: list[dict[str, str | int]] = []
        async with client() as dsec:
            for text, found in zip(what, files, strict=True):
                if found is None:
                    ended = await dsec.sandbox(text).delete()
                    documents.append({"sandbox_id": text, "end_cause": ended})
                else:
                    sandbox = dsec.sandbox(found[1])
                    removed = await sandbox.remove(found[2], recursive=recursive, user=user)
                    documents.append({"path": text, "removed": removed})
                if not output.json:
                    output.text(text)
        if output.json:
            output.document(documents)

    run(work, json=json_output)


def watch(
    path: Remote,
    *,
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="All below it.")] = False,
    user: User = "root",
    json_output: Json = False,
) -> None:
    """Print what changes in a directory of a sandbox, one line each, until it is gone."""

    async def work(output: Output) -> None:
        from dsec.cli.connect import client  # noqa: PLC0415  --help stays quick

        sandbox_id, inside = _remote(path)
        async with client() as dsec:
            changes = dsec.sandbox(sandbox_id).watch(inside, recursive=recursive, user=user)
            async with changes:
                output.say(f"watching {path}")
                async for event in changes:
                    if output.json:
                        output.document(event)
                    else:
                        output.text(f"{event.change:<10} {event.path}")

    run(work, json=json_output)
