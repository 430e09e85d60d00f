"""What a lease's slices are to a sandbox: variables and device nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec_common.compute.model import CardMode, Slice
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.node import Gpu
from dsec_sandboxd.gpu_slices import GpuDevices, environment
from dsec_sandboxd.kernel.interface import SandboxSpec

MIB = 1024 * 1024
THIRD = Slice(card="GPU-1", percent=34, cu=34.0, memory_bytes=1000 * MIB + 5)
WHOLE = Slice(card="GPU-0", kind=CardMode.WHOLE, cu=100.0)
INSTANCE = Slice(card="GPU-1", kind=CardMode.MIG, mig_uuid="MIG-7", cu=14.0)


def devices(directory: Path, **named: str) -> GpuDevices:
    """Return two GPUs, whose files are names for ``/dev/null`` and ``/dev/zero``."""
    for name, device in {
        "nvidia0": "null",
        "nvidia5": "zero",
        "nvidiactl": "null",
        "nvidia-uvm": "full",
    }.items():
        (directory / name).symlink_to(f"/dev/{device}")
    (directory / "mps").mkdir()
    gpus = (Gpu(uuid="GPU-0", model="A100"), Gpu(uuid="GPU-1", model="A100", index=5))
    return GpuDevices(directory, directory / "mps", named, lambda: gpus)


def refused(gpus: GpuDevices, *slices: Slice) -> DsecError:
    with pytest.raises(DsecError) as error:
        gpus.nodes(slices)
    return error.value


def test_a_sandbox_without_slices_has_no_variables() -> None:
    assert environment(()) == {}


def test_a_third_of_a_card_is_said_in_the_variables_that_mps_obeys() -> None:
    assert environment([THIRD]) == {
        "CUDA_VISIBLE_DEVICES": "GPU-1",
        "NVIDIA_VISIBLE_DEVICES": "GPU-1",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "34",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1000M",
        "CUDA_MPS_PIPE_DIRECTORY": "/run/dsec/mps",
    }


def test_of_several_slices_the_smallest_sets_the_percentage_and_each_has_its_memory() -> None:
    other = Slice(card="GPU-0", percent=50, cu=50.0, memory_bytes=7 * MIB)
    variables = environment([other, THIRD])
    assert variables["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"
    assert variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "34"
    assert variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=7M,1=1000M"


def test_whole_cards_and_mig_instances_need_no_mps() -> None:
    assert environment([WHOLE]).keys() == {"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"}
    assert environment([INSTANCE])["CUDA_VISIBLE_DEVICES"] == "MIG-7"


def test_a_slice_is_the_node_of_its_card_by_index_and_what_all_cards_share(tmp_path: Path) -> None:
    nodes = devices(tmp_path).nodes([THIRD])
    assert nodes == (("nvidia5", 1, 5), ("nvidiactl", 1, 3), ("nvidia-uvm", 1, 7))


def test_two_slices_of_one_card_have_its_node_once(tmp_path: Path) -> None:
    assert len(devices(tmp_path).nodes([THIRD, THIRD])) == 3


def test_a_mig_instance_has_the_devices_that_the_settings_name(tmp_path: Path) -> None:
    gpus = devices(tmp_path, **{"MIG-7": "nvidia0"})
    assert [node.name for node in gpus.nodes([INSTANCE])][:2] == ["nvidia5", "nvidia0"]


def test_a_mig_instance_without_named_devices_is_unsupported(tmp_path: Path) -> None:
    error = refused(devices(tmp_path), INSTANCE)
    assert (error.code, "gpu_devices" in error.message) == (ErrorCode.UNSUPPORTED, True)


def test_a_card_that_is_gone_is_unavailable(tmp_path: Path) -> None:
    error = refused(devices(tmp_path), Slice(card="GPU-9"))
    assert (error.code, "GPU-9" in error.message) == (ErrorCode.UNAVAILABLE, True)


def test_what_is_no_device_is_given_to_nobody(tmp_path: Path) -> None:
    gpus = devices(tmp_path, **{"GPU-0": "secret"})
    assert refused(gpus, WHOLE).code is ErrorCode.UNAVAILABLE
    (tmp_path / "secret").write_text("a file of the host")
    assert "no character device" in refused(gpus, WHOLE).message


def test_mps_pipes_are_needed_by_parts_of_cards_only(tmp_path: Path) -> None:
    gpus = devices(tmp_path)
    assert gpus.pipes([WHOLE, INSTANCE]) is None
    assert gpus.pipes([THIRD]) == tmp_path / "mps"
    (tmp_path / "mps").rmdir()
    with pytest.raises(DsecError, match="gpu_mps_directory"):
        gpus.pipes([THIRD])


def test_a_specification_gets_devices_and_pipes_and_is_left_alone_without_slices(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    spec = SandboxSpec(
        local="a",
        layers=("base",),
        memory_bytes=1,
        cpus=1.0,
        pids=1,
        disk_bytes=1,
        inodes=1,
        run_directory=run,
    )
    gpus = devices(tmp_path)
    assert gpus.given_to(spec, ()) is spec
    given = gpus.given_to(spec, (THIRD,))
    assert (len(given.devices), given.mps_pipes) == (3, tmp_path / "mps")
    assert (run / "mps").is_dir()
