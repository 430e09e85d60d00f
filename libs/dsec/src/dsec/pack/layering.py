"""A package as a layer: what is in it below the agent's own directory, and a program that runs it.

The layer is a toolkit: with any base that has a fitting Python it makes sandboxes in which
``/opt/dsec/agents/<name>/run`` is the agent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dsec.archive import PlainFile
from dsec.pack.package import Package, read_package_file
from dsec_common.errors import invalid
from dsec_common.wire.layer import LayerInfo, LayerKind

if TYPE_CHECKING:
    from dsec.client import DSecClient
    from dsec.layers import Progress

AGENTS: Final = "opt/dsec/agents"
"""Below it every agent has a directory of its name."""

MODELS: Final = "opt/dsec/models"
"""Below it every agent has a directory of its name, with its weights."""

#: Plain Python of any version, so that it can say that the version is another.
_RUN: Final = '''\
#!/usr/bin/env python3
"""Runs the agent of this package."""
import json
import os
import platform
import runpy
import sys

home = os.path.dirname(os.path.realpath(__file__))
with open(os.path.join(home, "manifest.json"), encoding="utf-8") as file:
    manifest = json.load(file)
target = manifest.get("target")
python = {"cpython": "cp", "pypy": "pp"}.get(sys.implementation.name, "py")
python += "%d%d" % sys.version_info[:2]
if target and target["python"] != python or target and not target["platform"].endswith(
    "-" + platform.machine()
):
    sys.exit(
        "%s %s was built for %s on %s and does not run with %s on %s: build it for that, or use "
        "another base" % (
            manifest["name"], manifest["version"], target["python"], target["platform"],
            python, platform.machine(),
        )
    )
libraries = os.path.join(home, "lib")
entry = os.path.join(home, "app", manifest["entry"])
# The layer is read-only: what would be compiled into it goes into the sandbox's memory.
sys.dont_write_bytecode = True
others = [path for path in sys.path if os.path.realpath(path) != home]
sys.path[:] = [os.path.dirname(entry), libraries] + others
before = os.environ.get("PYTHONPATH")
os.environ["PYTHONPATH"] = libraries + (os.pathsep + before if before else "")
os.environ.setdefault("DSEC_AGENT_CONTRACT", os.path.join(home, "agent.yaml"))
sys.argv[0] = entry
runpy.run_path(entry, run_name="__main__")
'''


def run_program() -> bytes:
    """Return the program that runs what lies beside it."""
    return _RUN.encode()


def package_of(given: str | os.PathLike[str] | Package, public_key: str = "") -> Package:
    """Return the package that is meant, with the signature that is demanded.

    Raises:
        DsecError: as :func:`dsec.pack.package.read_package`.
    """
    if not isinstance(given, Package):
        return read_package_file(Path(given), public_key)
    given.check_signer(public_key)
    return given


def layer_files(package: Package) -> Iterator[PlainFile]:
    """Yield the files of the layer that a package is."""
    home = f"{AGENTS}/{package.manifest.name}"
    yield PlainFile(f"{home}/run", run_program(), executable=True)
    for file, content in package.contents():
        yield PlainFile(f"{home}/{file.path}", content, executable=file.executable)


async def import_model(
    client: DSecClient, agent: str, version: str, weights: Path, progress: Progress | None = None
) -> LayerInfo:
    """Make a data layer of an agent's weights, which its instances find below :data:`MODELS`.

    Its pages are in memory once for all sandboxes of a node, and read when they are used.

    Raises:
        DsecError: as :meth:`dsec.layers.Layers.import_directory`.
    """
    if not weights.is_file():  # noqa: ASYNC240  one stat before it is all read
        raise invalid(f"{weights} is no file; weights are one file")
    return await client.layers.import_files(
        [PlainFile(f"{MODELS}/{agent}/{weights.name}", weights)],
        kind=LayerKind.DATA,
        name=model_layer_name(agent),
        version=version,
        progress=progress,
    )


def model_layer_name(agent: str) -> str:
    """Return the name of the layer of an agent's weights."""
    return f"{agent}.model"
