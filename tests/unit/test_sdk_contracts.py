"""Contracts as files: kept as they are written, and nonsense told by file, line and column."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts_shown import WEATHER_FORECASTER
from dsec.contracts import Contract, contract_of, lint_contract, read_contract
from dsec.creating import command_of, create_request
from dsec.dags import dag_spec
from dsec_common.asdl.documents import TEXT_CHARACTERS_MAX
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.sandbox import MIB, Limits


def written(directory: Path, text: str) -> Path:
    path = directory / "contract.yaml"
    path.write_text(text)
    return path


def test_a_contract_is_kept_whole_and_its_version_as_it_was_written(tmp_path: Path) -> None:
    kept, contract = read_contract(written(tmp_path, WEATHER_FORECASTER))
    assert kept["lifecycle"]["retry_policy"] == {
        "max_attempts": 2,
        "backoff": "exponential",
        "jitter": 0.1,
    }
    assert kept["version"] == contract.version == "1.0"
    assert contract.permissions == ("network_access",)


def test_a_contract_may_leave_its_name_to_whoever_registers_it(tmp_path: Path) -> None:
    path = written(tmp_path, "description: nameless\n")
    assert read_contract(path, whole=False)[1] == Contract(description="nameless")
    with pytest.raises(DsecError, match=r"contract\.yaml:1:1: name: name is missing"):
        read_contract(path)


def test_every_problem_is_told_with_its_file_line_and_column(tmp_path: Path) -> None:
    path = written(tmp_path, "name: a\nversion: 1\ncomand: [x]\nlifecycle: {timeout: 5}\n")
    with pytest.raises(DsecError) as caught:
        read_contract(path)
    assert caught.value.code is ErrorCode.INVALID
    first, second = caught.value.message.splitlines()
    assert first == f"{path}:3:1: comand: 'comand' is not known here; did you mean 'command'?"
    assert second.startswith(f"{path}:4:22: lifecycle.timeout: ")
    assert len(lint_contract(path).problems) == 2


def test_a_file_that_is_no_text_or_not_there_is_invalid(tmp_path: Path) -> None:
    path = tmp_path / "bytes.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    for file, said in ((path, "is no text"), (tmp_path / "none.yaml", "cannot be read")):
        with pytest.raises(DsecError, match=said):
            read_contract(file)
        with pytest.raises(DsecError, match=said):
            dag_spec(file)


def test_no_more_of_a_file_is_read_than_a_contract_can_have(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DsecError, match="too large to be a contract"):
        read_contract(path)
    path.write_text("#" * (TEXT_CHARACTERS_MAX + 1))
    with pytest.raises(DsecError, match="at most 131072"):
        read_contract(path)


def test_a_contract_is_given_as_a_path_a_mapping_or_itself(tmp_path: Path) -> None:
    path = written(tmp_path, WEATHER_FORECASTER)
    kept, contract = read_contract(path)
    assert contract_of(path) == contract_of(str(path)) == contract_of(kept) == contract
    assert contract_of(contract) is contract
    with pytest.raises(DsecError, match="the contract: nmae"):
        contract_of({"nmae": "a"})
    with pytest.raises(DsecError, match="give a path, a mapping or a Contract"):
        contract_of(7)  # type: ignore[arg-type]


def test_a_request_is_made_as_its_contract_says() -> None:
    contract = {"name": "bot", "resources": {"memory_mb": 64}, "lifecycle": {"timeout": "2min"}}
    request = create_request("b@1", limits=Limits(), command=command_of("true"), contract=contract)
    assert request.command is not None
    assert (request.agent, request.limits.memory_bytes) == ("bot", 64 * MIB)
    assert request.command.timeout_s == 120
    with pytest.raises(DsecError, match="does not allow"):
        create_request("b@1", limits=Limits(memory_bytes=65 * MIB), contract=contract)
