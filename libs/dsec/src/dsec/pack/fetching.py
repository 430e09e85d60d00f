"""Distributions that are required and not installed: pip resolves them once, a lock pins them.

Only what the author named is fetched, in ``requirements.txt`` or on the command line, and what that
needs in turn: the name of an import is never taken for the name of a package, which anyone could
have registered. Only wheels are taken, since anything else runs its author's code to be built. The
lock has each version with the hash of its file; with it, no build gets anything else.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dsec.pack.cache import Cache, write_whole
from dsec.pack.environment import Environment, holds_here, parse_requirement
from dsec.pack.manifest import Target
from dsec_common.errors import DsecError, ErrorCode, invalid, unavailable

LOCK: Final = "dsec-pack.lock"
_TIMEOUT_S: Final = 900.0
_SAID_MAX: Final = 1500
_TEXT_BYTES_MAX: Final = 1 << 20
_HEAD: Final = (
    "# What `dsec-pack build` fetches, to the byte: keep it with the code.\n"
    "# It is made anew when requirements ask for something else.\n"
)


class _ArchiveInfo(msgspec.Struct, frozen=True):
    hashes: dict[str, str] = {}


class _DownloadInfo(msgspec.Struct, frozen=True):
    archive_info: _ArchiveInfo = _ArchiveInfo()


class _Metadata(msgspec.Struct, frozen=True):
    name: str
    version: str


class _Fetched(msgspec.Struct, frozen=True):
    metadata: _Metadata
    download_info: _DownloadInfo


class _Report(msgspec.Struct, frozen=True):
    install: tuple[_Fetched, ...]


def read_requirements(path: Path) -> tuple[Requirement, ...]:
    """Return what a requirements file names; no file requires nothing.

    Raises:
        DsecError: ``invalid`` for what cannot be meant; ``unsupported`` for options.
    """
    found = []
    text = _text_of(path)
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition(" #")[0].strip()
        if not words or words.startswith("#"):
            continue
        if words.startswith("-"):
            raise DsecError(
                ErrorCode.UNSUPPORTED,
                f"{path}:{number}: {words[:64]!r} is an option: only requirements are read; set "
                "pip's options in its own configuration",
            )
        found.append(parse_requirement(words, f"{path}:{number}"))
    return tuple(one for one in found if holds_here(one))


def fetched(
    requirements: Iterable[Requirement], lock: Path, cache: Cache, *, may_fetch: bool
) -> Path:
    """Return a directory with what is required, as the lock pins it; write the lock if it does not.

    Raises:
        DsecError: ``invalid`` for what there is not, or not as a wheel; ``unavailable`` when it is
            not here already and must not be, or cannot be fetched.
    """
    wanted = sorted({str(one) for one in requirements})
    locked = _text_of(lock)
    pinned = _pins_in(locked, lock)
    if _covers(pinned, wanted):
        key = _key(locked)
        if (kept := cache.tree(key)).is_dir():
            return kept
        _check_may_fetch(wanted, may_fetch=may_fetch)
        with cache.scratch() as scratch:
            (scratch / "lock").write_text(locked, encoding="utf-8")
            _pip(scratch, "--require-hashes", "--no-deps", "-r", str(scratch / "lock"))
            return cache.keep_tree(scratch / "site", key)
    _check_may_fetch(wanted, may_fetch=may_fetch)
    with cache.scratch() as scratch:
        constraints = scratch / "constraints"
        lines = (f"{name}=={version}" for name, version in pinned.items())
        constraints.write_text("\n".join(lines), encoding="utf-8")
        try:
            report = _pip(scratch, "-c", str(constraints), *wanted)
        except DsecError:
            if not pinned:
                raise
            # The pins are of what was asked for before: it may exclude what is asked for now.
            report = _pip(scratch, *wanted)
        text = _lock_text(wanted, report)
        try:
            write_whole(lock, text.encode())
        except OSError as error:
            raise invalid(f"{lock} cannot be written: {error.strerror}") from None
        return cache.keep_tree(scratch / "site", _key(text))


def _check_may_fetch(wanted: list[str], *, may_fetch: bool) -> None:
    if not may_fetch:
        raise unavailable(
            f"{', '.join(wanted)}: not installed, and --no-fetch forbids to fetch it",
            retry_after_s=0.0,
        )


def _key(lock: str) -> str:
    return f"{Target.here()}\n{lock}"


def _text_of(path: Path) -> str:
    """Return what a file says; one that is not there says nothing."""
    try:
        if path.exists() and not path.is_file():  # a pipe might never say anything
            raise invalid(f"{path} is no plain file")
        with path.open("rb") as file:
            data = file.read(_TEXT_BYTES_MAX + 1)
        text = data.decode()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(f"{path} cannot be read: {error}") from None
    if len(data) > _TEXT_BYTES_MAX:
        raise invalid(f"{path} is too large: at most {_TEXT_BYTES_MAX} bytes are read")
    return text


def _pins_in(text: str, lock: Path) -> dict[str, str]:
    """Return the pinned version of each name."""
    pins = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name, equals, version = words[0].partition("==")
        if not equals or not all(word.startswith("--hash=") for word in words[1:]) or not words[1:]:
            raise invalid(f"{lock}:{number}: {line[:64]!r} pins nothing; delete the file")
        pins[str(canonicalize_name(name))] = version
    return pins


def _covers(pinned: dict[str, str], wanted: list[str]) -> bool:
    """Return whether the lock pins all that is wanted, in versions that will do."""
    for text in wanted:
        requirement = Requirement(text)
        version = pinned.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            return False
    return bool(pinned)


def _lock_text(wanted: list[str], report: _Report) -> str:
    lines = []
    for one in sorted(report.install, key=lambda one: canonicalize_name(one.metadata.name)):
        sha256 = one.download_info.archive_info.hashes.get("sha256")
        if sha256 is None:
            raise invalid(f"{one.metadata.name} is no file with a hash, so it cannot be pinned")
        lines.append(
            f"{canonicalize_name(one.metadata.name)}=={one.metadata.version} --hash=sha256:{sha256}"
        )
    return f"{_HEAD}# For: {', '.join(wanted)}\n" + "\n".join(lines) + "\n"


def _pip(scratch: Path, *arguments: str) -> _Report:
    report = scratch / "report.json"
    words = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--no-input", "--only-binary", ":all:", "--no-compile", "--ignore-installed"),
        *("--target", str(scratch / "site"), "--upgrade", "--report", str(report), *arguments),
    ]
    try:
        done = subprocess.run(
            words,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise unavailable(f"pip did not end within {_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        raise invalid(f"pip cannot install it: {done.stderr.strip()[-_SAID_MAX:]}")
    return msgspec.json.decode(report.read_bytes(), type=_Report)


def unmet(requirements: Iterable[Requirement], environment: Environment) -> list[Requirement]:
    """Return what is required and not installed in a version that will do."""
    return [one for one in requirements if not environment.satisfies(one)]
