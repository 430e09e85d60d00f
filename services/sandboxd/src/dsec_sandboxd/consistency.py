"""Keeps instances of agents consistent with what they depend on, as schedulers say.

An instance that is behind stands still: no request wakes it, its agent's own command brings its
state up to its dependencies while nothing else runs in it, and then it goes on. One whose command
fails stays as it is; nobody tries again before a dependency is newer still, or somebody asks.

What is known of an instance is kept before anything is done about it, so a daemon that dies on the
way goes on with it. A command may therefore run twice, and never beside the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Final

import msgspec
import structlog

from dsec_common.bus_types import Request
from dsec_common.compute.consistency import required_version_ms
from dsec_common.consistency import keep_consistent
from dsec_common.errors import DsecError, ErrorCode, invalid, unavailable
from dsec_common.fair_places import FairPlaces
from dsec_common.subjects import validate_local
from dsec_common.wire.consistency import InstanceState, InstanceSynchronised, SynchroniseInstance
from dsec_common.wire.sandbox import InspectSandbox, SandboxInfo, SandboxState
from dsec_sandboxd.events import PauseAsked, ResumeAsked
from dsec_sandboxd.kernel.interface import CommandResult, CommandSpec
from dsec_sandboxd.lifecycle import Sandboxes
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.state_database import StateDatabase

_log: Final = structlog.get_logger(__name__)

_PREFIX: Final = b"state|"
#: Instances that are synchronised at once on one node.
_AT_ONCE: Final = 8
#: So long what nobody waits for rests after it could not be done.
_AGAIN_S: Final = 3.0
_OUTPUT_MAX_BYTES: Final = 64 * 1024
_STDERR_CHARACTERS: Final = 300
_ON_THE_WAY: Final = frozenset({SandboxState.PAUSING, SandboxState.RESUMING})

Inspect = Callable[[Request[InspectSandbox]], Awaitable[SandboxInfo]]


class KeptState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a node keeps of an instance that has been behind.

    Attributes:
        version_ms: how new its state is.
        asked: what it was last to be synchronised with.
        reason: why it stands still; empty when it does not for this.
        error: why it could not be synchronised with what was asked.
        stays_paused: it stood still before, or its owner wants it to, and is not to go on.
    """

    version_ms: int
    asked: SynchroniseInstance
    reason: str = ""
    error: str = ""
    stays_paused: bool = False

    @property
    def required_ms(self) -> int:
        """The version that was asked for."""
        return required_version_ms(self.asked.versions, self.asked.clock_tolerance_ms)


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(KeptState)


class Consistency:
    """The states of this node's instances."""

    def __init__(
        self,
        sandboxes: Sandboxes,
        database: StateDatabase,
        is_paused: Callable[[SandboxRecord], bool],
    ) -> None:
        """Take the parts; ``is_paused`` says whether its policy has an instance stand still."""
        self.sandboxes = sandboxes
        self.is_paused = is_paused
        self._database = database
        self._kept: dict[str, KeptState] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._places = FairPlaces(_AT_ONCE)
        self._put_back: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # --- What is kept -------------------------------------------------------------------------

    def load(self) -> None:
        """Read what an earlier daemon kept."""
        for key, value in self._database.items(_PREFIX):
            if not key.startswith(_PREFIX):
                break
            try:
                self._kept[key.removeprefix(_PREFIX).decode()] = _decoder.decode(value)
            except ValueError as error:
                _log.error("state_unreadable", key=repr(key), error=str(error))

    def recovered(self, adopted: Iterable[SandboxRecord]) -> None:
        """Finish what an earlier daemon began; forget instances that are over."""
        living = {record.local: record for record in adopted}
        for local, kept in list(self._kept.items()):
            if local not in living:
                self._forget(local)
            elif not kept.error and (kept.reason or kept.version_ms < kept.required_ms):
                self._start(self._again(living[local]))

    def kept(self, local: str) -> KeptState | None:
        """Return what is known of an instance; None for one that has never been behind."""
        return self._kept.get(local)

    def keep(self, record: SandboxRecord, kept: KeptState) -> None:
        """Keep what is known of an instance.

        Raises:
            DsecError: ``unavailable`` when the StateDB refuses; ``expired`` when it is over.
        """
        self.sandboxes.state.running(record.project, record.local)
        try:
            self._database[_PREFIX + record.local.encode()] = _encoder.encode(kept)
        except Exception as error:  # rocksdict raises plain Exception
            raise unavailable(f"the StateDB refuses a state of {record.local}: {error}") from error
        self._kept[record.local] = kept

    def _forget(self, local: str) -> None:
        self._turns.pop(local, None)
        self._put_back.pop(local, None)
        if self._kept.pop(local, None) is None:
            return
        try:
            del self._database[_PREFIX + local.encode()]
        except Exception as error:  # noqa: BLE001  rocksdict raises plain Exception
            _log.warning("state_not_forgotten", local=local, error=str(error))

    def version_ms(self, record: SandboxRecord) -> int:
        """Return how new an instance's state is: as it was when it began, or synchronised last."""
        kept = self._kept.get(record.local)
        return int(record.created_at * 1000) if kept is None else kept.version_ms

    # --- Being told ---------------------------------------------------------------------------

    async def synchronise(self, request: Request[SynchroniseInstance]) -> InstanceSynchronised:
        """Synchronise an instance if it is behind, and answer when it goes on or has failed.

        Raises:
            DsecError: ``not_found``, ``expired`` for one that is over; ``unavailable`` or
                ``timeout`` when it could not be had to stand still now, or to go on.
        """
        asked = request.message
        record = self.sandboxes.state.running(asked.project, validate_local(asked.local))
        if not record.agent_version or record.agent != asked.agent:
            raise invalid(f"{self.sandboxes.node}.{asked.local} is no instance of {asked.agent}")
        await self._keep_up(record, asked)
        kept = self._kept.get(record.local)
        return InstanceSynchronised(
            cause_id=asked.message_id,
            state=InstanceState(
                sandbox_id=f"{self.sandboxes.node}.{record.local}",
                version_ms=self.version_ms(record),
                behind=kept.reason if kept else "",
                error=kept.error if kept else "",
            ),
        )

    async def _keep_up(self, record: SandboxRecord, asked: SynchroniseInstance) -> None:
        async with self._turns.setdefault(record.local, asyncio.Lock()):
            kept = self._kept.get(record.local)
            if kept is not None:
                asked = msgspec.structs.replace(
                    asked, versions=_newest(asked.versions, kept.asked.versions)
                )
                if kept.error and not asked.again and _required_ms(asked) <= kept.required_ms:
                    return
            instance = _Instance(self, record, asked)
            async with self._places.place(record.project):
                try:
                    await keep_consistent(
                        instance,
                        self.version_ms(record),
                        asked.versions,
                        asked.clock_tolerance_ms,
                    )
                except NotSynchronisedError:
                    return
                kept = self._kept.get(record.local)
                if kept is not None and kept.reason:
                    await instance.resume()  # a daemon died when that was all that was left

    async def _again(self, record: SandboxRecord) -> None:
        """Go on with what was asked, for nobody who waits: nobody else would ask again."""
        local = record.local
        while (kept := self._kept.get(local)) is not None:
            try:
                await self.sandboxes.switched(local)
                await self._keep_up(record, kept.asked)
            except DsecError as error:
                _log.info("state_not_kept", local=local, error=str(error))
                await self.sandboxes.parts.clock.sleep(_AGAIN_S)
            else:
                return

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Leave what goes on to the next daemon."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- A sandbox's life ---------------------------------------------------------------------

    def check_awake(self, record: SandboxRecord) -> None:
        """Return if requests may have a sandbox run.

        Raises:
            DsecError: ``unavailable`` while it is synchronised; ``denied`` when that failed.
        """
        kept = self._kept.get(record.local)
        if kept is None or not kept.reason:
            return
        sandbox_id = f"{self.sandboxes.node}.{record.local}"
        if not kept.error:
            raise unavailable(f"{sandbox_id} is being synchronised: {kept.reason}")
        raise DsecError(
            ErrorCode.DENIED,
            f"{sandbox_id} stands still: {kept.reason}, which failed: {kept.error}. It goes on "
            "when it is synchronised, at the next change of what it depends on or when asked for",
            details={"sandbox": sandbox_id, "reason": "behind"},
        )

    def paused_by_owner(self, record: SandboxRecord) -> None:
        """Note that an instance's owner wants it to stand still, whatever it does that for."""
        self._note(record, stays_paused=True)

    def resumed_by_owner(self, record: SandboxRecord) -> None:
        """Note that an instance's owner wants it to go on, as soon as it may."""
        self._note(record, stays_paused=False)

    def lifted(self, record: SandboxRecord) -> bool:
        """Return whether an instance whose policy pauses it no more stands still for this."""
        return self._note(record, stays_paused=False)

    def _note(self, record: SandboxRecord, *, stays_paused: bool) -> bool:
        kept = self._kept.get(record.local)
        if kept is None or not kept.reason:
            return False
        if kept.stays_paused != stays_paused:
            self.keep(record, msgspec.structs.replace(kept, stays_paused=stays_paused))
        return True

    async def sandbox_ending(self, local: str) -> None:
        """Forget a sandbox that is about to be removed."""
        self._forget(local)

    async def sandbox_put_back(self, local: str) -> None:
        """Synchronise an instance anew whose state is about to be an earlier one."""
        self._put_back[local] = self.times_put_back(local) + 1
        kept = self._kept.get(local)
        if kept is None:
            return
        with contextlib.suppress(DsecError):  # it ends meanwhile
            record = self.sandboxes.state.running(kept.asked.project, local)
            began_ms = int(record.created_at * 1000)
            kept = msgspec.structs.replace(kept, version_ms=began_ms, error="")
            self._kept[local] = kept  # it is so, also where the StateDB refuses it
            self._start(self._again(record))
            self.keep(record, kept)

    def times_put_back(self, local: str) -> int:
        """Return how often this daemon has put an instance back to a snapshot."""
        return self._put_back.get(local, 0)

    def inspecting(self, inspect: Inspect) -> Inspect:
        """Return ``inspect``, which tells of instances how new their state is."""

        async def inspected(request: Request[InspectSandbox]) -> SandboxInfo:
            info = await inspect(request)
            if not info.agent_version:
                return info
            record = self.sandboxes.state.find(request.project, info.sandbox_id.split(".")[-1])
            kept = self._kept.get(record.local)
            return msgspec.structs.replace(
                info,
                state_version_ms=self.version_ms(record),
                behind=kept.reason if kept else "",
                synchronise_error=kept.error if kept else "",
            )

        return inspected


class NotSynchronisedError(DsecError):
    """The agent's own command has failed; that is kept, and no fault of the platform's."""


class _Instance:
    """One instance in our hands."""

    def __init__(
        self, owner: Consistency, record: SandboxRecord, asked: SynchroniseInstance
    ) -> None:
        self._owner = owner
        self._sandboxes = owner.sandboxes
        self._record = record
        self._asked = asked

    @property
    def _kept(self) -> KeptState:
        kept = self._owner.kept(self._record.local)
        if kept is None:
            raise unavailable("the sandbox has ended")
        return kept

    def _change(self, **changes: object) -> None:
        self._owner.keep(self._record, msgspec.structs.replace(self._kept, **changes))

    async def pause(self, reason: str) -> None:
        """Have it stand still; from now on no request wakes it."""
        owner, record = self._owner, self._record
        while (state := self._state()) in _ON_THE_WAY:
            await self._sandboxes.turn(record.local)  # who waits for that gets there first
        before = owner.kept(record.local)
        held = before is not None and bool(before.reason)
        owner.keep(
            record,
            KeptState(
                version_ms=owner.version_ms(record),
                asked=self._asked,
                reason=reason,
                stays_paused=(
                    before.stays_paused if held and before else state is SandboxState.PAUSED
                ),
            ),
        )
        try:
            await self._turn_to(SandboxState.PAUSED, reason)
        except DsecError:
            self._change(reason="")  # it runs on, and takes requests
            raise

    async def synchronise(self, version_ms: int) -> None:
        """Run the agent's command, alone.

        Raises:
            NotSynchronisedError: it failed.
            DsecError: it could not be run now, or its state was put back to an earlier one.
        """
        record, asked, owner = self._record, self._asked, self._owner
        await self._sandboxes.switched(record.local)
        put_back = owner.times_put_back(record.local)
        told = {"version_ms": version_ms, "dependencies": asked.versions}
        command = CommandSpec(
            argv=asked.command,
            env=record.env_for({}),
            cwd=record.cwd_for(""),
            user=record.user_for(""),
            stdin=msgspec.json.encode(told) + b"\n",
            timeout_s=asked.timeout_s,
            output_limit_bytes=_OUTPUT_MAX_BYTES,
        )
        began = time.perf_counter()
        error = ""
        try:
            result = await self._sandboxes.parts.kernel.run_alone(record.local, command)
        except DsecError as raised:
            if raised.retryable:
                raise
            error = f"the command {asked.command[0]} cannot be run: {raised.message}"
        else:
            if result.exit_code != 0:
                error = _why(result, asked.timeout_s)
        if owner.times_put_back(record.local) != put_back:
            raise unavailable("it was put back to a snapshot meanwhile")
        if error:
            self._change(error=error)
        else:
            self._change(version_ms=version_ms, error="")
        self._sandboxes.parts.steps.step(
            record,
            "synchronise",
            status="failed" if error else "ok",
            latency_ms=(time.perf_counter() - began) * 1000,
            attributes={"version_ms": str(version_ms), "reason": error or self._kept.reason},
            cause_id=asked.message_id,
        )
        if error:
            raise NotSynchronisedError(ErrorCode.INTERNAL, error, retryable=False)

    async def resume(self) -> None:
        """Have it go on, unless it is to stand still for somebody else."""
        if not self._kept.stays_paused and not self._owner.is_paused(self._record):
            await self._turn_to(SandboxState.RUNNING)
        self._change(reason="", stays_paused=False)

    def _state(self) -> SandboxState:
        record = self._record
        return self._sandboxes.state.running(record.project, record.local).state

    async def _turn_to(self, wanted: SandboxState, reason: str = "") -> None:
        local = self._record.local
        while (state := self._state()) is not wanted:
            if state not in _ON_THE_WAY:
                pausing = wanted is SandboxState.PAUSED
                self._sandboxes.handle(
                    PauseAsked(local=local, reason=reason) if pausing else ResumeAsked(local=local)
                )
            await self._sandboxes.turn(local)


def _newest(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: max(version, other.get(name, 0)) for name, version in one.items()}


def _required_ms(asked: SynchroniseInstance) -> int:
    return required_version_ms(asked.versions, asked.clock_tolerance_ms)


def _why(result: CommandResult, timeout_s: float) -> str:
    if result.timed_out:
        return f"it took longer than {timeout_s:g} s"
    if result.oom:
        return "its memory ran out"
    shown = result.stderr.decode(errors="replace").strip()[-_STDERR_CHARACTERS:]
    return f"exit code {result.exit_code}, signal {result.signal}: {shown}"
