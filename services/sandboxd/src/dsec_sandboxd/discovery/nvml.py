"""The driver's library, asked so that what a card does not support is a default and no error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from dsec_common.errors import DsecError, ErrorCode

T = TypeVar("T")

#: What a card answers that has no such thing, or a driver that is too old for the question.
_HAS_NO_SUCH_THING: Final = (
    "NVML_ERROR_NOT_SUPPORTED",
    "NVML_ERROR_FUNCTION_NOT_FOUND",
    "NVML_ERROR_NOT_FOUND",
    "NVML_ERROR_INVALID_ARGUMENT",
    "NVML_ERROR_NO_PERMISSION",
    "NVML_ERROR_ARGUMENT_VERSION_MISMATCH",
)


class DeviceLost(Exception):  # noqa: N818  it is the card's state
    """A card does not answer any more; the message says how the driver puts it."""


class Nvml:
    """The library between :meth:`open` and :meth:`close`. Every call may wait for a card."""

    def __init__(self, library: Any) -> None:
        """Take the module ``pynvml``; see :func:`open_nvml`."""
        self.library = library
        self._nothing = tuple(getattr(library, name) for name in _HAS_NO_SUCH_THING)

    def reopen(self) -> None:
        """Have the driver look for its cards anew.

        Raises:
            DeviceLost: it does not answer at all.
        """
        with contextlib.suppress(self.library.NVMLError):
            self.library.nvmlShutdown()
        with self.losing():
            self.library.nvmlInit()

    def close(self) -> None:
        """Let go of the driver. Idempotent."""
        with contextlib.suppress(self.library.NVMLError):
            self.library.nvmlShutdown()

    @contextlib.contextmanager
    def losing(self) -> Iterator[None]:
        """Turn the driver's refusal into :class:`DeviceLost`."""
        try:
            yield
        except self.library.NVMLError as error:
            raise DeviceLost(str(error)) from None

    def ask(self, name: str, *arguments: Any) -> Any:
        """Return what a function of the library answers.

        Raises:
            DeviceLost: it does not.
        """
        with self.losing():
            return getattr(self.library, name)(*arguments)

    def ask_or(self, default: T, name: str, *arguments: Any) -> T:
        """Return what a function answers, or ``default`` where there is no such thing.

        Raises:
            DeviceLost: the card does not answer any more.
        """
        function: Callable[..., T] | None = getattr(self.library, name, None)
        if function is None:
            return default
        try:
            return function(*arguments)
        except self.library.NVMLError as error:
            if error.value in self._nothing:
                return default
            raise DeviceLost(f"{name}: {error}") from None


def open_nvml() -> Nvml:
    """Return the library, ready to be asked.

    Raises:
        DsecError: ``unsupported``: there is no library, no driver, or it does not answer.
    """
    try:
        import pynvml  # noqa: PLC0415  an optional library, asked for once at the start
    except ImportError:
        raise DsecError(
            ErrorCode.UNSUPPORTED, "the library nvidia-ml-py is not installed: pip install it"
        ) from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise DsecError(ErrorCode.UNSUPPORTED, f"no NVIDIA driver: {error}") from None
    return Nvml(pynvml)
