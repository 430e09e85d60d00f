"""What an owner may ask of a sandbox's life: pause, resume, keep for longer, label."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dsec_common.bus_types import Request
from dsec_common.errors import invalid
from dsec_common.wire.life import PatchSandbox, PauseSandbox, ResumeSandbox, TouchSandbox
from dsec_common.wire.sandbox import SandboxInfo, SandboxState
from dsec_sandboxd.admission import check_labels, check_seconds
from dsec_sandboxd.errors import still_creating
from dsec_sandboxd.events import LabelsAsked, PauseAsked, ResumeAsked, TouchAsked
from dsec_sandboxd.lifecycle import Sandboxes, local_of
from dsec_sandboxd.records import SandboxRecord

PAUSE_REASON_MAX: Final = 256


class LifeDoors:
    """Answers the verbs ``pause``, ``resume``, ``touch`` and ``patch``; each may be repeated.

    All raise ``not_found``, ``expired`` with the cause for a sandbox that is over, and
    ``unavailable`` for one that is being created or whose node is stopping.
    """

    def __init__(
        self,
        sandboxes: Sandboxes,
        check_awake: Callable[[SandboxRecord], None] = lambda _record: None,
        on_pause: Callable[[SandboxRecord], None] = lambda _record: None,
        on_resume: Callable[[SandboxRecord], None] = lambda _record: None,
    ) -> None:
        """Take the sandboxes, and who raises for one that may not be had run now.

        ``on_pause`` and ``on_resume`` are told what an owner wants before anything comes of it.
        """
        self._sandboxes = sandboxes
        self._check_awake = check_awake
        self._on_pause = on_pause
        self._on_resume = on_resume
        self._state = sandboxes.state
        self._clock = sandboxes.parts.clock

    async def pause(self, request: Request[PauseSandbox]) -> SandboxInfo:
        """Stop a sandbox's processes and answer when all stand still.

        A request that is on its way in lets it go on again at once; the answer says so.

        Raises:
            DsecError: ``timeout`` when a process cannot be stopped; the sandbox runs on.
                ``invalid`` for a reason that is too long.
        """
        local, reason = local_of(request), request.message.reason
        if len(reason) > PAUSE_REASON_MAX:
            raise invalid(
                f"a reason of {len(reason)} characters is too long: {PAUSE_REASON_MAX} are the most"
            )
        record = self._state.running(request.project, local)
        self._on_pause(record)
        while record.state is SandboxState.RESUMING:
            await self._sandboxes.turn(local)
            record = self._state.running(request.project, local)
        if record.state is not SandboxState.PAUSED:
            self._sandboxes.handle(PauseAsked(local=local, reason=reason or "asked"))
            await self._sandboxes.turn(local)
        return self._info(request.project, local)

    async def resume(self, request: Request[ResumeSandbox]) -> SandboxInfo:
        """Have a paused sandbox go on and answer when it runs.

        Raises:
            DsecError: what the kernel refused; ``denied`` when its agent's policy says so, or when
                it could not be synchronised, ``unavailable`` while it is; the sandbox stands still
                as before.
        """
        local = local_of(request)
        record = self._state.running(request.project, local)
        self._on_resume(record)
        self._check_awake(record)
        while record.state is not SandboxState.RUNNING:
            self._check_awake(record)
            if record.state is not SandboxState.RESUMING:
                self._sandboxes.handle(ResumeAsked(local=local))
            await self._sandboxes.turn(local)
            record = self._state.running(request.project, local)
        return self._info(request.project, local)

    async def touch(self, request: Request[TouchSandbox]) -> SandboxInfo:
        """Begin a sandbox's time to live and its idle time anew, or with new values.

        Raises:
            DsecError: ``invalid`` for what is no time.
        """
        touch, local = request.message, local_of(request)
        self._awake_or_asleep(request.project, local)
        for name in ("ttl_s", "idle_ttl_s"):
            if (value := getattr(touch, name)) is not None:
                check_seconds(value, name)
        self._sandboxes.handle(
            TouchAsked(
                now=self._clock.now(),
                monotonic_s=self._clock.monotonic(),
                local=local,
                ttl_s=touch.ttl_s,
                idle_ttl_s=touch.idle_ttl_s,
            )
        )
        return self._info(request.project, local)

    async def patch(self, request: Request[PatchSandbox]) -> SandboxInfo:
        """Change some of a sandbox's labels.

        Raises:
            DsecError: ``invalid`` for labels that it cannot carry; none is changed then.
        """
        local = local_of(request)
        labels = dict(self._awake_or_asleep(request.project, local).labels)
        for name, value in request.message.labels.items():
            if value is None:
                labels.pop(name, None)
            else:
                labels[name] = value
        check_labels(labels)
        self._sandboxes.handle(LabelsAsked(local=local, labels=labels))
        return self._info(request.project, local)

    def _awake_or_asleep(self, project: str, local: str) -> SandboxRecord:
        record = self._state.running(project, local)
        if record.state is SandboxState.CREATING:
            raise still_creating(f"{self._state.rules.node}.{local}")
        return record

    def _info(self, project: str, local: str) -> SandboxInfo:
        return self._state.find(project, local).info(self._state.rules.node)
