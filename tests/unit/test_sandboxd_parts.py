"""The small parts of the node daemon: admission, commands, uploads, layers held, machine read."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec_common.config import load_config
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.node import PlaceSandbox
from dsec_common.wire.sandbox import MIB, CreateSandbox, ExecCommand, Limits, SandboxState
from dsec_sandboxd.admission import LimitMaxima, check_placement
from dsec_sandboxd.commands import check_path, command_spec, joined
from dsec_sandboxd.config import SandboxdConfig, valid_node_name
from dsec_sandboxd.inventory import Inventory
from dsec_sandboxd.layer_holds import LayerHolds
from dsec_sandboxd.record_store import RecordStore
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.step_log import ATTRIBUTE_MAX, StepLog
from dsec_sandboxd.uploads import EARLY_BYTES_MAX, EARLY_PIECES_MAX, OrderedWriter


def placed(**changes: Any) -> PlaceSandbox:
    request = msgspec.structs.replace(CreateSandbox(base="base@1"), **changes)
    return PlaceSandbox(project="p", local="s1", request=request, valid_until=1.0)


RECORD = SandboxRecord(
    local="s1",
    project="p",
    placement_id="place",
    request_id="request",
    state=SandboxState.RUNNING,
    created_at=1.0,
    layer_references=("base@1",),
    layer_digests=("sha256:00",),
    limits=Limits(),
    env={"A": "1", "B": "1"},
)


# --- Admission ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"base": ""}, "base"),
        ({"limits": Limits(memory_bytes=0)}, "limits.memory_bytes"),
        ({"limits": Limits(memory_bytes=-1)}, "limits.memory_bytes"),
        ({"limits": Limits(cpus=0)}, "limits.cpus"),
        ({"limits": Limits(cpus=float("nan"))}, "limits.cpus"),
        ({"limits": Limits(pids=0)}, "limits.pids"),
        ({"limits": Limits(pids=10**9)}, "limits.pids"),
        ({"limits": Limits(inodes=1)}, "limits.inodes"),
        ({"limits": Limits(cu=1.0)}, "limits.cu"),
        ({"limits": Limits(cu=-1.0)}, "limits.cu"),
        ({"ttl_s": -1.0}, "ttl_s"),
        ({"ttl_s": float("inf")}, "ttl_s"),
        ({"env": {"A=B": ""}}, "env"),
        ({"env": {"A": "x\0"}}, "env"),
        ({"env": {"A": "x" * 200_000}}, "env"),
        ({"labels": {"": "x"}}, "labels"),
        ({"agent": "x" * 65}, "agent"),
        ({"agent": "a\nb"}, "agent"),
        ({"toolkits": tuple(f"t{n}@1" for n in range(64))}, "toolkits"),
    ],
)
def test_a_request_that_can_never_work_names_the_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(DsecError) as caught:
        check_placement(placed(**changes), LimitMaxima())
    assert caught.value.code is ErrorCode.INVALID
    assert caught.value.details["field"] == field


@pytest.mark.parametrize("rollout_id", ["x", "a.b.c", "*.x", "s0.>"])
def test_a_rollout_id_that_could_name_another_subject_is_refused(rollout_id: str) -> None:
    with pytest.raises(DsecError, match="rollout id"):
        check_placement(placed(rollout_id=rollout_id), LimitMaxima())


def test_the_writable_layer_is_never_larger_than_the_memory_it_lives_in() -> None:
    limits = check_placement(placed(limits=Limits(memory_bytes=64 * MIB)), LimitMaxima())
    assert limits.disk_bytes == 64 * MIB


# --- Commands -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"argv": ()}, "argv"),
        ({"argv": ("",)}, "argv"),
        ({"argv": ("echo", "a\0b")}, "argv"),
        ({"argv": ("echo", "x" * 131_072)}, "argv"),
        ({"argv": ("x",) * 5000}, "argv"),
        ({"cwd": "tmp"}, "cwd"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"timeout_s": 3601.0}, "timeout_s"),
        ({"output_limit_bytes": 1 << 20}, "output_limit_bytes"),
        ({"output_limit_bytes": -1}, "output_limit_bytes"),
        ({"user": "a b"}, "user"),
        ({"env": {"1": ""}}, "env"),
    ],
)
def test_a_command_that_can_never_run_names_the_field(changes: dict[str, Any], field: str) -> None:
    command = msgspec.structs.replace(ExecCommand(argv=("true",)), **changes)
    with pytest.raises(DsecError) as caught:
        command_spec(command, RECORD, timeout_max_s=3600.0)
    assert (caught.value.code, caught.value.details["field"]) == (ErrorCode.INVALID, field)


def test_a_commands_variables_are_on_top_of_the_sandboxs_own() -> None:
    command = ExecCommand(argv=("true",), env={"B": "2"})
    spec = command_spec(command, RECORD, timeout_max_s=3600.0)
    assert spec.env == {"A": "1", "B": "2"}
    assert spec.user == "0"  # root works in an image without /etc/passwd


def test_a_path_of_4096_bytes_is_an_invalid_path() -> None:
    check_path("/" + "x" * 4094, "path")
    with pytest.raises(DsecError) as caught:
        check_path("/" + "x" * 4095, "path")
    assert caught.value.details["reason"] == "invalid_path"


def test_a_logged_command_can_be_typed_again() -> None:
    assert joined(("sh", "-c", "echo 'a b'")) == """sh -c 'echo '"'"'a b'"'"''"""


# --- Uploads --------------------------------------------------------------------------------------


def memory_file() -> int:
    return os.memfd_create("upload", os.MFD_CLOEXEC)


@settings(deadline=None, max_examples=60)
@given(data=st.binary(max_size=400), piece=st.integers(1, 60), order=st.randoms())
def test_pieces_in_any_order_become_the_whole(data: bytes, piece: int, order: Any) -> None:
    async def run() -> None:
        descriptor = memory_file()
        try:
            writer = OrderedWriter(descriptor)
            offsets = list(range(0, len(data), piece))
            sent = offsets + offsets[:2]  # some come twice
            order.shuffle(sent)
            for offset in sent:
                writer.accept(offset, data[offset : offset + piece])
            await writer.complete(len(data), hashlib.sha256(data).hexdigest(), 0.0)
            assert os.pread(descriptor, 1000, 0) == data
        finally:
            os.close(descriptor)

    asyncio.run(run())


async def test_the_last_piece_waits_for_those_before_it() -> None:
    descriptor = memory_file()
    try:
        writer = OrderedWriter(descriptor)
        writer.accept(3, b"def")
        ending = asyncio.create_task(writer.complete(6, hashlib.sha256(b"abcdef").hexdigest(), 5.0))
        await asyncio.sleep(0)
        writer.accept(0, b"abc")
        await ending
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("size", "digest", "code"),
    [(4, "", ErrorCode.TIMEOUT), (2, "", ErrorCode.INVALID), (3, "00", ErrorCode.INVALID)],
)
async def test_an_upload_that_is_not_what_was_announced_is_refused(
    size: int, digest: str, code: ErrorCode
) -> None:
    descriptor = memory_file()
    try:
        writer = OrderedWriter(descriptor)
        writer.accept(0, b"abc")
        with pytest.raises(DsecError) as caught:
            await writer.complete(size, digest, 0.0)
        assert caught.value.code is code
    finally:
        os.close(descriptor)


async def test_pieces_too_far_ahead_are_refused() -> None:
    descriptor = memory_file()
    try:
        writer = OrderedWriter(descriptor)
        for number in range(EARLY_BYTES_MAX // 65536):
            writer.accept(1 + number * 65536, b"x" * 65536)
        with pytest.raises(DsecError, match="too far ahead"):
            writer.accept(1 + EARLY_BYTES_MAX, b"x")
        with pytest.raises(DsecError, match="negative"):
            writer.accept(-1, b"x")
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("piece", [b"", b"x"])
async def test_pieces_too_small_to_count_are_counted(piece: bytes) -> None:
    descriptor = memory_file()
    try:
        writer = OrderedWriter(descriptor)
        for number in range(EARLY_PIECES_MAX):
            writer.accept(1 + number, piece)
        with pytest.raises(DsecError, match="too far ahead"):
            writer.accept(1 + EARLY_PIECES_MAX, piece)
        writer.accept(0, b"x")
        assert writer.received_bytes == 1 + EARLY_PIECES_MAX * len(piece)
    finally:
        os.close(descriptor)


async def test_a_full_disk_ends_an_upload_for_good() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY | os.O_CLOEXEC)
    try:
        writer = OrderedWriter(descriptor)
        for _ in range(2):
            with pytest.raises(DsecError) as caught:
                writer.accept(0, b"abc")
            assert caught.value.code is ErrorCode.EXHAUSTED
    finally:
        os.close(descriptor)


# --- Layers held ----------------------------------------------------------------------------------


class Mounts:
    """A mounter with a gate, so that a test decides when a mount is done."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.refuse = False

    async def hold_layer(self, digest: str, image_path: Path) -> None:
        self.calls.append(f"hold {digest}")
        assert image_path.name == digest
        await self.gate.wait()
        if self.refuse:
            raise DsecError(ErrorCode.LAYER_ERROR, "no")

    async def release_layer(self, digest: str) -> None:
        self.calls.append(f"release {digest}")


def images(*digests: str) -> list[tuple[str, Path]]:
    return [(digest, Path("/images") / digest) for digest in digests]


async def test_a_layer_is_mounted_once_for_all_its_users() -> None:
    mounts = Mounts()
    holds = LayerHolds(mounts, idle_max=0)
    mounts.gate.clear()
    first = asyncio.create_task(holds.hold(images("a")))
    second = asyncio.create_task(holds.hold(images("a")))
    await asyncio.sleep(0)
    mounts.gate.set()
    await asyncio.gather(first, second)
    assert mounts.calls == ["hold a"]
    holds.release(["a"])
    await holds.close()
    assert mounts.calls == ["hold a"]
    holds.release(["a"])
    await holds.close()
    assert mounts.calls == ["hold a", "release a"]


async def test_idle_layers_stay_mounted_up_to_the_bound() -> None:
    mounts = Mounts()
    holds = LayerHolds(mounts, idle_max=2)
    await holds.hold(images("a", "b", "c"))
    holds.release(["a", "b", "c"])
    await holds.close()
    assert mounts.calls[3:] == ["release a"]
    await holds.hold(images("b"))
    assert mounts.calls[4:] == []


async def test_a_layer_that_is_wanted_again_in_time_is_not_released() -> None:
    mounts = Mounts()
    holds = LayerHolds(mounts, idle_max=0)
    await holds.hold(images("a"))
    holds.release(["a"])
    await holds.hold(images("a"))
    await holds.close()
    assert "release a" not in mounts.calls
    assert holds.mounted == {"a"}


async def test_a_mount_that_fails_leaves_nobody_counted() -> None:
    mounts = Mounts()
    mounts.refuse = True
    holds = LayerHolds(mounts, idle_max=0)
    with pytest.raises(DsecError):
        await holds.hold(images("a", "b"))
    await holds.close()
    assert (holds.users("a"), holds.users("b"), holds.mounted) == (0, 0, frozenset())
    mounts.refuse = False
    await holds.hold(images("a"))
    assert holds.mounted == {"a"}


# --- Records, machine, configuration --------------------------------------------------------------


def test_records_survive_the_daemon(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "records")
    other = msgspec.structs.replace(RECORD, local="s2")
    store.put(RECORD)
    store.put(other)
    store.delete("s2")
    store.delete("never")
    store.close()
    again = RecordStore(tmp_path / "records")
    assert again.load() == (RECORD,)
    again.close()


def test_a_second_daemon_of_the_same_node_is_refused(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "records")
    with pytest.raises(DsecError, match="no other sandboxd of this node"):
        RecordStore(tmp_path / "records")
    store.close()


def test_the_machine_is_read_from_the_kernel() -> None:
    inventory = Inventory()
    assert 0 < inventory.cpus() <= (os.cpu_count() or 1)
    assert 0 < inventory.memory_bytes_available() <= inventory.memory_bytes()


def test_a_cgroup_quota_bounds_what_the_node_has(tmp_path: Path) -> None:
    process, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (process / "self").mkdir(parents=True)
    (process / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 500 kB\n")
    (process / "self" / "cgroup").write_text("0::/a/b\n")
    (cgroups / "a" / "b").mkdir(parents=True)
    (cgroups / "a" / "b" / "cpu.max").write_text("max 100000\n")
    (cgroups / "a" / "cpu.max").write_text("50000 100000\n")
    (cgroups / "a" / "memory.max").write_text("204800\n")
    inventory = Inventory(process, cgroups)
    assert inventory.cpus() == 0.5
    assert inventory.memory_bytes() == 204_800


@pytest.mark.parametrize(
    ("host", "node"),
    [("node-1", "node-1"), ("a.b.c", "a-b-c"), ("*>", "node"), ("x" * 300, "x" * 63)],
)
def test_a_host_name_becomes_a_valid_node_name(host: str, node: str) -> None:
    assert valid_node_name(host) == node


@pytest.mark.parametrize(
    "flags",
    [
        ["--node", "a.b"],
        ["--node", "*"],
        ["--cpu-oversubscription", "0"],
        ["--sandboxes-max", "0"],
        ["--heartbeat-interval-s", "-1"],
        ["--memory-reserve-bytes", "-1"],
        ["--sandboxes-max", "many"],
    ],
)
def test_a_setting_that_cannot_work_is_a_configuration_error(flags: list[str]) -> None:
    with pytest.raises(DsecError, match="configuration of sandboxd"):
        load_config(SandboxdConfig, "sandboxd", flags, {})


# --- The behaviour log ----------------------------------------------------------------------------


class Written(list[Any]):
    """A list that a step log can write to."""


def test_a_sandboxs_steps_are_numbered_without_a_gap() -> None:
    written = Written()
    steps = StepLog("n1", written)
    for action in ("create", "exec", "delete"):
        steps.step(RECORD, action)
    steps.step(msgspec.structs.replace(RECORD, local="s2"), "create")
    assert [(step.sandbox_id, step.seq, step.action) for step in written] == [
        ("n1.s1", 1, "create"),
        ("n1.s1", 2, "exec"),
        ("n1.s1", 3, "delete"),
        ("n1.s2", 1, "create"),
    ]
    assert written[0].agent == "sandbox"


def test_numbers_kept_ahead_are_kept_once_and_are_a_gap_when_the_daemon_dies() -> None:
    kept: list[int] = []

    class Keeper:
        def keep_sequence(self, _local: str, _source: str, seq: int) -> None:
            kept.append(seq)

    written = Written()
    steps = StepLog("n1", written, keeper=Keeper())
    steps.step(RECORD, "create")
    steps.reserve(RECORD.local, 2)
    assert kept == [1, 3]
    steps.step(RECORD, "stage")
    steps.step(RECORD, "feedback")
    assert kept == [1, 3]
    steps.reserve(RECORD.local, 1)  # and here the daemon is killed
    later = StepLog("n1", written, "later", Keeper())
    later.resume(RECORD.local, "sandboxd", kept[-1])
    later.step(RECORD, "feedback")
    assert [step.seq for step in written] == [1, 2, 3, 5]
    assert kept == [1, 3, 4, 5]


def test_a_steps_attributes_are_bounded_and_can_be_written() -> None:
    written = Written()
    StepLog("n1", written).step(RECORD, "exec", attributes={"command": "\udcff" + "x" * 5000})
    (step,) = written
    assert len(step.attributes["command"]) == ATTRIBUTE_MAX
    step.serialize()


def test_a_log_that_refuses_never_fails_a_request() -> None:
    class Refusing:
        def append(self, _: object) -> None:
            raise DsecError(ErrorCode.UNAVAILABLE, "not running")

    steps = StepLog("n1", Refusing())
    steps.step(RECORD, "exec")
    assert steps.lost == 1


def test_a_command_may_not_outlast_the_memory_of_who_asked_for_it() -> None:
    with pytest.raises(DsecError, match="exec_timeout_max_s must be at most 6600"):
        load_config(SandboxdConfig, "sandboxd", ["--exec-timeout-max-s", "7200"], {})
