"""Flattening a container image (an OCI layout or the output of ``docker save``) into one tree.

Layers are applied in order. A member ``.wh.NAME`` hides ``NAME`` of the layers below, and
``.wh..wh..opq`` hides all that the layers below put into its directory; neither touches what its
own layer brings, whatever the order of the members (OCI image specification, "Representing
Changes").
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from dsec_common.errors import DsecError, invalid
from dsec_sandboxd.layers.archives import visit_members, write_member
from dsec_sandboxd.layers.image_configuration import ImageConfiguration, defaults_of
from dsec_sandboxd.layers.names import shown
from dsec_sandboxd.layers.streams import open_stream
from dsec_sandboxd.layers.tree import Parts, TreeWriter, refuse

if TYPE_CHECKING:
    from dsec_common.wire.layer import CommandDefaults
    from dsec_sandboxd.layers.limits import ImportLimits, ImportWatch

_WHITEOUT: Final = ".wh."
_OPAQUE: Final = ".wh..wh..opq"
#: Other names that begin so are book-keeping of aufs, never content.
_AUFS_PRIVATE: Final = ".wh..wh."
_BLOB_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")
#: Annotations of an index that may hold an image's tag, the fullest first.
_TAG_ANNOTATIONS: Final = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
_INDEX_TYPES: Final = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_NESTING_MAX: Final = 4
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}

_T = TypeVar("_T")


class _Platform(msgspec.Struct, frozen=True):
    architecture: str = ""
    os: str = ""


class _Descriptor(msgspec.Struct, frozen=True, rename="camel"):
    digest: str
    size: int
    media_type: str = ""
    annotations: dict[str, str] = {}
    platform: _Platform | None = None


class _Index(msgspec.Struct, frozen=True):
    manifests: list[_Descriptor]


class _Manifest(msgspec.Struct, frozen=True):
    config: _Descriptor
    layers: list[_Descriptor]


class _DockerImage(msgspec.Struct, frozen=True, rename="pascal"):
    config: str
    layers: list[str]
    repo_tags: list[str] | None = None


class _RootFs(msgspec.Struct, frozen=True):
    diff_ids: list[str]


class _DockerConfig(ImageConfiguration, frozen=True, kw_only=True):
    rootfs: _RootFs


@dataclass(frozen=True, slots=True)
class ImageSource:
    """One image, found and checked: its digest and its layers' files, lowest first.

    And what commands on it have by default, with what of that could not be kept.
    """

    digest: str
    layers: tuple[Path, ...]
    defaults: CommandDefaults | None = None
    warnings: tuple[str, ...] = ()


def looks_like_image(directory: Path, limits: ImportLimits) -> bool:
    """Tell whether a directory is an OCI layout or an unpacked ``docker save`` archive."""
    if _part(directory, "oci-layout") and _part(directory, "index.json"):
        return True
    manifest = _part(directory, "manifest.json")
    if manifest is None or manifest.stat().st_size > limits.document_bytes_max:
        return False
    try:
        # A web extension has a manifest.json as well; Docker's is a list of images.
        return bool(msgspec.json.decode(manifest.read_bytes(), type=list[_DockerImage]))
    except msgspec.DecodeError:
        return False


def find_image(directory: Path, tag: str, limits: ImportLimits, watch: ImportWatch) -> ImageSource:
    """Find one image and verify the digests of its documents and layers.

    Args:
        directory: an OCI layout or an unpacked ``docker save`` archive; nobody else writes to it.
        tag: which image, when there are several; its whole tag or the end of it.
        limits: bounds the documents.
        watch: is told of the hashing.

    Raises:
        DsecError: ``invalid`` when several images fit, or none; ``layer_error`` when a part is
            missing, damaged or not understood.
    """
    reader = _ImageReader(directory, limits, watch)
    if _part(directory, "oci-layout"):
        return reader.oci(tag)
    return reader.docker(tag)


def write_image(
    image: ImageSource, tree: TreeWriter, watch: ImportWatch, limits: ImportLimits
) -> None:
    """Apply the image's layers to ``tree``.

    Raises:
        DsecError: as :func:`dsec_sandboxd.layers.archives.write_tar`.
    """
    for path in image.layers:
        layer = _LayerApplication(tree)
        with open_stream(path, watch, limits) as stream:
            visit_members(stream, limits, layer.apply)


class _LayerApplication:
    """Applies the members of one layer; remembers what it wrote, which whiteouts must spare."""

    def __init__(self, tree: TreeWriter) -> None:
        self._tree = tree
        self._written: set[Parts] = set()

    def apply(self, member: tarfile.TarInfo, content: Iterator[bytes]) -> None:
        parts = self._tree.parts(member.name)
        name = parts[-1] if parts else ""
        if not name.startswith(_WHITEOUT):
            self._written.update(parts[:depth] for depth in range(len(parts) + 1))
            write_member(self._tree, parts, member, content)
        elif name == _OPAQUE:
            self._tree.remove_children(parts[:-1], keep=self._written)
        elif not name.startswith(_AUFS_PRIVATE):
            hidden = name.removeprefix(_WHITEOUT)
            if hidden in {"", ".", ".."}:
                raise refuse(f"the whiteout {shown(member.name)} names no entry")
            self._tree.remove((*parts[:-1], hidden), keep=self._written)


class _ImageReader:
    def __init__(self, directory: Path, limits: ImportLimits, watch: ImportWatch) -> None:
        self._directory = Path(os.path.realpath(directory))
        self._limits = limits
        self._watch = watch

    def oci(self, tag: str) -> ImageSource:
        chosen = self._choose(self._document("index.json", _Index).manifests, tag)
        for _ in range(_NESTING_MAX):
            if chosen.media_type not in _INDEX_TYPES:
                manifest = self._verified(chosen, _Manifest)
                defaults, warnings = defaults_of(
                    self._verified(manifest.config, ImageConfiguration)
                )
                return ImageSource(
                    digest=chosen.digest,
                    layers=tuple(self._verified_file(layer) for layer in manifest.layers),
                    defaults=defaults,
                    warnings=warnings,
                )
            chosen = self._choose(self._verified(chosen, _Index).manifests, "")
        raise refuse(f"the image's indexes are nested more than {_NESTING_MAX} deep")

    def docker(self, tag: str) -> ImageSource:
        images = self._document("manifest.json", list[_DockerImage])
        fitting = [
            image
            for image in images
            if not tag or any(_tag_fits(known, tag) for known in image.repo_tags or ())
        ]
        known_tags = [known for image in images for known in image.repo_tags or ()]
        if len(fitting) != 1:
            raise _no_single_image(len(fitting), tag, known_tags)
        config_path = self._path(fitting[0].config)
        config = self._document(fitting[0].config, _DockerConfig)
        layers = [self._path(name) for name in fitting[0].layers]
        if len(layers) != len(config.rootfs.diff_ids):
            raise refuse("the image's manifest and configuration differ in the number of layers")
        for path, diff_id in zip(layers, config.rootfs.diff_ids, strict=True):
            self._verify_unpacked(path, diff_id)
        defaults, warnings = defaults_of(config)
        return ImageSource(
            digest=f"sha256:{_sha256(config_path)}",
            layers=tuple(layers),
            defaults=defaults,
            warnings=warnings,
        )

    def _choose(self, manifests: list[_Descriptor], tag: str) -> _Descriptor:
        machine = platform.machine()
        here = _Platform(architecture=_ARCHITECTURES.get(machine, machine), os="linux")
        # Build attestations are listed beside images with the platform unknown/unknown.
        fitting = [found for found in manifests if found.platform in {None, here}]
        if tag:
            fitting = [
                found for found in fitting if any(_tag_fits(name, tag) for name in _tags(found))
            ]
        if len({found.digest for found in fitting}) != 1:
            raise _no_single_image(len(fitting), tag, [_described(found) for found in manifests])
        return fitting[0]

    def _path(self, name: str) -> Path:
        path = _part(self._directory, name)
        if path is None:
            raise refuse(f"the image's part {shown(name)} is missing or outside of the image")
        return path

    def _document(self, name: str, document_type: type[_T]) -> _T:
        path = self._path(name)
        if path.stat().st_size > self._limits.document_bytes_max:
            raise refuse(
                f"the image's {shown(name)} is over {self._limits.document_bytes_max} bytes"
            )
        try:
            return msgspec.json.decode(path.read_bytes(), type=document_type)
        except msgspec.DecodeError as error:
            raise refuse(f"the image's {shown(name)} is not understood: {error}") from None

    def _verified(self, descriptor: _Descriptor, document_type: type[_T]) -> _T:
        path = self._verified_file(descriptor)
        return self._document(str(path.relative_to(self._directory)), document_type)

    def _verified_file(self, descriptor: _Descriptor) -> Path:
        match = _BLOB_DIGEST.fullmatch(descriptor.digest)
        if match is None:
            raise refuse(f"the image names a part by {shown(descriptor.digest)}, not by sha256")
        path = self._path(f"blobs/sha256/{match[1]}")
        size = path.stat().st_size
        if size != descriptor.size or self._hash(path) != match[1]:
            raise refuse(f"the image's part {descriptor.digest} is damaged")
        return path

    def _hash(self, path: Path) -> str:
        self._watch.advance("read", 0)
        return _sha256(path)

    def _verify_unpacked(self, path: Path, diff_id: str) -> None:
        digest = hashlib.sha256()
        with open_stream(path, self._watch, self._limits) as stream:
            stream.begin_content()
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
        if diff_id != f"sha256:{digest.hexdigest()}":
            raise refuse(f"the image's layer {shown(path.name)} is damaged: it is not {diff_id}")


def _part(directory: Path, name: str) -> Path | None:
    """Return the regular file of that name inside of ``directory``, or nothing.

    Old ``docker save`` output links its parts to each other, so links are followed, but only to
    what is inside.
    """
    if "\0" in name:
        return None
    root = os.path.realpath(directory)
    path = Path(os.path.realpath(Path(root) / name))
    return path if path.is_relative_to(root) and path.is_file() else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tags(found: _Descriptor) -> list[str]:
    return [found.annotations[name] for name in _TAG_ANNOTATIONS if name in found.annotations]


def _described(found: _Descriptor) -> str:
    name = next(iter(_tags(found)), found.digest)
    return f"{found.platform.os}/{found.platform.architecture} {name}" if found.platform else name


def _tag_fits(known: str, tag: str) -> bool:
    return known == tag or known.endswith((f"/{tag}", f":{tag}"))


def _no_single_image(fitting: int, tag: str, known: list[str]) -> DsecError:
    wanted = f" with the tag {shown(tag)}" if tag else ""
    found = f"{fitting} images" if fitting else "no image for this machine"
    there = ", ".join(shown(name) for name in known[:20]) or "no tags"
    return invalid(f"the archive holds {found}{wanted}; choose one by its tag. It has: {there}")
