"""Layers by recipe: packages, files and commands on a base, done in a sandbox of the platform.

A recipe is a TOML file, or the same in YAML (``.yaml``, ``.yml``)::

    base = "python@3.11"              # or a tag: "python:latest"
    kind = "toolkit"                  # or "workspace", which is the default
    toolkits = []                     # layers below, too, if the build needs them
    wheels = "wheels"                 # a local directory: pip installs from it, without network
    pip = ["requests==2.32.3"]
    apt = ["git"]
    commands = ["useradd -m agent"]   # by the base's /bin/sh, in order, after the packages
    network = {pypi = true}           # what the build may reach; nothing by default
    exclude = ["/usr/share/doc/**"]   # left out of the layer
    epoch = 0                         # what is new gets this time, so that equal builds are equal

    [files]                           # before the packages; a file or a directory of this machine
    "/etc/app.conf" = "app.conf"

    [env]
    PIP_INDEX_URL = "https://mirror.example/simple"

What the build changed over its layers becomes the layer. It is made by one node and is in that
node's store.
"""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dsec.layers import Progress
from dsec_common.errors import DsecError, ErrorCode, invalid, not_found
from dsec_common.wire.layer import LayerInfo, LayerKind

if TYPE_CHECKING:
    from dsec.client import DSecClient
    from dsec.sandbox import Sandbox

_WORK: Final = "/tmp/dsec-recipe"  # noqa: S108  inside the sandbox, which nobody else is in
_LEFT_OUT: Final = ("/tmp/**", "/run/**", "/root/.cache/**", "/var/cache/apt/**")  # noqa: S108  same
_CONTENT_MAX_BYTES: Final = 1 << 20


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a layer is made of; see the module. Local paths are below ``directory``."""

    base: str
    kind: LayerKind = LayerKind.WORKSPACE
    toolkits: tuple[str, ...] = ()
    wheels: str = ""
    pip: tuple[str, ...] = ()
    apt: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    network: str | dict[str, Any] | None = None
    exclude: tuple[str, ...] = ()
    epoch: int | None = 0
    files: dict[str, str] = {}
    env: dict[str, str] = {}
    memory_bytes: int = 2 << 30
    disk_bytes: int = 1 << 30
    timeout_s: float = 900.0
    directory: str = "."

    def local(self, path: str) -> Path:
        """Return a local path of the recipe.

        Raises:
            DsecError: ``not_found`` when nothing is there.
        """
        found = Path(self.directory, path)
        if not found.exists():
            raise not_found(f"the recipe names {path!r}, and there is nothing at {found}")
        return found

    def check(self) -> None:
        """Return if it can be built.

        Raises:
            DsecError: ``invalid``, naming what cannot be meant; ``not_found`` for local files.
        """
        if not self.base:
            raise invalid("the recipe has no base; name a layer, such as python@3.11")
        if self.kind not in {LayerKind.WORKSPACE, LayerKind.TOOLKIT}:
            raise invalid(f"a recipe makes a workspace or a toolkit, not a {self.kind.value}")
        if not (self.pip or self.apt or self.commands or self.files):
            raise invalid("the recipe does nothing; give files, pip, apt or commands")
        for package in (*self.pip, *self.apt):
            if not package or package.startswith("-"):
                raise invalid(f"{package!r} is not a package; options are not taken")
        for target in self.files:
            if not PurePosixPath(target).is_absolute():
                raise invalid(f"{target!r} in files is not an absolute path of the sandbox")
        needs_network = [] if self.wheels or not self.pip else ["pip without wheels"]
        needs_network += ["apt"] if self.apt else []
        without = self.network is None or self.network == "none"
        if needs_network and without:
            raise invalid(
                f"{' and '.join(needs_network)} needs the network; set network in the recipe, such "
                "as {pypi = true}, or give wheels"
            )
        for path in (*self.files.values(), *([self.wheels] if self.wheels else [])):
            self.local(path)


def read_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Return the recipe in a TOML or YAML file; local paths in it are below its directory.

    Raises:
        DsecError: ``not_found`` without the file, ``invalid`` for what is no recipe,
            ``unsupported`` for YAML without the package pyyaml.
    """
    source = Path(path)
    try:
        if source.stat().st_size > _CONTENT_MAX_BYTES:
            raise invalid(f"{source} is too large to be a recipe")
        text = source.read_text(encoding="utf-8")
        is_yaml = source.suffix in {".yaml", ".yml"}
        content = read_yaml(text, source, "a recipe") if is_yaml else tomllib.loads(text)
    except FileNotFoundError:
        raise not_found(f"there is no recipe at {source}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise invalid(f"{source} cannot be read as TOML: {error}") from None
    try:
        recipe = msgspec.convert(content | {"directory": str(source.parent)}, Recipe)
    except msgspec.ValidationError as error:
        raise invalid(f"{source} is not a recipe: {error}") from None
    recipe.check()
    return recipe


def read_yaml(text: str, source: Path, what: str) -> dict[str, Any]:
    """Return the mapping that YAML from ``source`` says, which is to be ``what``.

    Raises:
        DsecError: ``invalid``; ``unsupported`` without the package pyyaml.
    """
    try:
        import yaml  # noqa: PLC0415  only for recipes in YAML
    except ImportError:
        raise DsecError(
            ErrorCode.UNSUPPORTED,
            f"{source} is YAML, which needs the package pyyaml; install it, or write TOML",
        ) from None
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise invalid(f"{source} cannot be read as YAML: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise invalid(f"{source} is not {what}: it is no mapping of names")
    return content


def read_yaml_file(path: Path, what: str) -> dict[str, Any]:
    """Return the mapping that a YAML file says, which is to be ``what``.

    Raises:
        DsecError: as :func:`read_yaml`; ``invalid`` for a file that cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise invalid(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise invalid(f"{path} is no text: {error}") from None
    return read_yaml(text, path, what)


async def build_layer(
    client: DSecClient,
    recipe: Recipe,
    *,
    name: str,
    version: str,
    tags: Iterable[str] = (),
    replace: bool = False,
    progress: Progress | None = None,
) -> LayerInfo:
    """Build a recipe in a sandbox, which is gone afterwards, and return the layer.

    Args:
        client: connected.
        recipe: what to build.
        name: the layer's name.
        version: its version.
        tags: let ``name:tag`` mean this version from now on, for each of them.
        replace: let the reference point to other content than before.
        progress: told each step's name, how many are done and how many there are.

    Raises:
        CommandFailed: when a package or a command of the recipe fails; nothing is kept.
        DsecError: as ``create_sandbox`` and ``pack_diff``; ``unsupported`` when the node has no
            network for sandboxes and the recipe wants one.
    """
    recipe.check()
    tags = tuple(tags)
    steps = _Steps(progress, recipe)
    steps.begin("base")
    async with await client.create_sandbox(
        recipe.base,
        toolkits=recipe.toolkits,
        memory_bytes=max(recipe.memory_bytes, recipe.disk_bytes),
        disk_bytes=recipe.disk_bytes,
        env=recipe.env,
        network=recipe.network,
        labels={"dsec-recipe": name},
        timeout_s=60.0,
    ) as sandbox:
        await carry_out(sandbox, recipe, steps.begin)
        steps.begin("snapshot")
        snapshot = await sandbox.snapshot(name=f"recipe {name}@{version}")
        try:
            steps.begin("pack")
            layer = await snapshot.pack_diff(
                name,
                version,
                kind=recipe.kind,
                exclude=(*_LEFT_OUT, *recipe.exclude),
                clean=True,
                replace=replace,
            )
        finally:
            await snapshot.delete()
    for tag in tags:
        layer = await client.layers.tag(layer.reference, tag)
    steps.begin("done")
    return layer


class _Steps:
    def __init__(self, progress: Progress | None, recipe: Recipe) -> None:
        self._progress = progress
        self._begun = 0
        packages = bool(recipe.apt) + bool(recipe.pip)
        self._count = 4 + len(recipe.files) + packages + len(recipe.commands)

    def begin(self, name: str) -> None:
        if self._progress is not None:
            self._progress(name, self._begun, self._count)
        self._begun += 1


async def carry_out(
    sandbox: Sandbox, recipe: Recipe, begin: Callable[[str], None] = lambda _: None
) -> None:
    """Do in a sandbox what a recipe says; ``begin`` is told the name of each step.

    Raises:
        CommandFailed: when a package or a command of the recipe fails.
        DsecError: as uploads and commands do.
    """
    await sandbox.make_directory(_WORK, parents=True)
    await sandbox.write_file(f"{_WORK}/begun", b"")
    for target, source in recipe.files.items():
        begin(f"file {target}")
        parent = str(PurePosixPath(target).parent)
        await sandbox.make_directory(parent, parents=True)
        await sandbox.upload(recipe.local(source), target)
    if recipe.apt:
        begin("apt")
        await _run(sandbox, recipe, _apt(recipe.apt), {"DEBIAN_FRONTEND": "noninteractive"})
    if recipe.pip:
        begin("pip")
        if recipe.wheels:
            await sandbox.upload(recipe.local(recipe.wheels), f"{_WORK}/wheels")
        await _run(sandbox, recipe, _pip(recipe), {})
    for command in recipe.commands:
        begin(f"command {command[:60]}")
        await _run(sandbox, recipe, command, {})
    await sandbox.exec(_tidy(recipe.epoch), cwd="/", user="root", timeout_s=recipe.timeout_s)
    await _removed(sandbox)


async def _removed(sandbox: Sandbox) -> None:
    """Remove the build's directory, if the base has no program that did."""
    try:
        await sandbox.remove(_WORK, recursive=True)
    except DsecError as error:
        if error.code is not ErrorCode.NOT_FOUND:
            raise


async def _run(sandbox: Sandbox, recipe: Recipe, command: str, env: Mapping[str, str]) -> None:
    # Whatever the base's image says: packages are installed by root.
    await sandbox.exec(
        command, env=env, cwd="/", user="root", timeout_s=recipe.timeout_s, check=True
    )


def _apt(packages: Iterable[str]) -> str:
    return (
        "apt-get update -qq && apt-get install -y -qq --no-install-recommends -- "
        f"{shlex.join(packages)} && rm -rf /var/lib/apt/lists/*"
    )


def _pip(recipe: Recipe) -> str:
    """Return the line that installs; a base without pip may have its wheel among the others."""
    options = "--no-cache-dir --no-compile --disable-pip-version-check --root-user-action=ignore"
    wheels = f"{_WORK}/wheels"
    if recipe.wheels:
        options += f" --no-index --find-links {wheels}"
    install = f"install {options} -- {shlex.join(recipe.pip)}"
    return (
        "if python3 -c 'import pip' 2>/dev/null; then pip='-m pip'; "
        f"else for pip in {wheels}/pip-*.whl; do pip=$pip/pip; done; fi; "
        f"PYTHONDONTWRITEBYTECODE=1 python3 $pip {install}"
    )


def _tidy(epoch: int | None) -> str:
    """Return the line that gives what is new one time, and removes the build's directory.

    Not all bases can: then only the times differ from one build to the next.
    """
    remove = f"rm -rf {_WORK}"
    if epoch is None:
        return remove
    settle = (
        f"find / -xdev -newer {_WORK}/begun ! -path '{_WORK}*' ! -path '/proc/*' "
        f"! -path '/run/*' -exec touch -h -d @{epoch} {{}} +"
    )
    return f"{settle}; {remove}; touch -d @{epoch} /tmp /"
