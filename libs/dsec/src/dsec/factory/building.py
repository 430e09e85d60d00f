"""One environment: built in a sandbox, packed, looked through, proven, and only then published.

The order is the guarantee: ``<name>-<seed>@<key>`` exists in the layer store only when its layer
was looked through and proven. A build that is killed leaves a sandbox that ends by its time, a
snapshot, and a layer under a name that says that it is unchecked; the next build of the same run
removes them.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dsec.factory.checking import contents
from dsec.factory.credentials import FILES
from dsec.factory.errors import EnvironmentRefused, NotProven
from dsec.factory.evidence import Evidence, NoSecret, Secret, evidence_of, read_secrets
from dsec.factory.leaks import Finding, look_through
from dsec.factory.reading import content_at, download_within, read_layer
from dsec.factory.spec import Command, Item, Verify
from dsec.factory.views import Bounds
from dsec.recipes import carry_out
from dsec_common.errors import DsecError, ErrorCode, not_found
from dsec_common.wire.files import FileKind
from dsec_common.wire.layer import LayerInfo, LayerKind

if TYPE_CHECKING:
    from dsec.client import DSecClient
    from dsec.results import ExecResult
    from dsec.sandbox import Sandbox
    from dsec.snapshots import Snapshot

Hook = Callable[["Sandbox", Item], Awaitable[None]]
"""Works in the sandbox after the spec's commands, turn by turn, as an agent's loop does."""
Begin = Callable[[str], None]
"""Told the name of each step."""

RUN_LABEL: Final = "dsec-factory-run"
KEY_LABEL: Final = "dsec-factory-key"
_SCRIPT: Final = "/tmp/dsec-factory-script"  # noqa: S108  inside the sandbox
_MARGIN_S: Final = 300.0
_NO_PROGRAM: Final = frozenset({126, 127})

#: Left out of every environment, beside what ``pack_diff(clean=True)`` leaves out.
RESIDUE: Final = (
    *FILES,
    "**/*.pyc",
    "**/.viminfo",
    "**/.wget-hsts",
    "**/.local/share/Trash",
    "/root/.claude",
    "/root/.codex",
    "/root/.aider*",
    "/root/.config/opencode",
)
#: Of a repository that is kept: what leads to other commits, or runs.
_OF_REPOSITORIES: Final = (
    "**/.git/logs",
    "**/.git/hooks",
    "**/.git/ORIG_HEAD",
    "**/.git/FETCH_HEAD",
    "**/.git/refs/stash",
    "**/.git/refs/remotes",
)


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """What was made, or was there.

    Attributes:
        environment: the layer that an agent gets as its workspace.
        digest: of that layer.
        size_bytes: of that layer.
        tests: the layer, a toolkit, that tests it; empty without tests.
        solution: the layer, a toolkit, that solves it; empty without one.
        base: below it.
        toolkits: beside it.
        seed: which one of its spec.
        key: of all that it is made of.
        made: False when it was there.
    """

    environment: str
    digest: str
    size_bytes: int
    tests: str = ""
    solution: str = ""
    base: str
    toolkits: tuple[str, ...] = ()
    seed: int
    key: str
    made: bool = True


async def build_environment(
    client: DSecClient,
    item: Item,
    scratch: Path,
    *,
    run: str = "alone",
    hook: Hook | None = None,
    begin: Begin = lambda _: None,
) -> Environment:
    """Make one environment, or return the one that was made of the same before.

    Args:
        client: connected.
        item: what is made, of :func:`dsec.factory.spec.item_of`.
        scratch: a directory of this machine for its files while they are looked through.
        run: by which what a killed build left is known again; one build of an item at a time may
            have it.
        hook: called with the sandbox when the spec's commands have run.
        begin: told each step.

    Raises:
        EnvironmentRefused: something in it betrays the task or should not be there.
        NotProven: it is solved already, or its solution does not solve it.
        CommandFailed: a command of the building failed.
        DsecError: ``invalid`` for a hook that raised something else; as ``create_sandbox``,
            ``snapshot``, ``pack_diff`` and imports.
    """
    item = await pinned(client, item)
    building = _Building(client, item, scratch, run, begin)
    await building.sweep()
    if (standing := await _standing(client, f"{item.name}@{item.key}")) is not None:
        return await _made(client, item, standing, made=False)
    return await building.make(hook)


async def pinned(client: DSecClient, item: Item) -> Item:
    """Return an item whose key is of its layers' content, too.

    Raises:
        DsecError: ``not_found`` for a layer that no store has.
    """
    if item.pinned:
        return item
    layers = {reference: await client.layers.inspect(reference) for reference in item.references()}
    return item.pin(layers)


def _evidence(secrets: dict[str, Path], canaries: tuple[str, ...]) -> Evidence:
    found: list[Secret] = []
    for what, path in secrets.items():
        found += read_secrets(what, path)
    return evidence_of(found, canaries)


async def _standing(client: DSecClient, reference: str) -> LayerInfo | None:
    try:
        return await client.layers.inspect(reference)
    except DsecError as error:
        if error.code is not ErrorCode.NOT_FOUND:
            raise
        return None


async def _made(client: DSecClient, item: Item, layer: LayerInfo, *, made: bool) -> Environment:
    """Return what a published environment is; its tests and solution were published before it."""
    beside = {what: f"{item.name}-{what}@{item.key}" for what in item.beside}
    for reference in beside.values():
        if not made and await _standing(client, reference) is None:
            raise not_found(
                f"{layer.reference} is there and {reference} is not: somebody removed it; remove "
                "the environment, too, to have both made anew"
            )
    return Environment(
        environment=layer.reference,
        digest=layer.digest,
        size_bytes=layer.size_bytes,
        base=item.spec.base,
        toolkits=item.spec.toolkits,
        seed=item.seed,
        key=item.key,
        made=made,
        **beside,
    )


class _Building:
    """One environment in the making."""

    def __init__(
        self, client: DSecClient, item: Item, scratch: Path, run: str, begin: Begin
    ) -> None:
        self._client = client
        self._item = item
        self._spec = item.spec
        self._scratch = scratch
        self._tree = scratch / "layer"
        self._taken: set[str] = set()
        self._known: dict[str, bytes] = {}
        self._secrets = {
            what: path
            for what, path in (("solution", item.solution), ("tests", item.tests))
            if path is not None
        }
        self._begin = begin
        self._labels = {RUN_LABEL: run, KEY_LABEL: item.key}
        self._unchecked = f"unchecked-{run}-{item.key}"

    async def make(self, hook: Hook | None) -> Environment:
        # What can be refused before anything is built is.
        evidence = await self._less_known()
        snapshot = await self._build(hook)
        try:
            self._begin("pack")
            layer = await self._pack(snapshot, self._unchecked)
            try:
                if self._taken:
                    evidence = await self._less_written(layer)
                await self._look_through(layer, evidence)
                if self._spec.verify is not None:
                    await self._prove(self._spec.verify, layer)
                self._begin("publish")
                published = await self._pack(snapshot, self._item.key)
                if published.digest != layer.digest:
                    await self._client.layers.remove(published.reference)
                    raise DsecError(
                        ErrorCode.INTERNAL,
                        f"{published.reference} was packed twice and differs; it was removed",
                    )
            finally:
                await self._client.layers.remove(layer.reference)
        finally:
            await snapshot.delete()
        return await _made(self._client, self._item, published, made=True)

    async def sweep(self) -> None:
        """Remove what a build of this run and key left when it was killed."""
        for sandbox in await self._client.list_sandboxes(labels=self._labels):
            await self._client.sandbox(sandbox.sandbox_id).delete()
        for snapshot in await self._client.snapshots.list(labels=self._labels):
            await snapshot.delete()
        reference = f"{self._item.name}@{self._unchecked}"
        if await _standing(self._client, reference) is not None:
            await self._client.layers.remove(reference)

    async def _less_written(self, layer: LayerInfo) -> Evidence:
        """Return what to look for when who built the environment wrote its solution, too."""
        try:
            return await self._less_known(layer.reference)
        except NoSecret as error:
            secret = error.secret
            found = Finding(path=secret.path, kind=secret.what, reason=error.message)
            raise EnvironmentRefused(self._item.name, [found]) from None

    async def _less_known(self, workspace: str = "") -> Evidence:
        """Return what to look for, without what the author lays where the solution goes.

        Who wrote a solution in the sandbox is the author of what lies there: ``workspace`` has it.
        """
        evidence = await asyncio.to_thread(_evidence, self._secrets, self._spec.canaries)
        known = self._known
        async with await self._sandbox((), self._labels, workspace) as sandbox:
            for secret in evidence.secrets:
                if workspace and secret.what not in self._taken:
                    continue  # it is known from before
                path = secret.path
                here = self._item.files and self._item.files / path.lstrip("/")
                if here and here.is_file() and not here.is_symlink():
                    known[path] = await asyncio.to_thread(here.read_bytes)
                elif found := await content_at(sandbox, path, Bounds().file_bytes):
                    known[path] = found
        public = await asyncio.to_thread(contents, self._item.public)
        return evidence.without(known, public)

    # --- Building -----------------------------------------------------------------------------

    async def _sandbox(
        self, toolkits: tuple[str, ...], labels: dict[str, str], workspace: str = "", **more: Any
    ) -> Sandbox:
        named = {
            "ttl_s": self._ttl_s(),
            "memory_bytes": self._spec.build.memory_bytes,
            "disk_bytes": self._spec.build.disk_bytes,
        }
        return await self._client.create_sandbox(
            self._spec.base,
            workspace=workspace,
            toolkits=tuple(dict.fromkeys((*self._spec.toolkits, *toolkits))),
            labels=labels,
            warm="bypass",
            timeout_s=60.0,
            **(named | more),
        )

    def _ttl_s(self) -> float:
        """Return when a sandbox that nobody deletes ends: after all that it may have to do."""
        build, recipe = self._spec.build, self._item.recipe
        commands = (len(build.commands) + 2) * build.timeout_s  # with script and hook
        installs = 0.0 if recipe is None else (len(recipe.commands) + 3) * recipe.timeout_s
        proof = 0.0 if self._spec.verify is None else 2 * self._spec.verify.timeout_s
        return commands + installs + proof + _MARGIN_S

    async def _build(self, hook: Hook | None) -> Snapshot:
        item, build = self._item, self._spec.build
        recipe = item.recipe
        env = {"SEED": str(item.seed)} | (recipe.env if recipe else {}) | build.env
        network = build.network if build.network is not None else recipe and recipe.network
        self._begin("create")
        async with await self._sandbox(
            build.toolkits,
            self._labels,
            env=env,
            network=network,
        ) as sandbox:
            if recipe is not None:
                await carry_out(sandbox, recipe, self._begin)
            if item.files is not None:
                self._begin("files")
                await sandbox.upload(item.files, "/")
            if item.script is not None:
                self._begin("script")
                await sandbox.upload(item.script, _SCRIPT)
                await self._command(sandbox, ("/bin/sh", _SCRIPT))
                await sandbox.remove(_SCRIPT)
            for command in build.commands:
                self._begin(f"command {command if isinstance(command, str) else command[0]}"[:60])
                await self._command(sandbox, command)
            if hook is not None:
                self._begin("agent")
                await self._interactive(hook, sandbox)
            await self._take_out(sandbox)
            self._begin("snapshot")
            return await sandbox.snapshot(f"factory {item.name}@{item.key}", labels=self._labels)

    async def _take_out(self, sandbox: Sandbox) -> None:
        """Have here what the building left as solution and tests, and no longer there."""
        build = self._spec.build
        for what, path in (("solution", build.solution), ("tests", build.tests)):
            if path is None:
                continue
            self._begin(f"take out {what}")
            here = self._scratch / "taken" / what
            await asyncio.to_thread(shutil.rmtree, here, ignore_errors=True)
            found = await sandbox.stat(path)
            if found.kind is not FileKind.DIRECTORY:
                raise not_found(f"the building left a {found.kind} at {path}, and no directory")
            await download_within(sandbox, path, here)
            await sandbox.remove(path, recursive=True)
            self._secrets[what] = here
            self._taken.add(what)

    async def _interactive(self, hook: Hook, sandbox: Sandbox) -> None:
        timeout_s = self._spec.build.timeout_s
        try:
            async with asyncio.timeout(timeout_s) as limit:
                await hook(sandbox, self._item)
        except DsecError:
            raise
        except Exception as error:  # somebody else's program, and others have their seeds
            if isinstance(error, TimeoutError) and limit.expired():
                raise DsecError(
                    ErrorCode.COMMAND_TIMEOUT,
                    f"the hook was not done after {timeout_s:g} s; see build.timeout_s",
                ) from None
            what = f"{type(error).__name__}: {error}"
            raise DsecError(ErrorCode.INVALID, f"the hook failed: {what}") from error

    async def _command(self, sandbox: Sandbox, command: Command) -> None:
        build = self._spec.build
        await sandbox.exec(
            command, cwd=build.cwd, user=build.user, timeout_s=build.timeout_s, check=True
        )

    async def _pack(self, snapshot: Snapshot, version: str) -> LayerInfo:
        return await snapshot.pack_diff(
            self._item.name,
            version,
            kind=LayerKind.WORKSPACE,
            exclude=(*self._left_out(), *self._spec.exclude),
            clean=True,
        )

    def _left_out(self) -> tuple[str, ...]:
        git = ("**/.git",) if self._spec.git == "drop" else _OF_REPOSITORIES
        return (*RESIDUE, *git)

    # --- Looking through ----------------------------------------------------------------------

    async def _look_through(self, layer: LayerInfo, evidence: Evidence) -> None:
        self._begin("check")
        await asyncio.to_thread(shutil.rmtree, self._tree, ignore_errors=True)
        try:
            await read_layer(self._client, layer, self._tree)
            findings = await asyncio.to_thread(
                look_through,
                self._tree,
                evidence,
                residue=self._left_out(),
                allow=self._spec.allow,
            )
        finally:
            await asyncio.to_thread(shutil.rmtree, self._tree, ignore_errors=True)
        if findings:
            raise EnvironmentRefused(f"{self._item.name} (seed {self._item.seed})", findings)

    # --- Proving ------------------------------------------------------------------------------

    async def _prove(self, verify: Verify, layer: LayerInfo) -> None:
        """Run the tests without the solution and with it, in sandboxes that no agent sees."""
        tests = await self._publish("tests")
        solution = await self._publish("solution")
        toolkits = (*verify.toolkits, *tests)
        self._begin("unsolved")
        async with self._trial(verify, layer, toolkits) as sandbox:
            result = await self._trial_command(sandbox, verify, verify.command)
        codes = verify.unsolved_exit
        if result.ok:
            raise self._unproven("its tests pass without the solution", result)
        failed = (
            result.exit_code in codes
            if codes
            else result.exit_code is not None and result.exit_code not in _NO_PROGRAM
        )
        if result.timed_out or not failed:
            raise self._unproven(f"without the solution its tests {_how(result)}", result)
        self._begin("solved")
        async with self._trial(verify, layer, (*toolkits, *solution)) as sandbox:
            if verify.apply:
                applied = await self._trial_command(sandbox, verify, verify.apply)
                if not applied.ok:
                    raise self._unproven(f"verify.apply {_how(applied)}", applied)
            result = await self._trial_command(sandbox, verify, verify.command)
        if not result.ok:
            raise self._unproven(f"with the solution its tests {_how(result)}", result)

    @asynccontextmanager
    async def _trial(
        self, verify: Verify, layer: LayerInfo, toolkits: tuple[str, ...]
    ) -> AsyncIterator[Sandbox]:
        async with await self._sandbox(
            toolkits, self._labels, workspace=layer.reference, env=verify.env
        ) as sandbox:
            yield sandbox

    async def _trial_command(
        self, sandbox: Sandbox, verify: Verify, command: Command
    ) -> ExecResult:
        return await sandbox.exec(
            command,
            env={"SEED": str(self._item.seed)},
            cwd=verify.cwd,
            user=verify.user,
            timeout_s=verify.timeout_s,
        )

    async def _publish(self, what: str) -> tuple[str, ...]:
        """Make a toolkit of a directory; again when a build was killed before it was of use."""
        path = self._secrets.get(what)
        if path is None:
            return ()
        self._begin(what)
        layer = await self._client.layers.import_directory(
            path,
            kind=LayerKind.TOOLKIT,
            name=f"{self._item.name}-{what}",
            version=self._item.key,
            replace=True,
        )
        return (layer.reference,)

    def _unproven(self, what: str, result: ExecResult) -> NotProven:
        return NotProven(f"{self._item.name} (seed {self._item.seed})", what, result)


def _how(result: ExecResult) -> str:
    if result.timed_out:
        return f"did not end within {result.duration_s:.0f} s"
    if result.exit_code is None:
        return f"were ended by signal {result.signal}"
    return f"end with {result.exit_code}"
