from __future__ import annotations

from pathlib import Path

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.layer import LayerKind, ListLayers
from dsec_sandboxd.config import SandboxdConfig
from dsec_sandboxd.layer_listing import page_of
from dsec_sandboxd.layers.names import TagReference, parse_reference
from dsec_sandboxd.layers.object_names import NameDocument, NamedRecord
from dsec_sandboxd.layers.records import HISTORY_MAX, Layer, ReferenceRecord, TagRecord
from dsec_sandboxd.layers.urls import check_url, s3_options, store_url


@pytest.mark.parametrize(
    "url",
    [
        "dir:/srv/layers",
        "nats:dsec-layers",
        "s3://bucket",
        "s3://bucket/a/b?endpoint=http://127.0.0.1:9000&region=eu-1",
    ],
)
def test_a_layer_store_is_named_by_a_url(url: str) -> None:
    check_url(url)
    assert SandboxdConfig(layers_backend=url).layers_backend == url


@pytest.mark.parametrize(
    "url",
    ["dir:relative", "dir:", "nats:", "s3://", "s3:bucket", "s3://b?secret=x", "http://x", "x"],
)
def test_what_names_no_layer_store_is_refused_in_the_configuration(url: str) -> None:
    with pytest.raises(DsecError) as caught:
        check_url(url)
    assert caught.value.code is ErrorCode.INVALID
    with pytest.raises(ValueError, match=r"layer store|bucket"):
        SandboxdConfig(layers_backend=url)


def test_without_a_backend_the_store_is_the_directory() -> None:
    assert store_url("", Path("/var/lib/dsec/layers")) == "dir:/var/lib/dsec/layers"
    assert store_url("nats:dsec-layers", Path("/x")) == "nats:dsec-layers"
    assert s3_options("s3://b/c?region=r") == {"region": "r"}


@pytest.mark.parametrize("settings", [{"layers_cache_bytes": 0}, {"layers_garbage_interval_s": 0}])
def test_a_cache_or_an_interval_of_nothing_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be more than 0"):
        SandboxdConfig(**settings)  # type: ignore[arg-type]


def test_a_tag_is_told_from_a_version_and_a_digest() -> None:
    assert parse_reference("python:latest") == TagReference("python", "latest")
    assert str(TagReference("python", "latest")) == "python:latest"
    for text in ("python:", ":latest", "a:b:c", "a:b@1", "sha256:latest", "A:b"):
        with pytest.raises(DsecError) as caught:
            parse_reference(text)
        assert caught.value.code is ErrorCode.INVALID


def record(digest: str) -> NamedRecord:
    reference = ReferenceRecord(digest=digest, kind=LayerKind.BASE, created_at=1.0)
    return NamedRecord(reference=reference, size_bytes=1, entries=1)


def test_histories_are_bounded_and_keep_the_latest() -> None:
    tag = TagRecord(version="0", moved_at=0.0)
    document = NameDocument().with_version("1", record("d0"))
    for number in range(1, 2 * HISTORY_MAX):
        tag = tag.moved(str(number), float(number))
        document = document.with_version("1", record(f"d{number}"))
    history = document.versions["1"].reference.history
    assert [len(tag.history), len(history)] == [HISTORY_MAX, HISTORY_MAX]
    assert tag.history[-1].meaning == str(2 * HISTORY_MAX - 2)
    assert history[-1].meaning == f"d{2 * HISTORY_MAX - 2}"
    assert tag.moved(tag.version, 99.0) is tag


def test_a_page_says_where_the_next_begins_only_if_there_is_one() -> None:
    layers = [
        Layer(
            project="p",
            name=name,
            version="1",
            digest=name,
            kind=LayerKind.BASE,
            size_bytes=1,
            entries=1,
            created_at=1.0,
            source_digest="",
            image_path=Path("/x"),
        )
        for name in ("a", "b", "c")
    ]
    page = page_of(layers, "n", "s", ListLayers(limit=2))
    assert ([layer.reference for layer in page.layers], page.next_after) == (["a@1", "b@1"], "b@1")
    rest = page_of(layers, "n", "s", ListLayers(limit=2, after=page.next_after))
    assert ([layer.reference for layer in rest.layers], rest.next_after) == (["c@1"], "")
