"""The SDK of DSec: disposable sandboxes for agents, asked for over NATS.

``from dsec import DSecClient, Sandbox, BehaviorLog, DsecError, Limits``. Everything is loaded when
it is first used, so importing this package costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dsec.client import DSecClient
    from dsec.layers import Layers
    from dsec.results import CommandFailed, ExecResult
    from dsec.rollouts import Rollout, Stage
    from dsec.sandbox import Sandbox
    from dsec_common.behavior import BehaviorLog
    from dsec_common.errors import DsecError, ErrorCode
    from dsec_common.wire.layer import LayerInfo, LayerKind
    from dsec_common.wire.sandbox import Limits, SandboxInfo

__version__: Final = "0.1.0"

__all__ = [
    "BehaviorLog",
    "CommandFailed",
    "DSecClient",
    "DsecError",
    "ErrorCode",
    "ExecResult",
    "LayerInfo",
    "LayerKind",
    "Layers",
    "Limits",
    "Rollout",
    "Sandbox",
    "SandboxInfo",
    "Stage",
    "__version__",
]

_HOME_OF: Final = {
    "BehaviorLog": "dsec_common.behavior",
    "CommandFailed": "dsec.results",
    "DSecClient": "dsec.client",
    "DsecError": "dsec_common.errors",
    "ErrorCode": "dsec_common.errors",
    "ExecResult": "dsec.results",
    "LayerInfo": "dsec_common.wire.layer",
    "LayerKind": "dsec_common.wire.layer",
    "Layers": "dsec.layers",
    "Limits": "dsec_common.wire.sandbox",
    "Rollout": "dsec.rollouts",
    "Sandbox": "dsec.sandbox",
    "SandboxInfo": "dsec_common.wire.sandbox",
    "Stage": "dsec.rollouts",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    home = _HOME_OF.get(name)
    if home is None:
        message = f"module 'dsec' has no attribute {name!r}"
        raise AttributeError(message)
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
