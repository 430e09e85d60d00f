"""What a run of a factory has done, on this machine's disk: one file for each seed.

A record is written when an item is done or has failed for good, whole or not at all. What a killed
run was at has no record, or an old one, and is done again; whether its layer was published
already, the layer store knows.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from dsec.factory.building import Environment
from dsec.factory.errors import EnvironmentRefused, NotProven
from dsec.factory.leaks import Finding
from dsec.results import CommandFailed
from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.wire.base import new_id

_RUN: Final = "run"
_LOCK: Final = "lock"


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why an item is not there.

    Attributes:
        code: of the error.
        message: what failed and where.
        retryable: whether the same may succeed later: False where the item is at fault.
        findings: of an environment that was refused.
    """

    code: str
    message: str
    retryable: bool
    findings: tuple[Finding, ...] = ()

    @classmethod
    def of(cls, error: DsecError) -> Self:
        """Return what is kept of an error."""
        return cls(
            code=error.code,
            message=error.message,
            retryable=not isinstance(error, EnvironmentRefused | NotProven | CommandFailed),
            findings=error.findings if isinstance(error, EnvironmentRefused) else (),
        )


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one seed; one of the two is there.

    Attributes:
        seed: which.
        key: of the content that it was made of; empty when the template failed.
        environment: what was made.
        failure: why nothing was.
    """

    seed: int
    key: str = ""
    environment: Environment | None = None
    failure: Failure | None = None

    @property
    def failed_for_good(self) -> bool:
        """Whether the same content would only fail again."""
        return self.failure is not None and not self.failure.retryable


class State:
    """A run's directory; one process at a time has it.

    Raises:
        DsecError: on entering: ``conflict`` while another process has it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = -1
        self.run = ""

    def __enter__(self) -> Self:
        (self._directory / "items").mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise DsecError(
                ErrorCode.CONFLICT,
                f"another process works with {self._directory}; wait for it, or name another "
                "state directory",
            ) from None
        name = self._directory / _RUN
        if not name.exists():
            _write(name, new_id().encode())
        self.run = name.read_text().strip()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._lock)

    def scratch(self, seed: int) -> Path:
        """Return the directory of an item's own; what is in it may be lost."""
        path = self._directory / "work" / str(seed)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def outcome(self, seed: int) -> Outcome | None:
        """Return what is recorded of a seed.

        Raises:
            DsecError: ``invalid`` for a file that is no record.
        """
        path = self._file(seed)
        try:
            return msgspec.json.decode(path.read_bytes(), type=Outcome)
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, OSError) as error:
            raise invalid(
                f"{path} is no record of a factory ({error}); remove it to have the seed done again"
            ) from None

    def record(self, outcome: Outcome) -> None:
        """Keep an outcome; it is on the disk when this returns."""
        _write(self._file(outcome.seed), msgspec.json.encode(outcome))

    def _file(self, seed: int) -> Path:
        return self._directory / "items" / f"{seed}.json"


def _write(path: Path, data: bytes) -> None:
    """Put data in a file's place, whole, and on the disk."""
    beside = path.with_name(f".{path.name}.new")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
