"""DSec sandboxes for Inspect AI: ``inspect eval task.py --sandbox dsec``.

Inspect finds this module by the entry point ``inspect_ai``; the extra ``dsec[inspect]`` brings
Inspect itself. Each sample gets a sandbox of its own, deleted at the sample's end. What is in it
says ``dsec.yaml`` beside the task (or ``--sandbox dsec:FILE``), with the fields of
:class:`SandboxConfig`; without a file, ``DSEC_INSPECT_BASE`` names the base layer, or the project
has exactly one.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, overload
from weakref import WeakKeyDictionary

import yaml
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dsec.client import DSecClient
from dsec.inspect_commands import Outcome, run
from dsec.sandbox import Sandbox
from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.wire.layer import LayerKind
from dsec_common.wire.sandbox import CpuClass, Limits

#: Marks the sandboxes that Inspect asked for, so that ``inspect sandbox cleanup dsec`` finds them.
LABEL: Final = "inspect-task"
_BASE_VARIABLE: Final = "DSEC_INSPECT_BASE"
_CONFIG_FILE: Final = "dsec.yaml"
_GONE: Final = frozenset({ErrorCode.EXPIRED, ErrorCode.OOM, ErrorCode.UNAVAILABLE})


class SandboxConfig(BaseModel):
    """What a sample's sandbox is made of. An unknown field is refused.

    Attributes:
        base: base layer, ``name@version`` or ``sha256:…``; empty as the module says.
        workspace: the layer over it.
        toolkits: the layers on top, lowest first.
        snapshot: begin with a snapshot's files and layers instead of a base.
        user: who runs commands and owns files when Inspect names nobody.
        working_directory: where relative paths lead; made when it is missing.
        env: variables of every command.
        cpus: processors' worth of CPU time, as a share.
        cpu_quota: whether ``cpus`` is a ceiling as well.
        cpu_class: ``latency_sensitive`` or ``best_effort``.
        memory_bytes: memory, the writable layer included.
        disk_bytes: size of the writable layer.
        inodes: files and directories in it.
        pids: processes and threads.
        network: ``none``, ``open``, or a policy as :meth:`DSecClient.create_sandbox` takes it;
            without one, as the node's default is.
        ttl_s: the node ends the sandbox after so long, whatever became of Inspect.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    base: str = ""
    workspace: str = ""
    toolkits: tuple[str, ...] = ()
    snapshot: str = ""
    user: str = "root"
    working_directory: str = Field(default="/work", pattern="^/")
    env: dict[str, str] = Field(default_factory=dict)
    cpus: float = 1.0
    cpu_quota: bool = False
    cpu_class: CpuClass = CpuClass.LATENCY_SENSITIVE
    memory_bytes: int = 1 << 30
    disk_bytes: int = 512 << 20
    inodes: int = Limits().inodes
    pids: int = 512
    network: str | dict[str, Any] | None = None
    ttl_s: float = 86_400.0


@sandboxenv(name="dsec")
class DSecSandboxEnvironment(SandboxEnvironment):
    """One sample's sandbox, as Inspect sees it."""

    def __init__(self, sandbox: Sandbox, config: SandboxConfig) -> None:
        super().__init__()
        self.sandbox = sandbox
        self.config = config

    # --- Life ---------------------------------------------------------------------------------

    @classmethod
    def config_files(cls) -> list[str]:
        """Return the file beside a task that Inspect takes as its configuration."""
        return [_CONFIG_FILE]

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """Return the configuration that a task or a log holds as a mapping."""
        return SandboxConfig.model_validate(config)

    @classmethod
    async def sample_init(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        metadata: dict[str, str],
    ) -> dict[str, SandboxEnvironment]:
        """Create the sample's sandbox.

        Raises:
            DsecError: as :meth:`DSecClient.create_sandbox`; ``invalid`` for a wrong configuration.
        """
        del metadata
        wanted = _read(config)
        client = await _client()
        sandbox = await client.create_sandbox(
            wanted.base or ("" if wanted.snapshot else await _default_base(client)),
            workspace=wanted.workspace,
            toolkits=wanted.toolkits,
            snapshot=wanted.snapshot,
            limits=Limits(
                cpus=wanted.cpus,
                cpu_quota=wanted.cpu_quota,
                cpu_class=wanted.cpu_class,
                memory_bytes=wanted.memory_bytes,
                disk_bytes=wanted.disk_bytes,
                inodes=wanted.inodes,
                pids=wanted.pids,
            ),
            network=wanted.network,
            env=wanted.env,
            labels={LABEL: task_name[:256] or "task"},
            ttl_s=wanted.ttl_s,
        )
        try:
            # Made by root; whoever the sample runs as may write there.
            await sandbox.make_directory(
                wanted.working_directory, mode=0o755 if wanted.user == "root" else 0o777
            )
        except BaseException:
            await sandbox.delete()
            raise
        return {"default": cls(sandbox, wanted)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """Delete the sample's sandboxes, also after an interruption."""
        del task_name, config, interrupted
        for environment in environments.values():
            await environment.as_type(cls).sandbox.delete()

    @classmethod
    async def task_cleanup(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, cleanup: bool
    ) -> None:
        """Let go of the connection."""
        del task_name, config, cleanup
        client = _clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await (await client).close()

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:  # noqa: A002  Inspect's name for it
        """Delete one sandbox, or all that Inspect left in the project."""
        async with DSecClient() as client:
            if id is not None:
                await client.sandbox(id).delete()
                return
            for info in await client.list_sandboxes():
                if LABEL in info.labels:
                    await client.sandbox(info.sandbox_id).delete()

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """Return the command that opens a shell in the sandbox."""
        return SandboxConnection(
            type="dsec",
            command=f"dsec sandbox shell {self.sandbox.id} --user {user or self.config.user}",
            container=self.sandbox.id,
        )

    # --- Commands -----------------------------------------------------------------------------

    async def exec(  # noqa: PLR0917  Inspect calls it so
        self,
        cmd: list[str],
        input: str | bytes | None = None,  # noqa: A002  Inspect's name for it
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,  # noqa: ASYNC109  Inspect's name for it
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a command. It is never run a second time, whatever ``timeout_retry`` says.

        Raises:
            TimeoutError: it ran longer than ``timeout`` and was ended with all its children.
            PermissionError: the program may not be run.
            OutputLimitExceededError: a stream was longer than Inspect's limit.
            SandboxUserUnsupportedError: the sandbox does not know the user.
            SandboxUnavailableError: the sandbox is over.
        """
        del timeout_retry, concurrency
        try:
            outcome = await run(
                self.sandbox,
                cmd,
                stdin=input.encode() if isinstance(input, str) else input,
                cwd=self._path(cwd or ""),
                env=env or {},
                user=user or self.config.user,
                timeout_s=float(timeout or 0),
                output_limit_bytes=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE,
            )
        except DsecError as error:
            return _not_run(error, cmd, user or self.config.user)
        return _result(outcome, cmd, timeout)

    # --- Files --------------------------------------------------------------------------------

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file, and the directories above it.

        Raises:
            PermissionError: the user may not write there, or not change that file.
            IsADirectoryError: the path is a directory.
        """
        path, user = self._path(file), self.config.user
        try:
            await self._refuse_read_only(path, user)
            await self.sandbox.write_file(path, contents, user=user)
        except DsecError as error:
            _raise_file_error(error, file)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Return a file's content.

        Raises:
            FileNotFoundError: there is none.
            PermissionError: the user may not read it.
            IsADirectoryError: the path is a directory.
            OutputLimitExceededError: it is larger than Inspect's limit.
            UnicodeDecodeError: it is no UTF-8 and ``text`` was asked for.
        """
        path, user = self._path(file), self.config.user
        limit_bytes = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        try:
            found = await self.sandbox.stat(path, user=user)
            if found.size_bytes > limit_bytes:
                raise OutputLimitExceededError(
                    SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None
                )
            data = await self.sandbox.read_file(path, user=user)
        except DsecError as error:
            _raise_file_error(error, file)
        if len(data) > limit_bytes:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return data.decode() if text else data

    def default_polling_interval(self) -> float:
        """Return the seconds between two looks at a service of the sandbox."""
        return 0.2

    def _path(self, path: str) -> str:
        return posixpath.join(self.config.working_directory, path)

    async def _refuse_read_only(self, path: str, user: str) -> None:
        """Refuse to replace a file that its user may not write into.

        A new file takes the old one's place by a rename, for which the directory's permissions
        count; Inspect expects those of the file.
        """
        if user == "root":
            return
        try:
            found = await self.sandbox.stat(path, user=user)
        except DsecError:
            return  # there is none: the write says what else is wrong
        if found.kind == "file" and not found.mode & 0o222:
            raise DsecError(ErrorCode.DENIED, f"{path!r} is read-only")


_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[DSecClient]] = (
    WeakKeyDictionary()
)


async def _client() -> DSecClient:
    """Return the connection of this event loop; the first to ask makes it."""
    loop = asyncio.get_running_loop()
    connecting = _clients.get(loop)
    if connecting is None or (connecting.done() and connecting.exception() is not None):
        connecting = _clients[loop] = asyncio.ensure_future(DSecClient().connect())
    return await asyncio.shield(connecting)


def _read(config: SandboxEnvironmentConfigType | None) -> SandboxConfig:
    if config is None:
        return SandboxConfig()
    if isinstance(config, SandboxConfig):
        return config
    if not isinstance(config, str):
        raise invalid(f"a dsec sandbox is configured by dsec.yaml, not by {type(config).__name__}")
    try:
        return SandboxConfig.model_validate(yaml.safe_load(Path(config).read_text()) or {})
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise invalid(f"{config} is no sandbox configuration: {error}") from error


async def _default_base(client: DSecClient) -> str:
    if named := os.environ.get(_BASE_VARIABLE):
        return named
    bases = [layer for layer in await client.layers.list() if layer.kind is LayerKind.BASE]
    if len({layer.digest for layer in bases}) == 1:
        return bases[0].reference
    known = ", ".join(sorted(layer.reference for layer in bases)) or "none"
    raise invalid(
        f"no base layer is named: set `base` in {_CONFIG_FILE} beside the task, or "
        f"{_BASE_VARIABLE} (base layers of this project: {known})"
    )


def _result(outcome: Outcome, cmd: list[str], timeout: int | None) -> ExecResult[str]:
    stdout = outcome.stdout.decode("utf-8", errors="replace")
    stderr = outcome.stderr.decode("utf-8", errors="replace")
    if outcome.timed_out:
        raise TimeoutError(f"{cmd[0]!r} did not end within {timeout} s")
    if outcome.truncated:
        raise OutputLimitExceededError(
            SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, stdout + stderr
        )
    code = outcome.exit_code if outcome.exit_code is not None else 128 + (outcome.signal or 0)
    return ExecResult(success=code == 0, returncode=code, stdout=stdout, stderr=stderr)


def _not_run(error: DsecError, cmd: list[str], user: str) -> ExecResult[str]:
    """Return the result of a command that could not start, or raise what Inspect wants raised."""
    what = error.details.get("what")
    if what == "user":
        raise SandboxUserUnsupportedError(f"the sandbox has no user {user!r}") from error
    if error.code in _GONE or what == "sandbox":
        raise SandboxUnavailableError(str(error)) from error
    if error.code is ErrorCode.DENIED:
        raise PermissionError(error.message) from error
    if error.code is ErrorCode.NOT_FOUND and what == "command":
        return ExecResult(
            success=False, returncode=127, stdout="", stderr=f"{cmd[0]}: command not found\n"
        )
    if error.code is ErrorCode.NOT_FOUND:
        return ExecResult(success=False, returncode=126, stdout="", stderr=f"{error.message}\n")
    raise error


def _raise_file_error(error: DsecError, file: str) -> NoReturn:
    if error.details.get("reason") == "is_directory":
        raise IsADirectoryError(f"{file} is a directory") from error
    if error.code is ErrorCode.NOT_FOUND:
        raise FileNotFoundError(f"{file}: {error.message}") from error
    if error.code is ErrorCode.DENIED:
        raise PermissionError(f"{file}: {error.message}") from error
    if error.code in _GONE:
        raise SandboxUnavailableError(str(error)) from error
    raise error
