"""Steps are gathered before they are written: read back at once, and never behind the position."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dsec_common.errors import DsecError
from dsec_common.wire.trace import TraceStep
from dsec_tracer.bills import Bills
from dsec_tracer.events import SandboxKey
from dsec_tracer.numbering import TracedSandbox
from dsec_tracer.store import StepStore

KEY = SandboxKey("default", "node-1.one")
OTHER = SandboxKey("default", "node-1.two")
POSITION = {("dsec-behavior-logs", 0): 2}

DIES = """
import os, sys
from pathlib import Path
from tests.unit.test_tracer_store import KEY, POSITION, put
from dsec_tracer.bills import Bills
from dsec_tracer.numbering import TracedSandbox
from dsec_tracer.store import StepStore

store, sandbox = StepStore(Path(sys.argv[1])), TracedSandbox()
put(store, sandbox, 1)
put(store, sandbox, 2)
store.keep_position(POSITION, Bills())
for seq in range(3, 3 + int(sys.argv[2])):
    put(store, sandbox, seq)
os._exit(0)
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StepStore]:
    it = StepStore(tmp_path / "store")
    yield it
    it.close()


def put(store: StepStore, sandbox: TracedSandbox, seq: int, key: SandboxKey = KEY) -> None:
    sandbox.take("writer", seq)
    sandbox.steps += 1
    store.put(key, sandbox, TraceStep(seq=seq, time=1.0, agent="a", action="exec", status="ok"))


def numbers(store: StepStore, key: SandboxKey = KEY) -> list[int]:
    return [seq for seq, _ in store.steps(key, 0, 10_000)[0]]


def test_a_step_is_read_back_at_once(store: StepStore) -> None:
    sandbox = TracedSandbox()
    put(store, sandbox, 1)
    assert numbers(store) == [1]
    put(store, sandbox, 2)
    assert numbers(store) == [1, 2]


def test_a_forgotten_sandbox_lacks_what_was_gathered_of_it_and_another_does_not(
    tmp_path: Path,
) -> None:
    store = StepStore(tmp_path)
    put(store, TracedSandbox(), 1)
    put(store, TracedSandbox(), 1, OTHER)
    store.forget(KEY)
    assert numbers(store) == []
    assert numbers(store, OTHER) == [1]
    put(store, TracedSandbox(), 7)
    store.close()
    again = StepStore(tmp_path)
    assert numbers(again) == [7]
    assert {key for key, _ in again.load()} == {KEY, OTHER}
    again.close()


@pytest.mark.parametrize("later", [1, 2_000])
def test_a_crash_takes_no_step_before_the_position(tmp_path: Path, later: int) -> None:
    subprocess.run([sys.executable, "-c", DIES, str(tmp_path), str(later)], check=True)
    store = StepStore(tmp_path)
    kept = numbers(store)
    assert store.position() == POSITION
    assert kept == list(range(1, len(kept) + 1))
    assert len(kept) >= 2
    ((key, sandbox),) = store.load()
    # What is known of the sandbox is of just those steps: the others are read once more.
    assert (key, sandbox.steps, sandbox.last_seq) == (KEY, len(kept), len(kept))
    store.close()


def test_what_the_disk_refuses_is_written_later(
    store: StepStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def write(self, _batch: Any) -> NoReturn:
            raise Exception("No space left on device")  # noqa: TRY002  as rocksdict does

    put(store, TracedSandbox(), 1)
    with monkeypatch.context() as broken:
        broken.setattr(store, "_database", Full())
        with pytest.raises(DsecError, match="No space left"):
            store.keep_position(POSITION, Bills())
    assert store.position() == {}
    assert numbers(store) == [1]
    assert store.position() == POSITION
