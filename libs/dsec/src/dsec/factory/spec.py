"""What a factory makes: a YAML file, and what it comes to for one seed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import stat as stat_bits
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from dsec.factory.patterns import matcher
from dsec.recipes import Recipe, read_recipe
from dsec_common.errors import DsecError, ErrorCode, invalid, not_found
from dsec_common.wire.layer import LayerInfo
from dsec_common.yaml_text import read_yaml

SPEC_BYTES_MAX: Final = 1 << 20
SEED_MAX: Final = 10**9
#: Counts up when the same spec comes to something else.
_GENERATION: Final = b"1"
_KEY_CHARACTERS: Final = 16
_SAID_BYTES: Final = 2000
_COPY_BYTES: Final = 1 << 20

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Bytes = Annotated[int, msgspec.Meta(ge=1 << 20)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
#: With a seed behind it, it is the name of a layer.
Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,39}$")]
SandboxPath = Annotated[str, msgspec.Meta(pattern=r"^/[^/\0]+(/[^/\0]+)*$")]
Command = Text | Annotated[tuple[Text, ...], msgspec.Meta(min_length=1)]
"""A line for the sandbox's ``/bin/sh``, or a program and its arguments."""


class Build(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the environment comes about in its sandbox, after the files are laid there.

    Attributes:
        toolkits: layers that only the building needs, such as an agent.
        recipe: a file as ``dsec layer build`` takes it, for the spec's base; carried out first.
        script: a local file that the sandbox's ``/bin/sh`` is given.
        commands: one after the other; one that fails ends the building.
        solution: a directory of the sandbox that the building leaves the solution in, as it is laid
            over the root; it is taken out of the environment.
        tests: likewise for the tests.
        env: variables of all of them, beside ``SEED``.
        network: what they may reach; nothing by default.
        user: who they run as.
        cwd: where.
        timeout_s: of each command, and of the hook.
        memory_bytes: of the sandbox.
        disk_bytes: of its writable layer.
    """

    toolkits: tuple[Text, ...] = ()
    recipe: str = ""
    script: str = ""
    commands: tuple[Command, ...] = ()
    solution: SandboxPath | None = None
    tests: SandboxPath | None = None
    env: dict[str, str] = {}
    network: str | dict[str, Any] | None = None
    user: str = ""
    cwd: str = ""
    timeout_s: Seconds = 900.0
    memory_bytes: Bytes = 1 << 30
    disk_bytes: Bytes = 512 << 20


class Verify(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The proof that an environment is unsolved, and can be solved.

    Attributes:
        command: ends with 0 in the environment with the solution, and with another code without.
        apply: run first where the solution is, such as one that applies a patch.
        unsolved_exit: the codes that mean "not solved"; by default all but 0, 126 and 127.
        toolkits: layers that only the tests need.
        env: variables.
        user: who runs it.
        cwd: where.
        timeout_s: of each command.
    """

    command: Command
    apply: Command | None = None
    unsolved_exit: tuple[Annotated[int, msgspec.Meta(ge=1, le=255)], ...] = ()
    toolkits: tuple[Text, ...] = ()
    env: dict[str, str] = {}
    user: str = ""
    cwd: str = ""
    timeout_s: Seconds = 120.0


class FactorySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is made; local paths are below ``directory``.

    Attributes:
        name: of the layers: ``<name>-<seed>``, and ``-tests`` and ``-solution`` behind it.
        base: the layer below.
        toolkits: layers that the environment has in use, too.
        template: a program of this machine and its arguments, run once for each seed with ``SEED``
            and ``OUT``: it writes ``files``, ``solution`` and ``tests`` into the directory ``OUT``,
            where they take the place of those below.
        files: a directory that is laid over the root before the building.
        solution: a directory that is laid over the root to solve the environment.
        tests: a directory that is laid over the root to test whether it is solved.
        public: files and directories of which every line may be known.
        build: how the rest comes about.
        verify: how it is proven.
        canaries: texts of solution and tests that stand nowhere else.
        exclude: patterns of paths that are no part of the environment.
        allow: patterns of paths in which nothing is looked for.
        git: what becomes of repositories: ``drop`` leaves them out, ``keep`` has every object of
            them looked through, and leaves reflogs, hooks and remotes out.
    """

    name: Name
    base: Text
    toolkits: tuple[Text, ...] = ()
    template: tuple[Text, ...] = ()
    files: str = ""
    solution: str = ""
    tests: str = ""
    public: tuple[Text, ...] = ()
    build: Build = Build()
    verify: Verify | None = None
    canaries: tuple[Text, ...] = ()
    exclude: tuple[Text, ...] = ()
    allow: tuple[Text, ...] = ()
    git: Literal["drop", "keep"] = "drop"


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One environment to be made.

    Attributes:
        spec: what it is of.
        seed: which one of it.
        key: of the content of all that it is made of: equal keys, equal work. That of the layers is
            part of it once they are pinned.
        files: what is laid before the building; None for nothing.
        solution: what solves it; None for nothing.
        tests: what tests it; None for nothing.
        public: what anybody may know.
        script: the building's; None without.
        recipe: the building's; None without.
        pinned: whether the layers are what they are named as now.
    """

    spec: FactorySpec
    seed: int
    key: str
    files: Path | None
    solution: Path | None
    tests: Path | None
    public: tuple[Path, ...]
    script: Path | None
    recipe: Recipe | None
    pinned: bool = False

    def pin(self, layers: Mapping[str, LayerInfo]) -> Item:
        """Return it with what its layers are: a tag that moves makes another environment.

        Args:
            layers: by each reference of the spec; tags become versions.
        """
        spec = self.spec
        digest = hashlib.sha256(self.key.encode())
        for reference in self.references():
            digest.update(layers[reference].digest.encode())

        def version(reference: str) -> str:
            return layers[reference].reference if ":" in reference else reference

        build = msgspec.structs.replace(
            spec.build, toolkits=tuple(map(version, spec.build.toolkits))
        )
        verify = spec.verify and msgspec.structs.replace(
            spec.verify, toolkits=tuple(map(version, spec.verify.toolkits))
        )
        return msgspec.structs.replace(
            self,
            spec=msgspec.structs.replace(
                spec,
                base=version(spec.base),
                toolkits=tuple(map(version, spec.toolkits)),
                build=build,
                verify=verify,
            ),
            key=digest.hexdigest()[:_KEY_CHARACTERS],
            pinned=True,
        )

    def references(self) -> list[str]:
        """Return the layers that it names."""
        verify = self.spec.verify.toolkits if self.spec.verify else ()
        return [self.spec.base, *self.spec.toolkits, *self.spec.build.toolkits, *verify]

    @property
    def beside(self) -> tuple[str, ...]:
        """Which of ``tests`` and ``solution`` are layers beside it."""
        build = self.spec.build
        given = {"tests": self.tests or build.tests, "solution": self.solution or build.solution}
        return tuple(what for what, path in given.items() if path)

    @property
    def name(self) -> str:
        """The name of its layer; the version is the key."""
        return f"{self.spec.name}-{self.seed}"


def read_spec(path: str | os.PathLike[str]) -> tuple[FactorySpec, Path]:
    """Return a spec and the directory that its paths are below.

    Raises:
        DsecError: ``not_found`` without the file; ``invalid``, with line and column, for what
            cannot be meant.
    """
    source = Path(path)
    try:
        if source.stat().st_size > SPEC_BYTES_MAX:
            raise invalid(f"{source} is too large to be a factory's spec")
        text = source.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise not_found(f"there is no factory's spec at {source}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(f"{source} cannot be read: {error}") from None
    spec = read_yaml(text, FactorySpec, str(source))
    _check(spec, str(source))
    return spec, source.parent


def _check(spec: FactorySpec, source: str) -> None:
    """Refuse what cannot be meant, before anything is made."""
    build = spec.build
    if not (spec.template or spec.files or build.recipe or build.script or build.commands):
        raise invalid(f"{source}: nothing is built; give files, a template, or build")
    left = build.solution or build.tests
    solved = bool(
        spec.solution or build.solution or spec.template or (spec.verify and spec.verify.apply)
    )
    if spec.verify is not None and not solved:
        raise invalid(
            f"{source}: verify needs a solution: a directory that is laid over the environment, or "
            "a command under verify.apply"
        )
    if (spec.solution and build.solution) or (spec.tests and build.tests):
        raise invalid(f"{source}: solution and tests are either given, or what the building leaves")
    if (spec.solution or spec.tests or left) and spec.verify is None:
        raise invalid(
            f"{source}: there is no verify; say by which command the environment is proven to be "
            "unsolved without the solution and solved with it"
        )
    matcher((*spec.exclude, *spec.allow))


async def item_of(spec: FactorySpec, directory: Path, seed: int, scratch: Path) -> Item:
    """Return what a spec comes to for one seed; the template is run.

    Args:
        spec: what is made.
        directory: that its paths are below.
        seed: given to template and building.
        scratch: a directory of this item's own, where the template writes; it is emptied first.

    Raises:
        DsecError: ``not_found`` for a path of the spec; ``invalid`` for a template that fails, and
            for a seed that is negative or above 10^9.
    """
    if not 0 <= seed <= SEED_MAX:
        raise invalid(f"{seed} is no seed: use 0 to {SEED_MAX}")
    out = (scratch / "out").absolute()
    await asyncio.to_thread(_emptied, out)
    if spec.template:
        await _run_template(spec, directory, seed, out)
    recipe = read_recipe(directory / spec.build.recipe) if spec.build.recipe else None
    if recipe is not None and (recipe.base != spec.base or recipe.exclude):
        raise invalid(
            f"the recipe {spec.build.recipe} is to have the spec's base {spec.base!r}, and no "
            "exclude of its own"
        )
    paths = {
        "files": _tree("files", out, directory, spec.files),
        "solution": _tree("solution", out, directory, spec.solution),
        "tests": _tree("tests", out, directory, spec.tests),
        "script": _there("build.script", directory, spec.build.script),
    }
    if spec.verify is None and (paths["solution"] or paths["tests"]):
        raise invalid("the template wrote a solution or tests; say under verify how they are used")
    if spec.verify is not None and not (
        paths["solution"] or spec.build.solution or spec.verify.apply
    ):
        raise invalid(f"the template wrote no solution for seed {seed}; verify needs one")
    public = tuple(found for given in spec.public if (found := _there("public", directory, given)))
    key = await asyncio.to_thread(_key, spec, seed, paths, public, recipe)
    return Item(
        spec=spec,
        seed=seed,
        key=key,
        files=paths["files"],
        solution=paths["solution"],
        tests=paths["tests"],
        public=public,
        script=paths["script"],
        recipe=recipe,
    )


def _tree(name: str, out: Path, directory: Path, given: str) -> Path | None:
    """Return the directory that the template wrote, else the one that the spec names."""
    if (out / name).is_dir():
        return out / name
    found = _there(name, directory, given)
    if found is not None and not found.is_dir():
        raise invalid(f"{name} names {given!r}, and {found} is no directory")
    return found


def _there(name: str, directory: Path, given: str) -> Path | None:
    if given and not (directory / given).exists():
        raise not_found(f"{name} names {given!r}, and there is nothing at {directory / given}")
    return directory / given if given else None


def _emptied(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


async def _run_template(spec: FactorySpec, directory: Path, seed: int, out: Path) -> None:
    environment = os.environ | {"SEED": str(seed), "OUT": str(out)}
    try:
        process = await asyncio.create_subprocess_exec(
            *spec.template,
            cwd=directory,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except OSError as error:
        raise invalid(f"the template {spec.template[0]!r} cannot be run: {error}") from None
    try:
        said, _ = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    if process.returncode != 0:
        raise DsecError(
            ErrorCode.INVALID,
            f"the template failed for seed {seed} with exit code {process.returncode}; it said: "
            f"{said[-_SAID_BYTES:].decode(errors='replace').strip()}",
        )


def _key(
    spec: FactorySpec,
    seed: int,
    paths: dict[str, Path | None],
    public: tuple[Path, ...],
    recipe: Recipe | None,
) -> str:
    digest = hashlib.sha256(_GENERATION)
    digest.update(msgspec.json.encode(spec, order="deterministic"))
    digest.update(b"\0%d\0" % seed)
    for name, path in sorted(paths.items()):
        _mix(digest, name, path)
    for path in public:
        _mix(digest, "public", path)
    if recipe is not None:
        digest.update(msgspec.json.encode(msgspec.structs.replace(recipe, directory="")))
        for given in (*recipe.files.values(), *([recipe.wheels] if recipe.wheels else [])):
            _mix(digest, f"recipe {given}", recipe.local(given))
    return digest.hexdigest()[:_KEY_CHARACTERS]


def _mix(digest: Any, name: str, path: Path | None) -> None:
    """Take in a tree: names, kinds, permission bits and content; times say nothing."""
    digest.update(f"\0{name}\0".encode(errors="surrogateescape"))
    if path is None:
        return
    status = path.lstat()
    digest.update(b"%o\0" % status.st_mode)
    if stat_bits.S_ISLNK(status.st_mode):
        digest.update(os.fsencode(path.readlink()))
    elif stat_bits.S_ISDIR(status.st_mode):
        for inner in sorted(path.iterdir()):
            _mix(digest, inner.name, inner)
    elif stat_bits.S_ISREG(status.st_mode):
        digest.update(b"%d\0" % status.st_size)
        with path.open("rb") as file:
            while piece := file.read(_COPY_BYTES):
                digest.update(piece)
