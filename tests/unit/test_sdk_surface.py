from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import dsec
from dsec import client, layers, rollouts, sandbox, sync
from dsec.results import CommandFailed, ExecResult
from dsec_common.errors import ErrorCode


def _result(**changes: object) -> ExecResult:
    facts: dict[str, object] = {
        "sandbox_id": "node-1.x",
        "argv": ("false",),
        "exit_code": 0,
        "signal": None,
        "stdout": b"out \xff",
        "stderr": b"err",
        "stdout_truncated": False,
        "stderr_truncated": False,
        "timed_out": False,
        "oom": False,
        "duration_s": 1.5,
    }
    return ExecResult(**(facts | changes))  # type: ignore[arg-type]


def test_every_public_name_can_be_imported() -> None:
    for name in dsec.__all__:
        assert getattr(dsec, name) is not None
    with pytest.raises(AttributeError):
        dsec.nothing_of_this_name  # noqa: B018  it is the access that raises


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, dsec; "
        "print([m for m in ('nats', 'aiokafka', 'msgspec', 'structlog') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=30
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("twin", "original"),
    [
        (sync.DSecClient, client.DSecClient),
        (sync.Sandbox, sandbox.Sandbox),
        (sync.Layers, layers.Layers),
        (sync.Rollout, rollouts.Rollout),
        (sync.Rollouts, rollouts.Rollouts),
        (sync.Stage, rollouts.Stage),
    ],
)
def test_the_sync_twin_has_every_method_of_the_original(twin: type, original: type) -> None:
    for name, member in vars(original).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            assert not inspect.iscoroutinefunction(getattr(twin, name)), name
    assert hasattr(twin, "__enter__") is hasattr(original, "__aenter__")


def test_text_is_decoded_with_replacement() -> None:
    assert _result().stdout_text == "out \ufffd"
    assert _result().check().ok


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"exit_code": 3}, ErrorCode.INVALID, "exited with 3: err"),
        ({"exit_code": None, "signal": 11}, ErrorCode.INVALID, "ended by signal 11"),
        ({"timed_out": True, "signal": 15}, ErrorCode.COMMAND_TIMEOUT, "was ended after 1.5 s"),
        ({"exit_code": None, "signal": 9, "oom": True}, ErrorCode.OOM, "ran out of memory"),
    ],
)
def test_a_checked_command_that_fails_says_how(
    changes: dict[str, object], code: ErrorCode, says: str
) -> None:
    with pytest.raises(CommandFailed, match=says) as caught:
        _result(**changes).check()
    assert caught.value.code is code
    assert caught.value.result.stderr == b"err"
