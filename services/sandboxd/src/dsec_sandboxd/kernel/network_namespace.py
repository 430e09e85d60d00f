"""A sandbox's network namespace, taken by its PID 1: no path, and no number that is used again."""

from __future__ import annotations

import fcntl
import os
from typing import Final

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.init import ended_error
from dsec_sandboxd.kernel.part import KernelPart

_PIDFD_GET_NET_NAMESPACE: Final = 0xFF04


class NetworkNamespaces(KernelPart):
    """The part of ``Kernel`` that hands out network namespaces. See the interface."""

    def network_namespace(self, local: str) -> int:
        """Return a descriptor of a sandbox's network namespace; the caller closes it."""
        pidfd = self._require(local).pidfd
        if pidfd < 0:
            raise ended_error()
        try:
            descriptor: int = fcntl.ioctl(pidfd, _PIDFD_GET_NET_NAMESPACE, 0)
        except ProcessLookupError:
            raise ended_error() from None
        except OSError as error:
            raise DsecError(
                ErrorCode.INTERNAL,
                f"the network namespace of {local!r} cannot be had: {error.strerror}",
                details={"operation": "network_namespace"},
            ) from error
        os.set_inheritable(descriptor, False)
        return descriptor
