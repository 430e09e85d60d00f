from __future__ import annotations

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.layers.names import (
    DigestReference,
    NamedReference,
    parse_reference,
    validate_name,
    validate_version,
)


@pytest.mark.parametrize("name", ["python", "py-3.11_slim", "0", "a" * 64])
def test_an_ordinary_name_is_kept(name: str) -> None:
    assert validate_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "Python", "-a", ".", "..", ".a", "a/b", "a b", "a*", "a>", "a\n", "a" * 65, "é"]
)
def test_a_name_that_could_mean_something_else_is_invalid(name: str) -> None:
    with pytest.raises(DsecError) as refused:
        validate_name(name)
    assert refused.value.code is ErrorCode.INVALID


@pytest.mark.parametrize("version", ["", "..", "1/2", "1@2", "1 2", "*", "1\n", "9" * 300])
def test_a_version_that_could_mean_something_else_is_invalid(version: str) -> None:
    with pytest.raises(DsecError) as refused:
        validate_version(version)
    assert refused.value.code is ErrorCode.INVALID
    assert len(str(refused.value)) < 300


def test_references_are_by_name_or_by_digest() -> None:
    assert parse_reference("python@3.11+a") == NamedReference("python", "3.11+a")
    assert parse_reference("python") == NamedReference("python", "")
    digest = "sha256:" + "0f" * 32
    assert parse_reference(digest) == DigestReference(digest)


@pytest.mark.parametrize(
    "text",
    ["", "@1", "a@", "a@b@c", "sha256:12", "sha256:" + "AB" * 32, "../x@1", "a@../1", "x" * 300],
)
def test_a_malformed_reference_is_invalid(text: str) -> None:
    with pytest.raises(DsecError) as refused:
        parse_reference(text)
    assert refused.value.code is ErrorCode.INVALID
    assert len(str(refused.value)) < 400
