"""``nodes.yaml``: what an operator says of nodes and GPUs, before what the machines tell.

    cu_table: {"RTX 6000 Ada": 110}
    prices: {A100: 1.8, L40: 1.0}
    labels: {site: north}
    nodes:
      gpu-1:
        gpu_model: L40
        gpus: {GPU-8f6d…: A100}
        labels: {rack: "7"}

The same file is read by brokers and schedulers (units and prices) and by nodes (their own entry).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec

from dsec_common.compute.units import UNITS_MAX
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.yaml_text import read_yaml

NODES_FILE: Final = "/etc/dsec/nodes.yaml"
"""Where it is looked for; it need not be there."""

Units = Annotated[float, msgspec.Meta(ge=0, le=UNITS_MAX)]
Price = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Model = Annotated[str, msgspec.Meta(pattern="[A-Za-z0-9]")]
NodeName = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")]


class NodeEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is said of one node.

    Attributes:
        gpu_model: the model of all its GPUs, whatever the driver calls them.
        gpus: the model of single ones, by uuid; before ``gpu_model``.
        only: uuids of the GPUs that it offers, where several nodes share a machine; empty for all.
        labels: told in its heartbeats, before those of all nodes.
    """

    gpu_model: str = ""
    gpus: dict[str, str] = msgspec.field(default_factory=dict)
    only: tuple[str, ...] = ()
    labels: dict[str, str] = msgspec.field(default_factory=dict)

    def model_of(self, uuid: str, told: str) -> str:
        """Return the model of a GPU that the driver calls ``told``."""
        return self.gpus.get(uuid) or self.gpu_model or told


class NodesFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file.

    Attributes:
        cu_table: Compute Units by GPU model, before the built-in table.
        prices: cost of one CU for an hour by GPU model, before the built-in ones.
        labels: of every node.
        nodes: single nodes, by name.
    """

    cu_table: dict[Model, Units] = msgspec.field(default_factory=dict)
    prices: dict[Model, Price] = msgspec.field(default_factory=dict)
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    nodes: dict[NodeName, NodeEntry] = msgspec.field(default_factory=dict)

    def entry(self, node: str) -> NodeEntry:
        """Return what is said of a node, with the labels of all nodes."""
        own = self.nodes.get(node, NodeEntry())
        return msgspec.structs.replace(own, labels={**self.labels, **own.labels})


def read_nodes_file(path: str) -> NodesFile:
    """Return what the file says; one that is not at :data:`NODES_FILE` says nothing.

    Raises:
        DsecError: ``invalid``: what is wrong where, or that a file named otherwise is not there.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        if path == NODES_FILE:
            return NodesFile()
        raise DsecError(ErrorCode.INVALID, f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DsecError(ErrorCode.INVALID, f"cannot read {path}: {error}") from error
    return read_yaml(text, NodesFile, path)
