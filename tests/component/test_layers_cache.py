"""The node's cache of a remote store: bounded, checked, one fetch at a time, safe in a crash."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.layers.erofs import build_image
from dsec_sandboxd.layers.image_cache import ImageCache, Source
from dsec_sandboxd.layers.limits import ImportWatch

PIECE_BYTES = 64 << 10


class Images:
    """A source of real images that counts how often each is read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.content: dict[str, bytes] = {}
        self.reads: dict[str, int] = {}
        self.gate = asyncio.Event()
        self.gate.set()

    def make(self, number: int, size: int = 1 << 20) -> str:
        tree = self._directory / f"tree-{number}"
        tree.mkdir()
        (tree / "file").write_bytes(bytes([number]) * size)
        image = self._directory / f"{number}.erofs"
        build_image(tree, image, 1, ImportWatch())
        data = image.read_bytes()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.content[digest] = data
        return digest

    def source(self, digest: str) -> Source:
        async def open_source() -> tuple[int, AsyncGenerator[bytes]]:
            self.reads[digest] = self.reads.get(digest, 0) + 1
            return len(self.content[digest]), self._pieces(digest)

        return open_source

    async def _pieces(self, digest: str) -> AsyncGenerator[bytes]:
        data = self.content[digest]
        for offset in range(0, len(data), PIECE_BYTES):
            await self.gate.wait()
            yield data[offset : offset + PIECE_BYTES]


@pytest.fixture
def images(tmp_path: Path) -> Images:
    (tmp_path / "made").mkdir()
    return Images(tmp_path / "made")


def opened(directory: Path, bytes_max: int, in_use: set[str] | None = None) -> ImageCache:
    cache = ImageCache(directory, bytes_max, lambda: in_use or ())
    cache.open()
    return cache


async def test_what_is_asked_for_by_many_at_once_is_fetched_once(
    images: Images, tmp_path: Path
) -> None:
    digest = images.make(1)
    cache = opened(tmp_path / "cache", 10 << 20)
    images.gate.clear()
    callers = [asyncio.create_task(cache.ensure(digest, images.source(digest))) for _ in range(20)]
    await asyncio.sleep(0)
    callers[0].cancel()
    images.gate.set()
    paths = await asyncio.gather(*callers[1:])
    assert {path.read_bytes() for path in paths} == {images.content[digest]}
    assert images.reads == {digest: 1}
    assert callers[0].cancelled()
    await cache.close()


async def test_the_least_recently_used_goes_and_what_is_in_use_stays(
    images: Images, tmp_path: Path
) -> None:
    a, b, c, d = (images.make(number) for number in range(4))
    room = 2 * len(images.content[a]) + 4096
    in_use = {a}
    cache = opened(tmp_path / "cache", room, in_use)
    await cache.ensure(a, images.source(a))
    await cache.ensure(b, images.source(b))
    await cache.ensure(c, images.source(c))
    assert [cache.is_ready(digest) for digest in (a, b, c)] == [True, False, True]
    in_use.add(c)
    with pytest.raises(DsecError) as error:
        await cache.ensure(d, images.source(d))
    assert error.value.code is ErrorCode.EXHAUSTED
    assert cache.used_bytes <= room
    in_use.discard(a)
    await cache.ensure(d, images.source(d))
    assert [cache.is_ready(digest) for digest in (a, c, d)] == [False, True, True]
    assert cache.evictions == 2
    stored = sum(path.stat().st_size for path in (tmp_path / "cache").iterdir())
    assert stored == cache.used_bytes <= room


async def test_the_order_of_use_outlives_a_restart(images: Images, tmp_path: Path) -> None:
    a, b, c = (images.make(number) for number in range(3))
    room = 2 * len(images.content[a]) + 4096
    first = opened(tmp_path / "cache", room)
    for digest in (b, a):
        await first.ensure(digest, images.source(digest))
    second = opened(tmp_path / "cache", room)
    await second.ensure(c, images.source(c))
    assert [second.path(digest).exists() for digest in (a, b, c)] == [True, False, True]


async def test_a_smaller_bound_is_reached_with_the_next_fetch_and_spares_what_is_in_use(
    images: Images, tmp_path: Path
) -> None:
    a, b, c, d = (images.make(number) for number in range(4))
    first = opened(tmp_path / "cache", 10 << 20)
    for digest in (a, b, c):
        await first.ensure(digest, images.source(digest))
    room = 2 * len(images.content[a]) + 4096
    second = opened(tmp_path / "cache", room, {a})
    # Which of them living sandboxes use is not known when the cache is opened.
    assert all(second.path(digest).exists() for digest in (a, b, c))
    await second.ensure(d, images.source(d))
    assert [second.path(digest).exists() for digest in (a, b, c, d)] == [True, False, False, True]
    assert second.used_bytes <= room


@pytest.mark.parametrize("wrong", ["longer", "shorter", "changed"])
async def test_a_wrong_image_is_never_kept(images: Images, tmp_path: Path, wrong: str) -> None:
    digest = images.make(1)
    sound = images.content[digest]
    cache = opened(tmp_path / "cache", 10 << 20)
    damaged = {"longer": sound + b"x", "shorter": sound[:-1], "changed": b"x" + sound[1:]}[wrong]

    async def source() -> tuple[int, AsyncGenerator[bytes]]:
        images.content[digest] = damaged
        return len(sound), images._pieces(digest)

    with pytest.raises(DsecError) as error:
        await cache.ensure(digest, source)
    assert error.value.code is ErrorCode.LAYER_ERROR
    assert list((tmp_path / "cache").iterdir()) == []
    assert cache.used_bytes == 0
    images.content[digest] = sound
    await cache.ensure(digest, images.source(digest))


async def test_a_file_that_was_damaged_on_the_disk_is_fetched_again(
    images: Images, tmp_path: Path
) -> None:
    digest = images.make(1)
    first = opened(tmp_path / "cache", 10 << 20)
    path = await first.ensure(digest, images.source(digest))
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"damage")
    assert not first.is_ready(digest)
    second = opened(tmp_path / "cache", 10 << 20)
    await second.ensure(digest, images.source(digest))
    assert path.read_bytes() == images.content[digest]
    assert images.reads[digest] == 2


async def test_a_sound_file_of_an_earlier_run_is_not_fetched_again(
    images: Images, tmp_path: Path
) -> None:
    digest = images.make(1)
    await opened(tmp_path / "cache", 10 << 20).ensure(digest, images.source(digest))
    later = opened(tmp_path / "cache", 10 << 20)
    await later.ensure(digest, images.source(digest))
    assert images.reads[digest] == 1
    assert later.fetches == 0


async def test_an_image_larger_than_the_cache_is_refused_and_nothing_is_evicted_for_it_in_vain(
    images: Images, tmp_path: Path
) -> None:
    small, large = images.make(0, 1 << 16), images.make(1, 8 << 20)
    cache = opened(tmp_path / "cache", 2 << 20)
    await cache.ensure(small, images.source(small))
    with pytest.raises(DsecError) as error:
        await cache.ensure(large, images.source(large))
    assert error.value.code is ErrorCode.EXHAUSTED
    assert cache.is_ready(small)


# Fetches an image from a file in small pieces, and dies at the given piece.
DYING_FETCH = """
import asyncio, os, signal, sys
from pathlib import Path
from dsec_sandboxd.layers.image_cache import ImageCache

directory, image, digest, last = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
data = image.read_bytes()

async def pieces():
    for number, offset in enumerate(range(0, len(data), 65536)):
        if number == last:
            os.kill(os.getpid(), signal.SIGKILL)
        yield data[offset:offset + 65536]

async def source():
    return len(data), pieces()

async def main():
    cache = ImageCache(directory, 1 << 30, tuple)
    cache.open()
    await cache.ensure(digest, source)

asyncio.run(main())
"""


@pytest.mark.parametrize("last", [0, 1, 15])
async def test_a_kill_in_the_middle_of_a_fetch_leaves_no_wrong_file(
    images: Images, tmp_path: Path, last: int
) -> None:
    digest = images.make(1)
    image = tmp_path / "image"
    image.write_bytes(images.content[digest])
    cache_directory = tmp_path / "cache"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DYING_FETCH, cache_directory, image, digest, str(last),
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    assert await process.wait() == -signal.SIGKILL
    assert [path.suffix for path in cache_directory.iterdir()] == [".part"]
    cache = opened(cache_directory, 10 << 20)
    assert list(cache_directory.iterdir()) == []
    path = await cache.ensure(digest, images.source(digest))
    assert path.read_bytes() == images.content[digest]
    assert path.stat().st_mode & 0o777 == 0o444
