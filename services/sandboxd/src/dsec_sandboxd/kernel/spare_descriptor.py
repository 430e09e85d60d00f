"""A descriptor in reserve: what fails for want of descriptors is undone with this one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from dsec_common.errors import DsecError
from dsec_sandboxd.kernel.command import out_of_descriptors


class SpareDescriptor:
    """One descriptor that is kept open for nothing, until it is needed."""

    def __init__(self) -> None:
        self._descriptor = -1

    def require(self) -> None:
        """Have it in reserve.

        Raises:
            DsecError: ``exhausted`` when this process has no descriptor left.
        """
        if self._descriptor < 0:
            try:
                self._descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise out_of_descriptors() from error

    @contextlib.contextmanager
    def given_up(self) -> Iterator[None]:
        """Leave it to the work within. When that awaits, something else may take it."""
        self.close()
        try:
            yield
        finally:
            with contextlib.suppress(DsecError):
                self.require()

    def close(self) -> None:
        """Keep it no longer."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
