"""A remote store that goes away in the middle, and importers that die on the way to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.testing.nats import nats_for_tests
from dsec_common.wire.layer import LayerKind
from dsec_sandboxd.layers.nats_storage import NatsStorage
from dsec_sandboxd.layers.object_backend import ObjectBackend
from dsec_sandboxd.layers.s3_storage import S3Storage
from dsec_sandboxd.layers.store import LayerStore
from layer_backends import make_bucket, s3_server

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="layers need root")

LARGE_BYTES = 48 << 20
CACHE_BYTES = 256 << 20


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    directory = tmp_path / "tree"
    directory.mkdir()
    (directory / "large").write_bytes(os.urandom(LARGE_BYTES))
    return directory


class Proxy:
    """A TCP proxy that can be cut, as a network is."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.removeprefix("http://").partition(":")
        self._port = int(port)
        self._pairs: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_cut = False
        self.url = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            await self.cut()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await server.wait_closed()

    async def cut(self) -> None:
        self._is_cut = True
        for writer in list(self._pairs):
            writer.transport.abort()

    def restore(self) -> None:
        self._is_cut = False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._pairs.add(writer)
        try:
            if self._is_cut:
                writer.transport.abort()
                return
            inside, out = await asyncio.open_connection(self._host, self._port)
            self._pairs.add(out)
            try:
                await asyncio.gather(_pass(reader, out), _pass(inside, writer))
            finally:
                self._pairs.discard(out)
                out.close()
        finally:
            self._pairs.discard(writer)
            writer.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


def interrupted(kind: type[Any], after_first_piece: Callable[[], Awaitable[None]]) -> type[Any]:
    """Return a storage whose service goes away when the first piece of an image is there."""

    class Interrupted(kind):  # type: ignore[misc]  # decided at run time
        left = 1

        async def read_image(self, name: str) -> AsyncGenerator[bytes]:
            async with contextlib.aclosing(super().read_image(name)) as pieces:
                async for piece in pieces:
                    yield piece
                    if self.left:
                        self.left -= 1
                        await after_first_piece()

    return Interrupted


async def stands_an_outage(
    reader: LayerStore, node: Path, restore: Callable[[], Awaitable[None]]
) -> None:
    """Assert that a fetch in an outage fails as such, leaves nothing, and works afterwards."""
    async with asyncio.timeout(90.0):
        with pytest.raises(DsecError) as caught:
            await reader.resolve("default", "large@1")
    assert caught.value.code in {ErrorCode.UNAVAILABLE, ErrorCode.TIMEOUT}, caught.value
    assert caught.value.retryable
    assert list((node / "images").iterdir()) == []
    await restore()
    layer = None
    async with asyncio.timeout(60.0):
        while layer is None:
            with retried():
                layer = await reader.resolve("default", "large@1")
    assert layer.image_path.stat().st_size > LARGE_BYTES


@contextlib.contextmanager
def retried() -> Iterator[None]:
    """Pass over what is said to be worth another try, and nothing else."""
    try:
        yield
    except DsecError as error:
        if not error.retryable:
            raise


async def test_nats_that_stops_in_the_middle_of_a_fetch_is_said(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec_common.bus_objects._TIMEOUT_S", 3.0)  # how long it waits for NATS
    async with nats_for_tests() as nats, nats.service("sandboxd", "layers") as bus:
        async with LayerStore(
            ObjectBackend(NatsStorage(bus, "dsec-layers"), tmp_path / "a", cache_bytes=CACHE_BYTES)
        ) as writer:
            await writer.import_layer("default", "large", "1", tree, kind=LayerKind.DATA)
        storage = interrupted(NatsStorage, nats.server.stop)(bus, "dsec-layers")
        backend = ObjectBackend(storage, tmp_path / "b", cache_bytes=CACHE_BYTES)
        async with LayerStore(backend) as reader:
            await stands_an_outage(reader, tmp_path / "b", nats.server.start)


async def test_a_bucket_that_goes_away_in_the_middle_of_a_fetch_is_said(
    tree: Path, tmp_path: Path, endpoint: str
) -> None:
    bucket = make_bucket(endpoint)
    async with Proxy(endpoint).running() as proxy:
        url = f"s3://{bucket}/p?endpoint={proxy.url}&region=us-east-1"

        async def restore() -> None:
            proxy.restore()

        async with LayerStore(
            ObjectBackend(
                S3Storage(url, credentials=("id", "secret")),
                tmp_path / "a",
                cache_bytes=CACHE_BYTES,
            )
        ) as writer:
            await writer.import_layer("default", "large", "1", tree, kind=LayerKind.DATA)
        storage = interrupted(S3Storage, proxy.cut)(url, credentials=("id", "secret"))
        backend = ObjectBackend(storage, tmp_path / "b", cache_bytes=CACHE_BYTES)
        async with LayerStore(backend) as reader:
            await stands_an_outage(reader, tmp_path / "b", restore)


#: Dies at the given word with the storage: while an image is written, or right after a document.
DYING = """
import asyncio, os, signal, sys
from pathlib import Path
from dsec_common.wire.layer import LayerKind
from dsec_sandboxd.layers.object_backend import ObjectBackend
from dsec_sandboxd.layers.s3_storage import S3Storage
from dsec_sandboxd.layers.store import LayerStore

url, directory, tree, moment, left = *sys.argv[1:5], int(sys.argv[5])

def die(at):
    global left
    if at == moment and armed:
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

class Dying(S3Storage):
    async def write_image(self, name, path, watch):
        class Watch:
            def advance(self, *args):
                die("image")
                watch.advance(*args)
        await super().write_image(name, path, Watch())
        die("stored")

    async def write_document(self, key, data, *, revision):
        die("document")
        result = await super().write_document(key, data, revision=revision)
        die("written")
        return result

async def main():
    global armed
    backend = ObjectBackend(
        Dying(url, credentials=("id", "secret")), Path(directory), cache_bytes=1 << 30)
    async with LayerStore(backend) as store:
        armed = True
        await store.import_layer(
            "default", "large", "1", Path(tree), kind=LayerKind.DATA, replace=True)
        armed = False

armed = False
asyncio.run(main())
"""


@pytest.mark.parametrize("replacing", [False, True])
async def test_an_importer_that_is_killed_leaves_the_old_layer_or_the_new_one(
    tree: Path, tmp_path: Path, endpoint: str, *, replacing: bool
) -> None:
    url = f"s3://{make_bucket(endpoint)}/p?endpoint={endpoint}&region=us-east-1"

    def store_of(node: str) -> LayerStore:
        storage = S3Storage(url, credentials=("id", "secret"))
        return LayerStore(ObjectBackend(storage, tmp_path / node, cache_bytes=CACHE_BYTES))

    before = ""
    if replacing:
        old = tmp_path / "old"
        old.mkdir()
        (old / "file").write_text("old")
        async with store_of("a") as store:
            done = await store.import_layer("default", "large", "1", old, kind=LayerKind.DATA)
            before = done.layer.digest
    killed = 0
    moments = [("image", 0), ("image", 5), ("stored", 0), ("document", 0), ("written", 0)]
    for moment, count in [*moments, ("document", 1), ("written", 1)]:
        arguments = [url, str(tmp_path / "dying"), str(tree), moment, str(count)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", DYING, *arguments, stderr=asyncio.subprocess.PIPE
        )
        _, said = await process.communicate()
        assert process.returncode in {0, -signal.SIGKILL}, said.decode()
        killed += process.returncode != 0
        async with store_of("b") as store:
            found = {layer.reference: layer.digest for layer in await store.list("default")}
            if found and found["large@1"] != before:
                # Named, so it is whole.
                assert (await store.resolve("default", "large@1")).size_bytes > LARGE_BYTES
            elif replacing:
                assert (await store.resolve("default", "large@1")).digest == before
            else:
                assert found == {}
    assert killed >= len(moments) - 1
    async with store_of("dying") as store:
        await store.import_layer("default", "large", "1", tree, kind=LayerKind.DATA, replace=True)
        assert list((tmp_path / "dying/staging").iterdir()) == []
    async with store_of("c") as store:
        assert (await store.resolve("default", "large@1")).size_bytes > LARGE_BYTES
