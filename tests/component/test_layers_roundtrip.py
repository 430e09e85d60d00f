"""Any tree that Linux allows comes out of an image as it went in."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec_common.wire.layer import ArchiveFormat
from dsec_sandboxd.layers.importer import BuiltImage, ImageBuilder
from dsec_sandboxd.layers.limits import ImportLimits, ImportWatch
from layer_builders import NANOSECONDS, look, mounted

# Latin, quotes, spaces, control characters and others: all but the slash and NUL.
NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=40
).filter(lambda name: name not in {".", ".."} and len(name.encode()) <= 255)
ATTRIBUTES = st.tuples(
    st.sampled_from([0o644, 0o755, 0o600, 0o000, 0o1777, 0o444]),
    st.integers(0, 65535),
    st.integers(0, 65535),
    st.integers(0, 2_000_000_000 * NANOSECONDS),
)
FILES = st.tuples(st.just("file"), ATTRIBUTES, st.binary(max_size=10_000))
LINKS = st.tuples(
    st.just("link"), ATTRIBUTES, NAMES | st.sampled_from(["/etc/passwd", "../..", "a/b"])
)
PIPES = st.tuples(st.just("pipe"), ATTRIBUTES, st.none())
LEAVES = FILES | LINKS | PIPES
TREES = st.recursive(
    st.tuples(st.just("directory"), ATTRIBUTES, st.dictionaries(NAMES, LEAVES, max_size=5)),
    lambda inner: st.tuples(
        st.just("directory"), ATTRIBUTES, st.dictionaries(NAMES, LEAVES | inner, max_size=4)
    ),
    max_leaves=5,
)

Node = tuple[str, tuple[int, int, int, int], Any]


def make(path: Path, node: Node) -> None:
    """Make ``node`` at ``path``; a root directory may be there already."""
    kind, (mode, uid, gid, mtime_ns), content = node
    if kind == "directory":
        path.mkdir(exist_ok=True)
        for name, child in content.items():
            make(path / name, child)
    elif kind == "file":
        path.write_bytes(content)
    elif kind == "link":
        path.symlink_to(content)
    else:
        os.mkfifo(path)
    os.chown(path, uid, gid, follow_symlinks=False)
    if kind != "link":
        path.chmod(mode)
    os.utime(path, ns=(mtime_ns, mtime_ns), follow_symlinks=False)


def build(source: Path, work: Path, archive_format: ArchiveFormat | None) -> BuiltImage:
    staging = work / f"staging-{source.name}"
    staging.mkdir()
    return ImageBuilder(
        source=source,
        archive_format=archive_format,
        tag="",
        staging=staging,
        limits=ImportLimits(),
        watch=ImportWatch(),
    ).build()


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(tree=TREES)
def test_a_tree_comes_out_as_it_went_in(tree: Node, tmp_path: Path) -> None:
    work = Path(tempfile.mkdtemp(dir=tmp_path))
    source = work / "source"
    make(source, tree)
    image = build(source, work, None)
    with mounted(image.path, work / "mount") as mount:
        assert look(mount) == look(source)
    # An archive knows seconds and fractions as a decimal number; whole seconds are exact.
    for path in [source, *source.rglob("*")]:
        seconds = path.lstat().st_mtime_ns // NANOSECONDS * NANOSECONDS
        os.utime(path, ns=(seconds, seconds), follow_symlinks=False)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(source, arcname=".")
    packed = work / "source.tar"
    packed.write_bytes(buffer.getvalue())
    image = build(packed, work, ArchiveFormat.TAR)
    with mounted(image.path, work / "mount") as mount:
        assert look(mount) == look(source)
    shutil.rmtree(work)
