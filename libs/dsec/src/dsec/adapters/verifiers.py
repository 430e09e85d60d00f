"""Sandboxes as an environment of verifiers: its own tasks, agents and traces, a sandbox for each.

Needs the extra ``dsec[verifiers]``. A module with a taskset exports :class:`DsecEnv` and
:class:`ShellHarness` beside it; the module's name is then all that ``vf-eval`` needs, and
``vf-gepa`` or prime-rl::

    __all__ = ["CountLines", "DsecEnv", "ShellHarness"]
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, ClassVar, Final

import openai
import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import DockerRuntimeInfo

from dsec.adapters.episodes import ShellTask, Verifier
from dsec.client import DSecClient
from dsec.results import ExecResult
from dsec.sandbox import Sandbox
from dsec_common.errors import DsecError, ErrorCode, invalid

#: A sandbox of which nobody knows any more is ended by its node after so long.
_TTL_S: Final = 3600.0
_WORK: Final = "/work"
_OUTPUT_BYTES_MAX: Final = 64 << 20
_GIB: Final = 1 << 30
_TOOL: Final = "shell"
_SHELL: Final[Any] = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": "Run a command line in the sandbox and return what it printed.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


class DsecRuntime(vf.Runtime):
    """A sandbox as a runtime of verifiers; relative paths are in the task's working directory.

    Traces name it as the container that it is: ``type`` is ``docker``, ``image`` the base layer and
    ``id`` the sandbox's, for what runtimes there are is fixed there. What the platform fails with
    is a ``SandboxError``.

    Args:
        client: connected, on the loop that this is used on.
        data: the task's; see :func:`sandbox_arguments`.
        create: what goes before what the task asks for.
        cause: the code of the error that the agent's own doing ended the sandbox with (``oom``).
    """

    supports_user: ClassVar[bool] = True

    def __init__(self, client: DSecClient, data: vf.TaskData, create: Mapping[str, Any]) -> None:
        super().__init__()
        self._client = client
        self._create = sandbox_arguments(data, create)
        self.sandbox: Sandbox | None = None
        self.cause = ""
        self.config = vf.DockerConfig(
            image=self._create.get("base", ""),
            workdir=data.workdir or _WORK,
            cpu=data.resources.cpu,
            memory=data.resources.memory,
            disk=data.resources.disk,
            allow=["*"] if self._create.get("network") not in {None, "none"} else [],
        )
        self.info = DockerRuntimeInfo(**self.config.model_dump())

    async def start(self) -> None:
        """Make the sandbox and its working directory."""
        with _told("a sandbox cannot be made"):
            self.sandbox = await self._client.create_sandbox(**self._create)
            self.info.id = self.sandbox.id
            await self.sandbox.make_directory(self.config.workdir)

    async def teardown(self) -> None:
        """Delete the sandbox, if there is one."""
        if self.sandbox is not None:
            await self.sandbox.delete()

    async def run(self, argv: list[str], env: dict[str, str]) -> vf.ProgramResult:
        """Run a command until it ends by itself; a caller that is cancelled has its tree ended.

        Raises:
            SandboxError: the platform's; also for more output than 64 MiB a stream.
        """
        with _told(f"{argv[0]} cannot be run"):
            try:
                async with await self._there().start(
                    argv, env=self.process_env(env), cwd=self.config.workdir, user=self.user or ""
                ) as process:
                    result = await process.output(output_limit_bytes=_OUTPUT_BYTES_MAX)
            except DsecError as error:
                if error.code is not ErrorCode.NOT_FOUND:
                    raise
                return vf.ProgramResult(127, "", error.message)
        if result.stdout_truncated or result.stderr_truncated:
            raise vf.SandboxError(f"{argv[0]} printed more than {_OUTPUT_BYTES_MAX} bytes")
        code = 128 + (result.signal or 0) if result.exit_code is None else result.exit_code
        return vf.ProgramResult(code, result.stdout_text, result.stderr_text)

    async def shell(
        self, command: str, *, env: Mapping[str, str], timeout_s: float
    ) -> ExecResult | str:
        """Run an agent's command line; a text says why nothing ran.

        Raises:
            DsecError: the platform's; ``oom`` when the agent's doing ended the sandbox.
        """
        try:
            command.encode()
            return await self._there().exec(
                command,
                env=self.process_env(dict(env)),
                cwd=self.config.workdir,
                user=self.user or "",
                timeout_s=timeout_s,
            )
        except UnicodeEncodeError as error:
            return str(error)
        except DsecError as error:
            # A model may write anything: what cannot be run is a command that did nothing.
            if error.code is not ErrorCode.INVALID:
                raise
            return error.message

    async def verified(self, verifier: Verifier) -> float:
        """Return what the sandbox's files are worth, judged where the agent never was.

        It is 0 when the agent's own doing ended the sandbox.

        Raises:
            SandboxError: the platform's, when there is no verdict; it is never a reward.
        """
        if self.cause:
            return 0.0
        with _told("nothing was verified"):
            task = ShellTask(self._create, verifier)
            return (await verifier.judge(self._client, task, self._there())).reward

    async def write(self, path: str, data: bytes) -> None:
        """Write a file whole; missing directories are made."""
        with _told(f"{path} cannot be written"):
            await self._there().write_file(self._whole(path), data, user=self.user or "root")

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        sandbox, user = self._there(), self.user or "root"
        with _told(f"{path} cannot be read"):
            whole = self._whole(path)
            if (
                max_bytes is not None
                and (await sandbox.stat(whole, user=user)).size_bytes >= max_bytes
            ):
                raise vf.SandboxError(f"{path} has more than {max_bytes - 1} bytes")
            return (await sandbox.read_file(whole, user=user))[:max_bytes]

    def _whole(self, path: str) -> str:
        return posixpath.join(self.config.workdir, path)

    def _there(self) -> Sandbox:
        if self.sandbox is None:
            raise vf.SandboxError("the sandbox has not been started")
        return self.sandbox


class DsecEnvConfig(vf.EnvConfig):
    """What there is beside verifiers' own: ``create``, as ``create_sandbox`` takes it."""

    # Local, so that no tunnel is opened; every run is placed into a sandbox.
    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.DockerConfig())
    create: dict[str, Any] = Field(default_factory=dict)


class DsecEnv(vf.Env[DsecEnvConfig]):
    """One agent, and a new sandbox for each episode, which is deleted at its end.

    The platform is found as by every client (``DSEC_NATS_SERVERS``, …). An environment with
    several agents inherits from it, and places each run with :meth:`placed`.
    """

    _client: DSecClient | None = None

    async def start(self) -> None:
        """Connect."""
        self._client = await DSecClient().connect()

    async def stop(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Run the agent on the task in a new sandbox."""
        async with self.placed(task) as runtime:
            await agents.agent.run(task, runtime=runtime)

    @asynccontextmanager
    async def placed(self, task: vf.Task) -> AsyncIterator[DsecRuntime]:
        """Yield a new sandbox for a task, for ``agent.run(task, runtime=…)``.

        Raises:
            DsecError: ``conflict`` outside of ``serving()``.
            SandboxError: the platform's.
        """
        if self._client is None:
            raise DsecError(ErrorCode.CONFLICT, "no connection: run episodes within serving()")
        runtime = DsecRuntime(self._client, task.data, self.config.create)
        try:
            await runtime.start()
            yield runtime
        finally:
            await runtime.stop()


class ShellHarnessConfig(vf.HarnessConfig):
    """What an agent with a shell is bounded by.

    Attributes:
        command_timeout_s: of each command, whose tree is ended then.
        output_max: characters of each stream that the model is told, from its end.
    """

    command_timeout_s: float = Field(30.0, gt=0)
    output_max: int = Field(16_384, gt=0)


class ShellHarness(vf.Harness[ShellHarnessConfig]):
    """The model with one tool, a shell in the sandbox, until it answers without calling it.

    The loop is here and only commands are in the sandbox, which so needs neither a network nor an
    installed program. Every call goes through verifiers, which records it.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True

    async def launch(  # noqa: PLR0917  as verifiers has it
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],  # noqa: ARG002  what needs any is refused for this harness
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Go on until the model has answered; one whose sandbox ran out of memory is done, too."""
        if not isinstance(runtime, DsecRuntime):
            raise invalid(f"it needs a DSec sandbox and not a {type(runtime).__name__}")
        said = self._opening(data)
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None) as model:
            while True:
                answer = await model.chat.completions.create(
                    model=ctx.model, messages=said, tools=[_SHELL]
                )
                message = answer.choices[0].message
                said.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return vf.ProgramResult(0, message.content or "", "")
                try:
                    for call in message.tool_calls:
                        told = await self._told(runtime, call)
                        said.append({"role": "tool", "tool_call_id": call.id, "content": told})
                except DsecError as error:
                    if error.code is not ErrorCode.OOM:
                        raise vf.SandboxError(f"{error.code.value}: {error.message}") from error
                    trace.info["cause"] = runtime.cause = error.code.value
                    return vf.ProgramResult(0, "", error.message)

    def _opening(self, data: vf.TaskData) -> list[Any]:
        system, prompt = self.resolve_prompt(data)
        messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        said = [message_to_wire(message) for message in messages]
        return [{"role": "system", "content": system}, *said] if system else said

    async def _told(self, runtime: DsecRuntime, call: Any) -> str:
        command = _command_of(call)
        if command is None:
            return f'there is one tool, {_TOOL}, called with {{"command": "…"}}'
        result = await runtime.shell(
            command, env=self.config.resolved_env, timeout_s=self.config.command_timeout_s
        )
        return result if isinstance(result, str) else _observed(result, self.config.output_max)


def sandbox_arguments(data: vf.TaskData, create: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``create_sandbox`` is called with.

    A task's ``image`` is the base layer, its ``resources`` the limits (GB are GiB), and an empty
    ``network_allow`` leaves no network. ``create`` goes before all but that.

    Raises:
        DsecError: ``unsupported`` for a GPU, or rules of a network, that a task asks for: they are
            the environment's to give.
    """
    resources = data.resources
    if resources.gpu is not None:
        raise DsecError(ErrorCode.UNSUPPORTED, "give a GPU in `create`, not in a task's resources")
    asked: dict[str, Any] = {"ttl_s": _TTL_S}
    if data.image is not None:
        asked["base"] = data.image
    if resources.cpu is not None:
        asked["cpus"] = resources.cpu
    if resources.memory is not None:
        asked["memory_bytes"] = int(resources.memory * _GIB)
    if resources.disk is not None:
        asked["disk_bytes"] = int(resources.disk * _GIB)
    asked |= create
    if not data.network_allow or "*" in data.network_block:
        asked["network"] = None
    elif "*" not in data.network_allow or data.network_block:
        raise DsecError(
            ErrorCode.UNSUPPORTED, "give rules of a network in `create`, not in a task's lists"
        )
    return asked


def _command_of(call: Any) -> str | None:
    if call.type != "function" or call.function.name != _TOOL:
        return None
    try:
        command = json.loads(call.function.arguments)["command"]
    except (ValueError, TypeError, LookupError):
        return None
    return command if isinstance(command, str) else None


def _observed(result: ExecResult, output_max: int) -> str:
    told = [it[-output_max:] for it in (result.stdout_text, result.stderr_text) if it]
    if result.timed_out:
        told.append(f"[ended after {result.duration_s:.0f} s]")
    elif result.exit_code is None:
        told.append(f"[ended by signal {result.signal}]")
    elif result.exit_code:
        told.append(f"[exit code {result.exit_code}]")
    return "\n".join(told) or "[no output]"


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Tell verifiers of the platform's errors in its own words."""
    try:
        yield
    except DsecError as error:
        raise vf.SandboxError(f"{what}: {error.code.value}: {error.message}") from error
