from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec.stack.child import Child, ServiceSpec
from dsec.stack.layout import Layout, PartRecord, StackLock, StackRecord
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.processes import ProcessIdentity, wait_exit

FRAMEWORK = Path(__file__).parent.parent / "framework"


class Reports:
    """What the supervisor would have said."""

    def __init__(self) -> None:
        self.seen: asyncio.Queue[tuple[str, Mapping[str, Any]]] = asyncio.Queue()

    async def __call__(self, what: str, facts: Mapping[str, Any]) -> None:
        self.seen.put_nowait((what, facts))


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ServiceSpec]:
    monkeypatch.setenv("PYTHONPATH", str(FRAMEWORK))

    def make(behaviour: str) -> ServiceSpec:
        runtime_file = tmp_path / "small.json"
        return ServiceSpec(
            name="small",
            module="small_service",
            arguments=(str(runtime_file), behaviour),
            runtime_file=runtime_file,
            log=tmp_path / "small.log",
        )

    return make


@asynccontextmanager
async def _stopped_afterwards(child: Child) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await child.stop(0.2)


async def test_a_service_that_stands_back_does_so_from_its_start(
    spec: Callable[[str], ServiceSpec],
) -> None:
    child = Child(msgspec.structs.replace(spec("run"), niceness=5), Reports())
    async with _stopped_afterwards(child):
        await child.start(10)
        assert child.identity is not None
        assert os.getpriority(os.PRIO_PROCESS, child.identity.pid) == os.nice(0) + 5


async def test_a_service_is_started_when_it_says_that_it_runs_and_stops_in_order(
    spec: Callable[[str], ServiceSpec],
) -> None:
    child = Child(spec("run"), Reports())
    async with _stopped_afterwards(child):
        await child.start(20)
        assert child.http_port == 1
        assert child.identity is not None
        assert await child.stop(20)
        assert child.identity is None


@pytest.mark.parametrize(
    ("behaviour", "code", "says"),
    [
        ("fail", ErrorCode.UNAVAILABLE, "small ended with code 1 while starting.*failed: no disk"),
        ("refuse", ErrorCode.INVALID, "refused its configuration: small-service: unknown setting"),
    ],
)
async def test_a_service_that_cannot_start_is_told_with_the_end_of_its_log(
    spec: Callable[[str], ServiceSpec], behaviour: str, code: ErrorCode, says: str
) -> None:
    child = Child(spec(behaviour), Reports())
    with pytest.raises(DsecError, match=f"(?s){says}") as caught:
        await child.start(20)
    assert caught.value.code is code
    assert child.identity is None


async def test_a_service_that_hangs_while_starting_is_told_and_can_be_stopped(
    spec: Callable[[str], ServiceSpec],
) -> None:
    child = Child(spec("hang"), Reports())
    async with _stopped_afterwards(child):
        with pytest.raises(DsecError, match=r"is not running after 0\.3 s"):
            await child.start(0.3)


async def test_a_service_that_ignores_term_is_killed_and_that_is_said(
    spec: Callable[[str], ServiceSpec],
) -> None:
    child = Child(spec("ignore-term"), Reports())
    await child.start(20)
    assert not await child.stop(0.2)
    assert child.identity is None


async def test_a_crashed_service_is_said_and_started_again(
    spec: Callable[[str], ServiceSpec],
) -> None:
    reports = Reports()
    child = Child(spec("run"), reports)
    async with _stopped_afterwards(child):
        await child.start(20)
        first = child.identity
        assert first is not None
        watching = asyncio.create_task(child.watch(20))
        first.signal(signal.SIGKILL)
        what, facts = await asyncio.wait_for(reports.seen.get(), 20)
        assert (what, facts["how"], facts["restart_in_s"]) == ("service_ended", "signal 9", 0.5)
        what, facts = await asyncio.wait_for(reports.seen.get(), 20)
        assert (what, facts["restarts"]) == ("service_restarted", 1)
        assert child.identity not in {None, first}
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_a_service_dies_with_a_supervisor_that_is_killed(
    spec: Callable[[str], ServiceSpec], tmp_path: Path
) -> None:
    service = spec("run")
    code = (
        "import asyncio, signal, sys\n"
        "from pathlib import Path\n"
        "from dsec.stack.child import Child, ServiceSpec\n"
        "async def tell(*_): pass\n"
        "async def main():\n"
        "    path = Path(sys.argv[1])\n"
        "    child = Child(ServiceSpec(name='small', module='small_service',\n"
        "        arguments=(str(path), 'run'), runtime_file=path, log=path.with_suffix('.log')),\n"
        "        tell)\n"
        "    await child.start(20)\n"
        "    print(child.identity.pid, flush=True)\n"
        "    signal.pause()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(  # noqa: ASYNC220  it is to be killed
        [sys.executable, "-c", code, str(service.runtime_file)], stdout=subprocess.PIPE
    ) as supervisor:
        assert supervisor.stdout is not None
        line = await asyncio.to_thread(supervisor.stdout.readline)
        identity = ProcessIdentity.of(int(line))
        assert identity is not None
        supervisor.kill()
    assert await asyncio.to_thread(identity.wait_gone, 20)


# --- Identity, lock and record ------------------------------------------------------------------


async def test_a_process_is_known_by_its_start_and_never_mistaken_for_another() -> None:
    process = subprocess.Popen(["sleep", "60"])  # noqa: ASYNC220  it is the thing under test
    identity = ProcessIdentity.of(process.pid)
    assert identity is not None
    assert identity.alive
    other = ProcessIdentity(identity.pid, identity.start_time + 1)
    assert not other.alive
    assert not other.signal(signal.SIGKILL)
    assert other.wait_gone(0)
    assert not identity.wait_gone(0)
    identity.signal(signal.SIGKILL)
    await wait_exit(process.pid)
    assert not identity.alive
    process.wait()
    assert not identity.signal(signal.SIGKILL)


def test_a_state_directory_has_one_holder_and_the_second_is_told_who(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    lock = StackLock.take(layout)
    me = ProcessIdentity.of(os.getpid())
    assert me is not None
    layout.write_record(StackRecord(supervisor=me, state="running"))
    with pytest.raises(DsecError, match=f"already runs .*process {os.getpid()}, running") as caught:
        StackLock.take(layout)
    assert caught.value.code is ErrorCode.CONFLICT
    lock.release()
    StackLock.take(layout).release()


def test_what_a_killed_supervisor_left_is_ended_and_a_recycled_pid_is_spared(
    tmp_path: Path,
) -> None:
    layout = Layout(tmp_path)
    layout.prepare()
    left, stranger = subprocess.Popen(["sleep", "60"]), subprocess.Popen(["sleep", "60"])
    theirs, mine = ProcessIdentity.of(stranger.pid), ProcessIdentity.of(left.pid)
    assert theirs is not None
    recycled = ProcessIdentity(theirs.pid, theirs.start_time - 1)
    parts = (PartRecord(name="nats", process=recycled), PartRecord(name="broker", process=mine))
    layout.write_record(StackRecord(supervisor=recycled, state="running", parts=parts))
    try:
        assert layout.clean_after_crash() == ["broker"]
        assert left.wait(10) == -signal.SIGTERM
        assert stranger.poll() is None
        assert layout.read_record() is None
        assert layout.clean_after_crash() == []
    finally:
        stranger.kill()
        stranger.wait()
        left.kill()
        left.wait()


def test_a_state_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DsecError, match="--state-directory"):
        Layout(tmp_path / "file" / "below").prepare()
