"""A recipe whose packages come from an index that the build's network policy allows."""

from __future__ import annotations

import asyncio
import ensurepip
import functools
import http.server
import socket
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsec import CommandFailed, sync
from dsec.recipes import Recipe, read_recipe
from dsec.stack.layout import Layout
from dsec_sandboxd.network import namespaces
from network_world import ALLOWED, ALLOWED6, OTHER, OTHER6, Host
from stack import Stack

PORT = 8081


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_arguments: object) -> None:
        pass


@contextmanager
def index_on(host: Host, address: str, directory: Path) -> Iterator[None]:
    """Serve a directory of packages, as an index does, from a host of its own."""
    one = namespaces.make_in(host.namespace, socket.socket)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind((address, PORT))
    handler = functools.partial(_Quiet, directory=str(directory))
    with http.server.ThreadingHTTPServer((address, PORT), handler, False) as server:
        server.socket.close()
        server.socket = one
        server.server_activate()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def write_index(directory: Path) -> Path:
    """Make a simple index with one package."""
    package = directory / "simple" / "greeter"
    package.mkdir(parents=True)
    name = "greeter-1.0-py3-none-any.whl"
    facts = "greeter-1.0.dist-info"
    with zipfile.ZipFile(package / name, "w") as wheel:
        wheel.writestr("greeter.py", "WORD = 'hello from an index'\n")
        wheel.writestr(f"{facts}/METADATA", "Metadata-Version: 2.1\nName: greeter\nVersion: 1.0\n")
        wheel.writestr(
            f"{facts}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{facts}/RECORD", f"greeter.py,,\n{facts}/METADATA,,\n{facts}/RECORD,,\n")
    (package / "index.html").write_text(f'<a href="{name}">{name}</a>')
    return directory


def recipe_for(base: str, directory: Path, address: str) -> Recipe:
    """Return a recipe that may reach the one index, and installs from the one at ``address``."""
    (pip,) = (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")
    path = directory / f"{address}.yaml"
    path.write_text(
        f"base: {base}\n"
        "kind: toolkit\n"
        "pip: [greeter==1.0]\n"
        f"network: {{allow: ['{ALLOWED}']}}\n"
        f"files: {{/opt/pip.whl: {pip}}}\n"
        "exclude: [/opt/pip.whl]\n"
        "timeout_s: 120\n"
        "env:\n"
        "  PYTHONPATH: /opt/pip.whl\n"
        f"  PIP_INDEX_URL: http://{address}:{PORT}/simple\n"
        f"  PIP_TRUSTED_HOST: {address}\n"
        "  PIP_TIMEOUT: '2'\n"
        "  PIP_RETRIES: '0'\n"
    )
    return read_recipe(path)


@pytest.fixture(scope="module", autouse=True)
def _router(stack: Stack, base: str) -> None:
    """Have the node's router made before the test: it stays, mounted, as long as the daemon."""
    with (
        sync.DSecClient(stack.context.nats_servers, stack.context.credentials) as client,
        client.create_sandbox(base, network={"allow": ["10.0.0.0/8"]}),
    ):
        pass


async def test_packages_come_from_the_index_that_is_allowed_and_from_no_other(
    stack: Stack, base: str, tmp_path: Path
) -> None:
    (node,) = stack.node_names
    router = Path(Layout(stack.directory).run) / node / "network" / "router"
    index = write_index(tmp_path / "index")
    hosts = [Host(0, ALLOWED, ALLOWED6), Host(1, OTHER, OTHER6)]
    try:
        for host in hosts:
            host.connect_to(router)
        with index_on(hosts[0], ALLOWED, index), index_on(hosts[1], OTHER, index):
            await asyncio.to_thread(_build, stack, base, tmp_path)
    finally:
        for host in hosts:
            await host.close()


def _build(stack: Stack, base: str, tmp_path: Path) -> None:
    with sync.DSecClient(stack.context.nats_servers, stack.context.credentials) as client:
        recipe = recipe_for(base, tmp_path, ALLOWED)
        layer = sync.build_layer(client, recipe, name="indexed", version="1")
        with client.create_sandbox(base, toolkits=[layer.reference]) as sandbox:
            said = sandbox.exec(["python3", "-c", "import greeter; print(greeter.WORD)"])
            assert said.stdout_text == "hello from an index\n", said
            assert sandbox.exec("ls /opt/pip.whl").exit_code != 0
        with pytest.raises(CommandFailed):
            sync.build_layer(client, recipe_for(base, tmp_path, OTHER), name="indexed", version="2")
        client.layers.remove(layer.reference)
