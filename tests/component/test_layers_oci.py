"""Container images: how their layers become one tree, and how damaged ones are refused."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.layers.limits import ImportLimits, ImportWatch
from dsec_sandboxd.layers.oci import find_image, looks_like_image, write_image
from dsec_sandboxd.layers.tree import TreeWriter
from layer_builders import (
    Member,
    directory_member,
    file_member,
    link_member,
    look,
    tar_bytes,
    write_oci_layout,
)

LIMITS = ImportLimits(bytes_max=1 << 20, document_bytes_max=1 << 16)


def flatten(layout: Path, root: Path, tag: str = "") -> dict[str, bytes | str]:
    """Unpack the image in ``layout`` into ``root`` and return each entry's content."""
    root.mkdir()
    image = find_image(layout, tag, LIMITS, ImportWatch())
    with TreeWriter(root, LIMITS) as tree:
        write_image(image, tree, ImportWatch(), LIMITS)
        tree.finish()
    return {name: seen.content for name, seen in look(root).items() if name != "."}


def flatten_layers(tmp_path: Path, *layers: list[Member]) -> dict[str, bytes | str]:
    layout = tmp_path / "layout"
    write_oci_layout(layout, [tar_bytes(layer) for layer in layers])
    return flatten(layout, tmp_path / "tree")


def refused(layout: Path, root: Path, tag: str = "") -> DsecError:
    with pytest.raises(DsecError) as error:
        flatten(layout, root, tag)
    return error.value


def test_upper_layers_replace_what_lower_ones_brought(tmp_path: Path) -> None:
    assert flatten_layers(
        tmp_path,
        [file_member("a", b"1"), file_member("b", b"1"), directory_member("d")],
        [file_member("b", b"2"), file_member("d/e", b"2")],
    ) == {"a": b"1", "b": b"2", "d": b"", "d/e": b"2"}


def test_a_whiteout_hides_a_file_or_a_whole_directory_of_the_layers_below(tmp_path: Path) -> None:
    assert flatten_layers(
        tmp_path,
        [file_member("a"), file_member("d/e/f"), file_member("d/g", b"kept")],
        [file_member(".wh.a", b""), file_member("d/.wh.e", b"")],
    ) == {"d": b"", "d/g": b"kept"}


@pytest.mark.parametrize("opaque_last", [False, True])
def test_an_opaque_directory_hides_only_what_is_below_its_layer(
    tmp_path: Path,
    opaque_last: bool,
) -> None:
    upper = [file_member("d/.wh..wh..opq", b""), file_member("d/e/new", b"2")]
    assert flatten_layers(
        tmp_path,
        [file_member("d/old"), file_member("d/e/old"), file_member("other", b"1")],
        list(reversed(upper)) if opaque_last else upper,
    ) == {"d": b"", "d/e": b"", "d/e/new": b"2", "other": b"1"}


@pytest.mark.parametrize("whiteout_last", [False, True])
def test_a_whiteout_spares_what_its_own_layer_brings(tmp_path: Path, whiteout_last: bool) -> None:
    upper = [file_member(".wh.d", b""), directory_member("d"), file_member("d/new", b"2")]
    assert flatten_layers(
        tmp_path,
        [file_member("d/old"), file_member("d/older")],
        list(reversed(upper)) if whiteout_last else upper,
    ) == {"d": b"", "d/new": b"2"}


def test_a_name_comes_back_in_a_layer_above_its_whiteout(tmp_path: Path) -> None:
    assert flatten_layers(
        tmp_path, [file_member("a", b"1")], [file_member(".wh.a", b"")], [file_member("a", b"3")]
    ) == {"a": b"3"}


def test_a_whiteout_of_nothing_and_the_book_keeping_of_aufs_are_ignored(tmp_path: Path) -> None:
    assert (
        flatten_layers(
            tmp_path,
            [
                file_member(".wh.nothing", b""),
                file_member("none/.wh..wh..opq", b""),
                directory_member(".wh..wh.plnk"),
            ],
        )
        == {}
    )


@pytest.mark.parametrize("name", [".wh.", ".wh..", ".wh...", "d/.wh..."])
def test_a_whiteout_that_names_no_entry_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DsecError) as error:
        flatten_layers(tmp_path, [file_member("d/e")], [file_member(name, b"")])
    assert error.value.code is ErrorCode.LAYER_ERROR


def test_a_whiteout_never_reaches_through_a_symbolic_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "d").mkdir(parents=True)
    assert flatten_layers(
        tmp_path,
        [link_member("a", "../outside")],
        [file_member("a/.wh.d", b""), file_member("a/.wh..wh..opq", b"")],
    ) == {"a": "../outside"}
    assert (outside / "d").is_dir()


def test_a_hard_link_may_name_a_file_of_a_layer_below(tmp_path: Path) -> None:
    assert flatten_layers(
        tmp_path, [file_member("a", b"1")], [link_member("b", "a", hard=True)]
    ) == {"a": b"1", "b": b"1"}


def test_limits_hold_for_all_layers_together(tmp_path: Path) -> None:
    with pytest.raises(DsecError) as error:
        flatten_layers(tmp_path, *[[file_member("a", bytes(600_000))] for _ in range(2)])
    assert error.value.code is ErrorCode.EXHAUSTED


def test_compressed_layers_are_read(tmp_path: Path) -> None:
    layout = tmp_path / "layout"
    write_oci_layout(layout, [gzip.compress(tar_bytes([file_member("a", b"1")]))])
    assert flatten(layout, tmp_path / "tree") == {"a": b"1"}


def test_an_image_is_chosen_by_its_tag(tmp_path: Path) -> None:
    layout = tmp_path / "layout"
    write_oci_layout(layout, [tar_bytes([file_member("a")])], tag="1.0")
    write_oci_layout(layout, [tar_bytes([file_member("b")])], tag="registry.example/demo:2.0")
    assert set(flatten(layout, tmp_path / "one", "1.0")) == {"a"}
    assert set(flatten(layout, tmp_path / "two", "2.0")) == {"b"}
    assert set(flatten(layout, tmp_path / "whole", "demo:2.0")) == {"b"}
    for number, tag in enumerate(["", "3.0"]):
        error = refused(layout, tmp_path / f"refused{number}", tag)
        assert error.code is ErrorCode.INVALID
        assert "1.0" in error.message
        assert "demo:2.0" in error.message


def test_the_image_for_this_machine_is_chosen(tmp_path: Path) -> None:
    layout = tmp_path / "layout"
    for architecture in ("amd64", "arm64", "unknown"):
        member = file_member("which", architecture.encode())
        write_oci_layout(layout, [tar_bytes([member])], architecture=architecture)
    assert flatten(layout, tmp_path / "tree")["which"] in {b"amd64", b"arm64"}


def test_an_image_for_other_machines_only_is_refused(tmp_path: Path) -> None:
    layout = tmp_path / "layout"
    write_oci_layout(layout, [tar_bytes([])], architecture="s390x")
    error = refused(layout, tmp_path / "tree")
    assert error.code is ErrorCode.INVALID
    assert "linux/s390x" in error.message


def test_a_damaged_layer_is_refused(tmp_path: Path) -> None:
    layout = tmp_path / "layout"
    data = tar_bytes([file_member("a")])
    write_oci_layout(layout, [data])
    blob = layout / "blobs" / "sha256" / hashlib.sha256(data).hexdigest()
    blob.write_bytes(data[:600] + b"x" + data[601:])
    assert "damaged" in refused(layout, tmp_path / "one").message
    blob.unlink()
    assert "missing" in refused(layout, tmp_path / "two").message


@pytest.mark.parametrize("digest", ["sha256:../../secret", "md5:00", "sha256:" + "0" * 63, ""])
def test_a_digest_that_is_none_is_refused(tmp_path: Path, digest: str) -> None:
    layout = tmp_path / "layout"
    write_oci_layout(layout, [])
    index = {"manifests": [{"digest": digest, "size": 2, "mediaType": ""}]}
    (layout / "index.json").write_text(json.dumps(index))
    assert refused(layout, tmp_path / "tree").code is ErrorCode.LAYER_ERROR


@pytest.mark.parametrize(
    "document", ["", "[]", "{}", '{"manifests": 3}', "[" * 9_000, " " * 70_000]
)
def test_a_document_that_is_not_understood_is_refused(tmp_path: Path, document: str) -> None:
    layout = tmp_path / "layout"
    write_oci_layout(layout, [])
    (layout / "index.json").write_text(document)
    assert refused(layout, tmp_path / "tree").code is ErrorCode.LAYER_ERROR


def write_docker_save(directory: Path, layer_name: str, diff_id: str) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"rootfs": {"diff_ids": [diff_id]}}))
    images = [{"Config": "config.json", "RepoTags": None, "Layers": [layer_name]}]
    (directory / "manifest.json").write_text(json.dumps(images))


def test_old_docker_archives_may_link_their_parts_to_each_other(tmp_path: Path) -> None:
    layout = tmp_path / "image"
    data = tar_bytes([file_member("a", b"1")])
    write_docker_save(layout, "two/layer.tar", f"sha256:{hashlib.sha256(data).hexdigest()}")
    for name in ("one", "two"):
        (layout / name).mkdir()
    (layout / "one" / "layer.tar").write_bytes(data)
    (layout / "two" / "layer.tar").symlink_to("../one/layer.tar")
    assert flatten(layout, tmp_path / "tree") == {"a": b"1"}
    write_docker_save(layout, "two/layer.tar", "sha256:" + "0" * 64)
    assert "damaged" in refused(layout, tmp_path / "damaged").message


@pytest.mark.parametrize("name", ["../secret.tar", "/etc/passwd", "link", "gone", "a\0b", "."])
def test_a_part_outside_of_the_image_is_refused(tmp_path: Path, name: str) -> None:
    data = tar_bytes([file_member("a")])
    (tmp_path / "secret.tar").write_bytes(data)
    layout = tmp_path / "image"
    write_docker_save(layout, name, f"sha256:{hashlib.sha256(data).hexdigest()}")
    (layout / "link").symlink_to(tmp_path / "secret.tar")
    assert refused(layout, tmp_path / "tree").code is ErrorCode.LAYER_ERROR


def test_a_workspace_with_a_manifest_of_its_own_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"manifest_version": 3, "name": "an extension"}')
    assert not looks_like_image(tmp_path, LIMITS)
    (tmp_path / "manifest.json").write_text("[]")
    assert not looks_like_image(tmp_path, LIMITS)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "manifest.json").symlink_to("/etc/passwd")
    (tmp_path / "oci-layout").symlink_to("oci-layout")
    assert not looks_like_image(tmp_path, LIMITS)
