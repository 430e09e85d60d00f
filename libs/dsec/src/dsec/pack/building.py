"""Building a package: what an agent needs, found, taken from what is installed, and put together.

The same input gives the same bytes: order, times, owners and permission bits of the files that it
is made of do not matter, nor does who builds it, where and when.
"""

from __future__ import annotations

import hashlib
import itertools
import platform
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dsec.pack.cache import Cache, write_whole
from dsec.pack.container import (
    ENTRIES_MAX,
    UNPACKED_MAX_BYTES,
    Entry,
    entry_of,
    write_container,
)
from dsec.pack.environment import Environment, Installed, is_native, parse_requirement, walk_module
from dsec.pack.errors import refused
from dsec.pack.fetching import LOCK, fetched, read_requirements, unmet
from dsec.pack.following import Reached
from dsec.pack.manifest import (
    CODE,
    CONTRACT,
    FORMAT,
    LIBRARIES,
    MANIFEST,
    SIGNATURE,
    Distribution,
    Manifest,
    PackedFile,
    Target,
)
from dsec.pack.package import Package, read_package
from dsec.pack.paths import check_path
from dsec.pack.project import Project, open_project
from dsec.pack.signing import SigningKey
from dsec.pack.tracing import traced_imports
from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.wire.agent import PACKAGE_MAX_BYTES

_BIGGEST_SHOWN: Final = 5
_MIB: Final = 1024 * 1024
#: Manifest, signature and contract.
_HEAD_ENTRIES: Final = 3


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a build is asked for, besides the code.

    Attributes:
        contract: the contract's file, where it is not beside the code under its usual name.
        entry: the file that is run, likewise.
        include: modules that no import names, such as plug-ins; a package with all below it.
        exclude: modules and distributions that the base has, and patterns of files to leave out.
        require: distributions that the code needs, beside those in ``requirements.txt``.
        trace: a command that shows by running what else is imported.
        may_fetch: whether what is required and not installed may be fetched.
        sign_key: whose signature the package gets.
    """

    contract: Path | None = None
    entry: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    trace: str = ""
    may_fetch: bool = True
    sign_key: SigningKey | None = None


@dataclass(frozen=True, slots=True)
class Built:
    """A package, and what its author may want to know.

    Attributes:
        data: the package.
        package: what is in it, read back.
        left_out: imports that the code does without and that are not installed, with where.
    """

    data: bytes
    package: Package
    left_out: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Source:
    """A file that goes into the package, and whose it is."""

    path: str
    file: Path
    part: str


def build_package(source: Path, wanted: Wanted | None = None, cache: Cache | None = None) -> Built:
    """Return the package of an agent.

    Args:
        source: a directory, or the one file that is run.
        wanted: see there.
        cache: what earlier builds made; by default in the user's cache directory.

    Raises:
        DsecError: ``not_found`` for code, a contract or a module that there is not; ``invalid`` for
            what cannot be meant or packed, and when it is too large, with its biggest parts;
            ``unavailable`` for what may not be fetched; ``unsupported``.
    """
    wanted, cache = wanted or Wanted(), cache or Cache()
    project = open_project(source, wanted.contract, wanted.entry)
    traced = traced_imports(wanted.trace, project.root) if wanted.trace else frozenset()
    reached, distributions = _resolved(project, wanted, traced, cache)
    sources = sorted(
        _sources(project, wanted, reached, distributions.values()), key=lambda one: one.path
    )
    entries, files = _packed(project, sources, cache)
    manifest = Manifest(
        format=FORMAT,
        name=project.name,
        version=project.version,
        entry=project.entry,
        python=".".join(platform.python_version_tuple()[:2]),
        target=Target.here() if any(is_native(file.path) for file in files) else None,
        distributions=tuple(
            _described(distributions[name], sources) for name in sorted(distributions)
        ),
        files=tuple(files),
    )
    data = _contained(manifest, entries, wanted.sign_key)
    if len(data) > PACKAGE_MAX_BYTES:
        sizes = {entry.name: len(entry.body) for entry in entries}
        raise _too_large(len(data), PACKAGE_MAX_BYTES, sources, sizes)
    # Read as everybody else will: what would be refused there is refused here.
    package = read_package(data)
    cache.trim()
    return Built(data=data, package=package, left_out=dict(sorted(reached.left_out.items())))


def write_package(built: Built, path: Path) -> None:
    """Write a package to a file, whole or not at all.

    Raises:
        DsecError: ``invalid`` when it cannot be written.
    """
    try:
        write_whole(path, built.data)
    except OSError as error:
        raise invalid(f"{path} cannot be written: {error.strerror}") from None


# --- Finding --------------------------------------------------------------------------------------


def _resolved(
    project: Project, wanted: Wanted, traced: frozenset[str], cache: Cache
) -> tuple[Reached, dict[str, Installed]]:
    """Return the modules that are reached, and all distributions that they need."""
    required = [
        *read_requirements(project.root / "requirements.txt"),
        *(parse_requirement(text, "--require") for text in wanted.require),
    ]
    excluded = frozenset(wanted.exclude)
    required = [one for one in required if canonicalize_name(one.name) not in excluded]
    environment = Environment.here()
    missing = unmet(required, environment)
    # What is fetched may need what is not: then it is fetched together.
    for _ in range(len(environment.installed) + 1):
        if missing:
            lock = project.root / LOCK
            site = fetched(missing, lock, cache, may_fetch=wanted.may_fetch)
            environment = Environment.here(site)
        reached = Reached(project, environment, excluded)
        reached.follow(wanted.include, traced)
        extras = {str(canonicalize_name(one.name)): tuple(sorted(one.extras)) for one in required}
        found, lacking = _closure(reached, environment, extras, excluded)
        if not lacking:
            return reached, found
        missing = [*missing, *lacking]
    raise invalid(f"{', '.join(map(str, missing))} cannot be had together")


def _closure(
    reached: Reached,
    environment: Environment,
    extras: Mapping[str, tuple[str, ...]],
    excluded: frozenset[str],
) -> tuple[dict[str, Installed], list[Requirement]]:
    """Return what is reached with all that it requires, and what of that is not installed."""
    found: dict[str, Installed] = {}
    lacking: list[Requirement] = []
    waiting = [(one, extras.get(one.name, ())) for one in reached.distributions.values()]
    done: set[tuple[str, tuple[str, ...]]] = set()
    while waiting:
        one, its_extras = waiting.pop()
        if (one.name, its_extras) in done:
            continue
        done.add((one.name, its_extras))
        found[one.name] = one
        if one.editable is not None and one.name not in reached.distributions:
            raise DsecError(
                ErrorCode.UNSUPPORTED,
                f"{one.name} is installed for development, and no import tells which of its "
                "modules are needed: name them with --include",
            )
        for requirement in one.requirements(its_extras):
            name = canonicalize_name(requirement.name)
            if name in excluded:
                continue
            there = environment.installed.get(name)
            if there is None:
                lacking.append(requirement)
            else:
                waiting.append((there, tuple(sorted(requirement.extras))))
    return found, lacking


# --- Collecting -----------------------------------------------------------------------------------


def _sources(
    project: Project, wanted: Wanted, reached: Reached, distributions: Iterable[Installed]
) -> Iterator[_Source]:
    own = {file.relative_to(project.root).as_posix(): file for file in reached.files}
    own.update(project.other_files(wanted.exclude))
    for path, file in own.items():
        yield _Source(CODE + path, file, CODE + path)
    # The SDK's modules first: of its distribution nothing else is taken.
    taken: dict[str, Path] = {}
    libraries = itertools.chain(
        ((path, file, "dsec") for path, file in reached.sdk.files()),
        (
            (path, file, f"{one.name} {one.version}")
            for place, one in reached.developed.items()
            for path, file in walk_module(place)
        ),
        (
            (path, file, f"{one.name} {one.version}")
            for one in distributions
            for path, file in one.files()
        ),
    )
    for path, file, part in libraries:
        before = taken.setdefault(path, file)
        if before is file:
            yield _Source(LIBRARIES + path, file, part)
        elif before.read_bytes() != file.read_bytes():
            raise refused("duplicate", f"{before} and {file} would be one file, {path}")


def _packed(
    project: Project, sources: list[_Source], cache: Cache
) -> tuple[list[Entry], list[PackedFile]]:
    """Return each file packed, and as the manifest names it: the contract, then by path."""
    if len(sources) > ENTRIES_MAX - _HEAD_ENTRIES:
        raise refused(
            "too_large",
            f"the package would have {len(sources)} files: at most {ENTRIES_MAX - _HEAD_ENTRIES} "
            "are taken. Leave out what the agent does not need (--exclude), or put it into a layer",
        )
    try:
        total = sum(one.file.stat().st_size for one in sources)
        if total > UNPACKED_MAX_BYTES:
            sizes = {one.path: one.file.stat().st_size for one in sources}
            raise _too_large(total, UNPACKED_MAX_BYTES, sources, sizes, "unpacked ")
        entries, files = [], []
        for one in (_Source(CONTRACT, project.contract, CONTRACT), *sources):
            check_path(one.path)
            content = one.file.read_bytes()
            mode = one.file.stat().st_mode
            sha256 = hashlib.sha256(content).hexdigest()
            executable = one.path != CONTRACT and bool(mode & stat.S_IXUSR)
            packed = cache.deflated(content, sha256)
            entries.append(entry_of(one.path, content, executable=executable, packed=packed))
            files.append(
                PackedFile(
                    path=one.path,
                    size_bytes=len(content),
                    sha256=sha256,
                    executable=executable,
                )
            )
    except OSError as error:
        raise invalid(f"{error.filename} cannot be read: {error.strerror}") from None
    return entries, files


def _described(one: Installed, sources: list[_Source]) -> Distribution:
    part = f"{one.name} {one.version}"
    return Distribution(
        name=one.name,
        version=one.version,
        tags=one.tags(),
        native=any(it.part == part and is_native(it.path) for it in sources),
    )


def _contained(manifest: Manifest, entries: list[Entry], key: SigningKey | None) -> bytes:
    written = manifest.encode()
    head = [entry_of(MANIFEST, written)]
    if key is not None:
        head.append(entry_of(SIGNATURE, key.sign(written)))
    return write_container([*head, *entries])


def _too_large(
    size: int, most: int, sources: list[_Source], sizes: Mapping[str, int], how: str = ""
) -> DsecError:
    """Return the error that names the biggest parts: distributions, and the author's own files."""
    parts: dict[str, int] = {}
    for one in sources:
        parts[one.part] = parts.get(one.part, 0) + sizes[one.path]
    biggest = sorted(parts, key=lambda part: (-parts[part], part))[:_BIGGEST_SHOWN]
    named = ", ".join(f"{part} ({parts[part] / _MIB:.1f} MiB)" for part in biggest)
    return refused(
        "too_large",
        f"the package would have {how}{size / _MIB:.1f} MiB: at most {most // _MIB} MiB are taken. "
        f"The biggest parts: {named}. Leave out what the agent does not need (--exclude), or put "
        "it into a layer",
        size_bytes=size,
        max_bytes=most,
    )
