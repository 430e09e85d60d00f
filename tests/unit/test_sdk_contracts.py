"""Contracts of agents: what they say is told as it is written, and nonsense by its field."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.contracts import Contract, read_contract
from dsec.dags import dag_spec
from dsec_common.errors import DsecError, ErrorCode

WHOLE = """
name: weather
version: 1.10
description: Fetch weather data
capabilities:
  - {tool: http_client, permissions: [network_access]}
  - {tool: calculator}
  - {tool: other, permissions: [network_access, gpu]}
lifecycle: {retry_policy: {max_attempts: 3}}
"""


def written(directory: Path, text: str) -> Path:
    path = directory / "contract.yaml"
    path.write_text(text)
    return path


def test_a_contract_is_kept_whole_and_its_version_as_it_was_written(tmp_path: Path) -> None:
    kept, needed = read_contract(written(tmp_path, WHOLE))
    assert kept["lifecycle"] == {"retry_policy": {"max_attempts": 3}}
    assert (needed.name, needed.version, needed.description) == (
        "weather",
        "1.10",
        "Fetch weather data",
    )
    assert needed.permissions == ("network_access", "gpu")


@pytest.mark.parametrize("version", ["1", "1.0", "2.30", "'1.10'", "0x10", "1e3"])
def test_a_version_that_looks_like_a_number_is_text(tmp_path: Path, version: str) -> None:
    _, needed = read_contract(written(tmp_path, f"name: a\nversion: {version}\n"))
    assert needed.version == version.strip("'")


def test_a_contract_may_say_next_to_nothing(tmp_path: Path) -> None:
    assert read_contract(written(tmp_path, "{}"))[1] == Contract()
    assert read_contract(written(tmp_path, "capabilities:\ndescription:\n"))[1].permissions == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a\n", "no mapping of names"),
        ("name: [1]\n", "name"),
        ("version: {a: b}\n", "version"),
        ("capabilities: 7\n", "capabilities"),
        ("capabilities: [7]\n", "capabilities"),
        ("capabilities: [{permissions: x}]\n", "permissions"),
        ("a: {b\n", "cannot be read as YAML"),
    ],
)
def test_a_contract_that_makes_no_sense_is_refused_with_its_field(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(DsecError, match=said) as caught:
        read_contract(written(tmp_path, text))
    assert caught.value.code is ErrorCode.INVALID
    assert "contract.yaml" in caught.value.message


def test_a_file_that_is_no_text_or_not_there_is_invalid(tmp_path: Path) -> None:
    path = tmp_path / "bytes.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    for file, said in ((path, "is no text"), (tmp_path / "none.yaml", "cannot be read")):
        with pytest.raises(DsecError, match=said):
            read_contract(file)
        with pytest.raises(DsecError, match=said):
            dag_spec(file)
