"""What a node remembers of one action: the value in its StateDB. No I/O."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import msgspec

from dsec_common.compute.model import GpuDemand, Slice
from dsec_common.wire.action import (
    Acquired,
    AcquiredKind,
    ActionInfo,
    ActionOutcome,
    ActionState,
)
from dsec_common.wire.network import NetworkPhase, NetworkPolicy
from dsec_sandboxd.kernel.interface import DeviceNode
from dsec_sandboxd.records import SandboxRecord

DIRECTORY: Final = "actions"
"""Of a sandbox's run directory: where the volumes of its actions are."""

_INSIDE: Final = "/run/dsec/actions"


class HeldVolume(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A volume that an action has or is to have; ``digest`` is its layer's, empty for none."""

    name: str
    size_bytes: int = 0
    inodes: int = 0
    reference: str = ""
    digest: str = ""


class ActionRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One action of a sandbox, from the intent to begin it until it is forgotten.

    It is written before each thing is taken, and after it, so that whatever line a crash comes
    after, the next daemon knows what there may be to return.

    Attributes:
        action_id: the message that asked for it.
        lease_id: what its lease is called, if it is granted.
        granted: its lease is known to be there; heartbeats name it.
        devices: what its units brought into the sandbox's ``/dev``.
        volume_numbers: device numbers of its volumes, from when they are about to be taken back.
        network_before: the policy that was in force before its own.
        phase_before: of the network, then; none in a record of before it was kept.
    """

    action_id: str
    local: str
    project: str
    name: str
    state: ActionState
    asked_at: float
    timeout_s: float
    hold_s: float
    parent: str = ""
    outcome: ActionOutcome | None = None
    detail: str = ""
    began_at: float = 0.0
    ended_at: float = 0.0
    expires_at: float = 0.0
    gpu: GpuDemand | None = None
    lease_id: str = ""
    granted: bool = False
    slices: tuple[Slice, ...] = ()
    devices: tuple[DeviceNode, ...] = ()
    lease_resizes: int = 0
    volumes: tuple[HeldVolume, ...] = ()
    volume_numbers: tuple[int, ...] = ()
    network: NetworkPolicy | None = None
    network_before: NetworkPolicy | None = None
    phase_before: NetworkPhase | None = None
    acquired: tuple[Acquired, ...] = ()
    commands: tuple[str, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether it has, or may have, something to return."""
        return self.state is not ActionState.ENDED

    @property
    def cu(self) -> float:
        """Compute Units that it has or had."""
        return math.fsum(slice_.cu for slice_ in self.slices)

    @property
    def cu_wanted(self) -> float:
        """Compute Units that it has, or may be given."""
        if self.slices:
            return self.cu
        return self.gpu.max_cu if self.gpu is not None else 0.0

    @property
    def digests(self) -> tuple[str, ...]:
        """The layers that are among its volumes."""
        return tuple(volume.digest for volume in self.volumes if volume.digest)

    def inside(self, volume: str = "") -> str:
        """Return where a volume, or the directory of all of them, is seen in the sandbox."""
        return f"{_INSIDE}/{self.action_id}/{volume}".rstrip("/")

    def place(self, run_directory: Path, volume: str = "") -> Path:
        """Return the same on the host."""
        return run_directory / DIRECTORY / self.action_id / volume

    def with_acquired(
        self, kind: AcquiredKind, name: str, at: float, amount: float = 0.0
    ) -> ActionRecord:
        """Return it with one thing more."""
        one = Acquired(kind=kind, name=name, acquired_at=at, amount=amount)
        return msgspec.structs.replace(self, acquired=(*self.acquired, one))

    def with_returned(self, kind: AcquiredKind, at: float) -> ActionRecord:
        """Return it with all of one kind noted as returned."""
        acquired = tuple(
            msgspec.structs.replace(one, returned_at=at)
            if one.kind is kind and not one.returned_at
            else one
            for one in self.acquired
        )
        return msgspec.structs.replace(self, acquired=acquired)

    def has(self, kind: AcquiredKind) -> bool:
        """Return whether it has something of a kind that it has not returned."""
        return any(one.kind is kind and not one.returned_at for one in self.acquired)

    def for_commands(self, record: SandboxRecord) -> SandboxRecord:
        """Return the sandbox as its commands are to see it: with this action's units, if any."""
        told = {"DSEC_ACTION": self.action_id}
        if self.volumes:
            told["DSEC_ACTION_VOLUMES"] = self.inside()
        return msgspec.structs.replace(
            record, env={**record.env, **told}, slices=self.slices or record.slices
        )

    def info(self, node: str, cause_id: str = "") -> ActionInfo:
        """Return what its owner is told."""
        return ActionInfo(
            cause_id=cause_id,
            action_id=self.action_id,
            sandbox_id=f"{node}.{self.local}",
            name=self.name,
            state=self.state,
            asked_at=self.asked_at,
            parent=self.parent,
            outcome=self.outcome,
            detail=self.detail,
            began_at=self.began_at,
            ended_at=self.ended_at,
            expires_at=self.expires_at,
            acquired=self.acquired,
            commands=self.commands,
            cu=self.cu,
            volumes={volume.name: self.inside(volume.name) for volume in self.volumes},
        )
