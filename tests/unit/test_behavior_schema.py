"""The generated protobuf code is what the published schema gives."""

from __future__ import annotations

import importlib.resources
import subprocess
import sys
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

import dsec_common.wire
from dsec_common.wire import behavior_pb2


def test_the_generated_code_matches_the_schema(tmp_path: Path) -> None:
    schema = Path(str(importlib.resources.files(dsec_common.wire) / "behavior.proto"))
    output = tmp_path / "descriptors"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{schema.parent}",
            f"--descriptor_set_out={output}",
            f"--python_out={tmp_path}",
            f"--pyi_out={tmp_path}",
            schema.name,
        ],
        check=True,
    )
    (fresh,) = FileDescriptorSet.FromString(output.read_bytes()).file
    committed = FileDescriptorProto()
    behavior_pb2.DESCRIPTOR.CopyToProto(committed)
    for field in fresh.message_type[0].field:
        field.ClearField("json_name")  # protoc fills it in, the generated code leaves it out
    for message in fresh.message_type[0].nested_type:
        for field in message.field:
            field.ClearField("json_name")
    assert committed == fresh
    stubs = (tmp_path / "behavior_pb2.pyi").read_text()
    assert (schema.parent / "behavior_pb2.pyi").read_text() == stubs


def test_field_numbers_are_never_reused() -> None:
    numbers = {field.name: field.number for field in behavior_pb2.BehaviorLog.DESCRIPTOR.fields}
    assert list(numbers.values()) == list(range(1, len(numbers) + 1))
    assert numbers["sandbox_id"] == 1
    assert numbers["detail_shed"] == 23
