"""Sources for layers, and a look at what became of them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import subprocess
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsec.rootfs import build_host_rootfs

NANOSECONDS = 1_000_000_000


@dataclass(frozen=True)
class Seen:
    """One entry of a tree as ``lstat`` shows it; ``content`` is bytes, or a link's target."""

    mode: str
    uid: int
    gid: int
    mtime_ns: int
    content: bytes | str
    names: tuple[str, ...]


def look(root: Path) -> dict[str, Seen]:
    """Return every entry below ``root``, by its path; ``.`` is the root itself."""
    names: dict[tuple[int, int], list[str]] = defaultdict(list)
    found: dict[str, os.stat_result] = {}
    for path in [root, *sorted(root.rglob("*"))]:
        name = str(path.relative_to(root))
        found[name] = path.lstat()
        names[found[name].st_dev, found[name].st_ino].append(name)
    return {
        name: Seen(
            mode=stat.filemode(status.st_mode),
            uid=status.st_uid,
            gid=status.st_gid,
            mtime_ns=status.st_mtime_ns,
            content=_content(root / name, status),
            names=tuple(names[status.st_dev, status.st_ino]),
        )
        for name, status in found.items()
    }


def _content(path: Path, status: os.stat_result) -> bytes | str:
    if stat.S_ISLNK(status.st_mode):
        return str(path.readlink())
    return path.read_bytes() if stat.S_ISREG(status.st_mode) else b""


@contextmanager
def mounted(image: Path, at: Path) -> Iterator[Path]:
    """Mount an EROFS image read-only at ``at``, which is made."""
    at.mkdir()
    subprocess.run(["mount", "-t", "erofs", "-o", "ro", image, at], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", at], check=True)
        at.rmdir()


def member(name: str, kind: bytes = tarfile.REGTYPE, **attributes: Any) -> tarfile.TarInfo:
    """Return a tar member's header; ``attributes`` are those of ``TarInfo``."""
    info = tarfile.TarInfo(name)
    info.type = kind
    info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
    info.mtime = 1_700_000_000
    for key, value in attributes.items():
        setattr(info, key, value)
    return info


#: A header, or a header with its content.
Member = tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]


def tar_bytes(members: Sequence[Member], compression: str = "") -> bytes:
    """Return an archive of exactly these members, however hostile."""
    buffer = io.BytesIO()
    mode: Any = f"w:{compression}"
    with tarfile.open(fileobj=buffer, mode=mode, format=tarfile.PAX_FORMAT) as archive:
        for item in members:
            info, data = item if isinstance(item, tuple) else (item, b"")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def file_member(name: str, data: bytes = b"content", **attributes: Any) -> Member:
    """Return a regular file for :func:`tar_bytes`."""
    return member(name, **attributes), data


def directory_member(name: str, **attributes: Any) -> Member:
    """Return a directory for :func:`tar_bytes`."""
    return member(name, tarfile.DIRTYPE, **attributes)


def link_member(name: str, target: str, *, hard: bool = False) -> Member:
    """Return a symbolic or hard link for :func:`tar_bytes`."""
    return member(name, tarfile.LNKTYPE if hard else tarfile.SYMTYPE, linkname=target)


def write_oci_layout(
    directory: Path, layers: Sequence[bytes], *, tag: str = "", architecture: str = ""
) -> str:
    """Add an image to the OCI layout in ``directory`` and return its manifest's digest."""
    blobs = directory / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)

    def store(data: bytes, media_type: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    manifest = {
        "schemaVersion": 2,
        "config": store(b"{}", "application/vnd.oci.image.config.v1+json"),
        "layers": [store(data, "application/vnd.oci.image.layer.v1.tar") for data in layers],
    }
    described = store(json.dumps(manifest).encode(), "application/vnd.oci.image.manifest.v1+json")
    if tag:
        described["annotations"] = {"org.opencontainers.image.ref.name": tag}
    if architecture:
        described["platform"] = {"os": "linux", "architecture": architecture}
    index = directory / "index.json"
    manifests = json.loads(index.read_text())["manifests"] if index.exists() else []
    index.write_text(json.dumps({"schemaVersion": 2, "manifests": [*manifests, described]}))
    (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return str(described["digest"])


def docker_save_bytes(
    layers: Sequence[bytes],
    tags: Sequence[str] = ("demo:1",),
    config_of_commands: Mapping[str, Any] | None = None,
) -> bytes:
    """Return what ``docker save`` of old wrote: one folder for each layer."""
    digests = [f"sha256:{hashlib.sha256(data).hexdigest()}" for data in layers]
    config = json.dumps({"rootfs": {"diff_ids": digests}, "config": config_of_commands}).encode()
    manifest = [
        {
            "Config": "config.json",
            "RepoTags": list(tags),
            "Layers": [f"{number}/layer.tar" for number in range(len(layers))],
        }
    ]
    return tar_bytes(
        [
            *(file_member(f"{number}/layer.tar", data) for number, data in enumerate(layers)),
            file_member("config.json", config),
            file_member("manifest.json", json.dumps(manifest).encode()),
        ]
    )


def pack_directory(directory: Path) -> bytes:
    """Return an uncompressed archive of what is in ``directory``."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(directory, arcname=".")
    return buffer.getvalue()


def minimal_base_tree(dest: Path) -> Path:
    """Assemble a base of this host's shell and utilities in ``dest``; takes half a second."""
    return build_host_rootfs(dest, python=False).path


def python_base_tree(dest: Path) -> Path:
    """Assemble a base with the Python that runs the tests; takes two seconds, so share it."""
    return build_host_rootfs(dest).path


def docker_archive_bytes(images: Mapping[str, Sequence[bytes]]) -> bytes:
    """Return a ``docker save`` archive of several images, each with its tag and its layers."""
    members: list[Member] = []
    manifest = []
    for number, (tag, layers) in enumerate(images.items()):
        digests = [f"sha256:{hashlib.sha256(data).hexdigest()}" for data in layers]
        config = json.dumps({"rootfs": {"diff_ids": digests}}).encode()
        names = [f"{number}-{index}/layer.tar" for index in range(len(layers))]
        members += [file_member(f"{number}.json", config)]
        members += [file_member(name, data) for name, data in zip(names, layers, strict=True)]
        manifest.append({"Config": f"{number}.json", "RepoTags": [tag], "Layers": names})
    members.append(file_member("manifest.json", json.dumps(manifest).encode()))
    return tar_bytes(members)
