"""The packets of ``native/protocol.h``, byte for byte. A test compares the two."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsec_sandboxd.kernel.cgroups_layout import LimitText

_STEP_NAMES: Final = (
    "NONE PROTOCOL NAMESPACE_TREE LAYER_MOUNT SLOT_USER_NAMESPACE SLOT_NETWORK_NAMESPACE "
    "ENTER_NETWORK_NAMESPACE CONTROL_SOCKET CLONE ID_MAP OOM_SCORE WRITABLE_LAYER LAYER_CLONE "
    "LAYER_ID_MAP OVERLAY HANDSHAKE CGROUP_ENTER CGROUP_NAMESPACE IDENTITY HOSTNAME "
    "ROOT_MOUNT PROC_MOUNT PROC_MASK DEV_MOUNT PTS_MOUNT SHM_MOUNT RUN_MOUNT PIVOT_ROOT "
    "RESOURCE_LIMITS CAPABILITIES NO_NEW_PRIVILEGES SECCOMP EXEC_INIT LANDLOCK MEMORY PIPES "
    "COMMAND_FORK COMMAND_USER COMMAND_DIRECTORY COMMAND_SECCOMP COMMAND_EXEC FILE_FORK "
    "FILE_USER FILE_OPEN FILE_KIND FILE_STAT FILE_LIST FILE_MKDIR FILE_RENAME FILE_UNLINK "
    "FILE_CHILD_DIED SCHEDULING FILE_PUT FILE_REMOVE FILE_UNPACK FILE_PACK "
    "FILE_WATCH COMMAND_SLOT COMMAND_TERMINAL "
    "SNAPSHOT_ROOM SNAPSHOT_HELPER SNAPSHOT_FREEZE SNAPSHOT_COPY FILE_COPY CGROUP_MAKE CGROUP_LIMIT"
)
STEPS: Final = tuple(_STEP_NAMES.split())
"""Every operation that can fail, in the order of the C enumeration."""

SPAWNER_PROTOCOL: Final = 2
"""Of what is said to the spawner, whose first packet names it."""
CONTROL_PROTOCOL: Final = 1
"""Of what is said to PID 1, kept with each sandbox for a later daemon."""

LAYERS_MAX: Final = 16
LAYER_HANDLES: Final = 4096
SLOTS_MAX: Final = 4096
HOSTNAME_BYTES: Final = 64
CGROUP_NAME_BYTES: Final = 80
LIMIT_TEXTS_BYTES: Final = 1024
DESCRIPTORS_MAX: Final = 16
INLINE_PAYLOAD_MAX: Final = 61_440
INLINE_OUTPUT_MAX: Final = 32_768
PAYLOAD_MAX: Final = 8 << 20
STRINGS_MAX: Final = 65_536
LIST_NAMES_MAX: Final = 10_000


def step_name(step: int) -> str:
    """Return the name of the operation that failed, in lower case."""
    return STEPS[step].lower() if 0 <= step < len(STEPS) else f"step_{step}"


class SpawnerKind(IntEnum):
    """What the spawner is asked."""

    HELLO = 0
    HOLD = 1
    DROP = 2
    WARM = 3
    CREATE = 4
    RELEASE = 5
    ADOPT = 6
    SNAPSHOT = 7
    RESIZE = 8
    LEND = 9


class Lending(IntEnum):
    """What a living sandbox is lent, in place of flags."""

    LEND_DEVICES = 1
    TAKE_DEVICES = 2
    LEND_LAYER = 3
    LEND_VOLUME = 4
    LEND_GIVEN = 5


class ControlKind(IntEnum):
    """What PID 1 is asked."""

    EXEC = 1
    SIGNAL = 2
    DONE = 3
    FILE = 4
    LIST = 5
    CLOSE_STDIN = 6


class ControlFlag(IntFlag):
    """How a request to PID 1 is meant."""

    NONE = 0
    WITH_STDIN = 1
    MERGE_STDERR = 2
    WITH_CGROUP = 4
    PAYLOAD_IN_FD = 8
    KEEP_STDIN = 16
    TERMINAL = 32
    MAIN_ONLY = 64
    SPARE_MAIN = 128
    HOLD = 256


class ReplyKind(IntEnum):
    """What PID 1 says."""

    READY = 1
    BROKEN = 2
    STARTED = 3
    FAILED = 4
    EXITED = 5
    FILE_DONE = 6
    LISTED = 7
    LIST_ENDED = 8


class ExitedFlag(IntFlag):
    """What PID 1 says of a command that has ended."""

    WHOLE = 1
    ALONE = 2


class ListedFlag(IntFlag):
    """What PID 1 says of a command in a list."""

    EXITED = 1
    WITH_STREAMS = 2
    WITH_STDIN = 4
    WITH_SPOOL = 8
    TERMINAL = 16
    HELD = 32


class FileOperation(IntEnum):
    """What is done to a path."""

    OPEN_READ = 1
    OPEN_WRITE = 2
    OPEN_APPEND = 3
    OPEN_CREATE = 4
    STAT = 5
    LIST = 6
    MKDIR = 7
    MKDIR_PARENTS = 8
    RENAME = 9
    UNLINK = 10
    PUT = 11
    REMOVE = 12
    UNPACK = 13
    PACK = 14
    WATCH = 15
    COPY = 16


class FileModeFlag(IntFlag):
    """What the mode of a file request says beside permission bits."""

    PARENTS = 1 << 16
    KEEP = 1 << 17
    SET_ID = 1 << 18
    RECURSIVE = 1 << 19


_SPAWNER_REQUEST: Final = struct.Struct(
    f"=6I{LAYERS_MAX}I2I2Q{HOSTNAME_BYTES}s{CGROUP_NAME_BYTES}sI{LIMIT_TEXTS_BYTES}s4x"
)
_SPAWNER_REPLY: Final = struct.Struct("=2IiIiI")
_BEFORE_CGROUPS: Final = frozenset(
    STEPS.index(name)
    for name in (
        "PROTOCOL",
        "SLOT_USER_NAMESPACE",
        "SLOT_NETWORK_NAMESPACE",
        "CGROUP_MAKE",
        "CGROUP_LIMIT",
    )
)
_CONTROL_REQUEST: Final = struct.Struct("=10I")
_CONTROL_REPLY: Final = struct.Struct("=2IiIi3IQq")
SPAWNER_REPLY_BYTES: Final = _SPAWNER_REPLY.size
CONTROL_REPLY_BYTES: Final = _CONTROL_REPLY.size
CREATE_HAS_RUN_MOUNT: Final = 1
#: Where PID 1 keeps what a later daemon takes: the daemon's end of its socket, its writable layer.
HOST_END_FD: Final = 4
WRITABLE_FD: Final = 5
CREATE_BEST_EFFORT: Final = 2
CREATE_CORE_SCHEDULING: Final = 4
CREATE_ON_SNAPSHOT: Final = 8
CREATE_HAS_PIPES_MOUNT: Final = 16
SETTING_DEVICE: Final = 127
SETTING_PATH: Final = 126
HOLD_IS_MOUNT: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnerRequest:
    """One request to the spawner; fields that a kind does not use stay zero."""

    kind: SpawnerKind
    slot: int = 0
    base_id: int = 0
    layer: int = 0
    layers: Sequence[int] = ()
    controllers: int = 0
    flags: int = 0
    disk_bytes: int = 0
    inodes: int = 0
    hostname: str = ""
    cgroup: str = ""
    limit_texts: Sequence[LimitText] = ()

    def pack(self, request_id: int) -> bytes:
        """Return the packet."""
        texts = b"".join(
            b"%c%b\0%b\0" % (tree, file.encode(), text) for tree, file, text in self.limit_texts
        )
        handles = [*self.layers, *([0] * (LAYERS_MAX - len(self.layers)))]
        return _SPAWNER_REQUEST.pack(
            self.kind,
            request_id,
            self.slot,
            self.base_id,
            self.layer,
            len(self.layers),
            *handles,
            self.controllers,
            self.flags,
            self.disk_bytes,
            self.inodes,
            self.hostname.encode(),
            self.cgroup.encode(),
            len(texts),
            texts,
        )


@dataclass(frozen=True, slots=True)
class SpawnerReply:
    """What the spawner answered."""

    kind: int
    request_id: int
    error: int
    step: int
    pid: int
    detail: int

    @property
    def left_no_cgroups(self) -> bool:
        """Whether a creation failed before there were cgroups, or with them."""
        return self.step in _BEFORE_CGROUPS

    @classmethod
    def unpack(cls, data: bytes) -> SpawnerReply:
        """Read a packet of ``SPAWNER_REPLY_BYTES``."""
        return cls(*_SPAWNER_REPLY.unpack(data))


def pack_control(
    kind: ControlKind,
    request_id: int,
    *,
    flags: int = 0,
    arguments: int = 0,
    environment: int = 0,
    signal_number: int = 0,
    operation: int = 0,
    mode: int = 0,
    payload_bytes: int = 0,
    directory: int = 0,
) -> bytes:
    """Return the header of a request to PID 1; its payload, if inline, follows."""
    return _CONTROL_REQUEST.pack(
        kind,
        request_id,
        flags,
        arguments,
        environment,
        signal_number,
        operation,
        mode,
        payload_bytes,
        directory,
    )


class ControlReply(NamedTuple):
    """What PID 1 said."""

    kind: int
    request_id: int
    error: int
    step: int
    status: int
    file_mode: int
    user_id: int
    group_id: int
    size_bytes: int
    modified_ns: int

    @classmethod
    def unpack_from(cls, data: bytes) -> ControlReply:
        """Read the first ``CONTROL_REPLY_BYTES`` of a packet."""
        return cls._make(_CONTROL_REPLY.unpack_from(data))
