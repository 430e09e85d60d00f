"""The layer store's back ends, each with a real service behind it."""

from __future__ import annotations

import contextlib
import http.client
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import obstore
from obstore.store import S3Store

from dsec_common.testing.nats import nats_for_tests
from dsec_sandboxd.layers.backend import InUse, LayerBackend
from dsec_sandboxd.layers.directory_backend import DirectoryBackend
from dsec_sandboxd.layers.nats_storage import NatsStorage
from dsec_sandboxd.layers.object_backend import ObjectBackend
from dsec_sandboxd.layers.object_storage import ObjectStorage
from dsec_sandboxd.layers.s3_storage import S3Storage

BACKENDS = ("directory", "nats", "s3")
CACHE_BYTES = 256 << 20

#: Returns a node's back end on the one store of a test; each call is another node.
NewBackend = Callable[..., LayerBackend]


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Run moto's S3 server in a process of its own, on a free port; yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _wait_for(port)
            _start_runtime(f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "moto does not start"
            time.sleep(0.05)
        else:
            return


def _start_runtime(endpoint: str) -> None:
    """Have obstore start its threads, which live as long as the process."""
    store = S3Store(
        make_bucket(endpoint),
        endpoint=endpoint,
        region="us-east-1",
        access_key_id="id",
        secret_access_key="secret",
        client_options={"allow_http": True},
    )
    obstore.put(store, "a", b"")


def make_bucket(endpoint: str) -> str:
    """Make a bucket of its own and return its name."""
    name = f"layers-{uuid.uuid4().hex[:12]}"
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"))
    connection.request("PUT", f"/{name}")
    assert connection.getresponse().status == 200
    connection.close()
    return name


@contextlib.asynccontextmanager
async def storage_of(kind: str, endpoint: str) -> AsyncIterator[Callable[[], ObjectStorage]]:
    """Yield what makes storages on one new bucket."""
    if kind == "s3":
        url = f"s3://{make_bucket(endpoint)}/some/prefix?endpoint={endpoint}&region=us-east-1"
        yield lambda: S3Storage(url, credentials=("id", "secret"))
        return
    async with nats_for_tests() as nats, nats.service("sandboxd", "layers") as bus:
        yield lambda: NatsStorage(bus, "dsec-layers")


@contextlib.asynccontextmanager
async def backends_of(kind: str, directory: Path, endpoint: str) -> AsyncIterator[NewBackend]:
    """Yield what makes back ends of one new store, each with its own cache; close them all."""
    made: list[LayerBackend] = []
    if kind == "directory":

        def local(in_use: InUse = tuple, cache_bytes: int = CACHE_BYTES) -> LayerBackend:
            made.append(DirectoryBackend(directory / "store"))
            return made[-1]

        yield local
    else:
        async with storage_of(kind, endpoint) as storage:

            def remote(in_use: InUse = tuple, cache_bytes: int = CACHE_BYTES) -> LayerBackend:
                own = directory / f"node-{len(made)}"
                made.append(ObjectBackend(storage(), own, cache_bytes=cache_bytes, in_use=in_use))
                return made[-1]

            yield remote
            for backend in made:
                await backend.close()
