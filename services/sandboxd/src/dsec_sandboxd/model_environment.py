"""How programs in a sandbox find its model endpoint."""

from __future__ import annotations

from typing import Final

from dsec_common.wire.sandbox import CreateSandbox
from dsec_sandboxd.snapshot_tree import SnapshotRecord

MODEL_PORT: Final = 9176
"""Where the model endpoint of a sandbox listens, on 127.0.0.1 in it."""

_URL: Final = f"http://127.0.0.1:{MODEL_PORT}"
#: The keys are no secrets: clients want some, and nobody looks at them.
_VARIABLES: Final = {
    "OPENAI_BASE_URL": f"{_URL}/v1",
    "OPENAI_API_KEY": "dsec",
    "ANTHROPIC_BASE_URL": _URL,
    "ANTHROPIC_API_KEY": "dsec",
}


def environment_of(request: CreateSandbox, restored: SnapshotRecord | None) -> dict[str, str]:
    """Return the variables that were asked for, over those that model clients look for."""
    env = request.env
    if request.remade and restored is not None:
        env = {**restored.env, **env}
    return {**_VARIABLES, **env} if request.model_rollout_id else env
