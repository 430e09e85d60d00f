"""What all file requests share: checks before, the story and the typed error after."""

from __future__ import annotations

import time
from typing import Any, Final

from dsec_common.bus_types import Request
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.files import FileInfo, FileKind
from dsec_sandboxd.commands import check_path
from dsec_sandboxd.errors import invalid_field
from dsec_sandboxd.execs import went_with_its_processes
from dsec_sandboxd.kernel.file_ports import FileKind as KernelFileKind
from dsec_sandboxd.kernel.file_ports import FileStat
from dsec_sandboxd.kernel.init import is_sandbox_over
from dsec_sandboxd.kernel.interface import Kernel
from dsec_sandboxd.lifecycle import local_of
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.state import NodeState
from dsec_sandboxd.step_log import StepLog

_PERMISSION_BITS: Final = 0o777
#: What changes a sandbox, and content going out, is a step of it; looking around is not.
_LOGGED: Final = frozenset(
    {
        "read_file",
        "write_file",
        "move_file",
        "copy_file",
        "delete_file",
        "write_tree",
        "read_tree",
    }
)
KIND_OF: Final = {
    KernelFileKind.FILE: FileKind.FILE,
    KernelFileKind.DIRECTORY: FileKind.DIRECTORY,
    KernelFileKind.LINK: FileKind.SYMLINK,
    KernelFileKind.OTHER: FileKind.OTHER,
}
_REASON_OF: Final = {
    ErrorCode.NOT_FOUND: "not_found",
    ErrorCode.DENIED: "permission_denied",
    ErrorCode.EXHAUSTED: "no_space",
}


class FileDesk:
    """Where each file request comes in and goes out."""

    def __init__(self, state: NodeState, kernel: Kernel, steps: StepLog, clock: Clock) -> None:
        self._state = state
        self._steps = steps
        self.kernel = kernel
        self.clock = clock

    def checked(self, request: Request[Any], path: str) -> SandboxRecord:
        """Return the running sandbox that a request is about.

        Raises:
            DsecError: ``not_found`` or ``expired`` for it; ``invalid`` for the path.
        """
        record = self._state.running(request.project, local_of(request))
        check_path(path, "path")
        return record

    def told(self, record: SandboxRecord, action: str, path: str, error: DsecError) -> DsecError:
        """Return the error for the caller, with path and reason; log it if its success is."""
        if error.details.get("what") == "sandbox" or error.code is ErrorCode.UNAVAILABLE:
            try:
                self._state.running(record.project, record.local)
            except DsecError as ended:
                error = ended
            else:
                if error.details.get("what") == "sandbox" or is_sandbox_over(error):
                    error = went_with_its_processes("the request")
        if error.code in _REASON_OF:
            error.details.setdefault("reason", _REASON_OF[error.code])
        error.details.setdefault("path", path)
        if action in _LOGGED:
            self._steps.step(
                record,
                action,
                status=error.code.value,
                attributes={"path": path},
                error_code=error.code.value,
            )
        return error

    def log(
        self,
        record: SandboxRecord,
        request: Request[Any],
        action: str,
        size_bytes: int,
        started_at: float,
        **attributes: str,
    ) -> None:
        """Write a step into the behaviour log; ``started_at`` is of ``time.perf_counter``."""
        self._steps.step(
            record,
            action,
            latency_ms=(time.perf_counter() - started_at) * 1000,
            attributes={
                "path": request.message.path,
                "size_bytes": str(size_bytes),
                **attributes,
            },
            cause_id=request.message.message_id,
        )


def file_info(path: str, found: FileStat, cause_id: str) -> FileInfo:
    """Return a stat as the wire says it."""
    return FileInfo(
        cause_id=cause_id,
        path=path,
        kind=KIND_OF[found.kind],
        size_bytes=found.size_bytes,
        mode=found.mode,
        modified_at=found.modified_at,
        link_target=as_text(found.link_target),
        user_id=found.user_id,
        group_id=found.group_id,
    )


def as_text(name: str) -> str:
    """Return a name as a message can carry it: names are bytes to the kernel."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def permissions(mode: int) -> int:
    """Return permission bits, or raise ``invalid`` for more than those."""
    if mode & ~_PERMISSION_BITS:
        raise invalid_field("mode", f"{mode:#o} has more than permission bits; use 0 to 0o777")
    return mode
