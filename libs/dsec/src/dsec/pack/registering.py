"""Packages and weights as versions of agents: stored, made layers of, registered, in this order.

Each step may be done again: a layer that is there with the same content, pieces that are uploaded
and a version that is registered with the same are all fine. So a command that was interrupted is
given again.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsec.pack.errors import refused
from dsec.pack.layering import import_model, model_layer_name
from dsec.pack.package import Package, package_bytes, read_package
from dsec_common.asdl.model import Contract
from dsec_common.asdl.reading import checked, read_text
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.agent import AgentInfo, AgentPolicy, Governed

if TYPE_CHECKING:
    from dsec.client import DSecClient
    from dsec.layers import Progress


async def register_package(
    client: DSecClient,
    path: Path,
    *,
    public_key: str = "",
    description: str = "",
    permissions: Iterable[str] = (),
    base: str = "",
    workspace: str = "",
    toolkits: Iterable[str] = (),
    policy: AgentPolicy | None = None,
    progress: Progress | None = None,
) -> AgentInfo:
    """Register the version of an agent that a package holds; its instances have it as a layer.

    Args:
        client: of the project.
        path: of the package; its contract says name and version.
        public_key: whose signature is demanded; empty for none.
        description: for listings; else the contract's.
        permissions: what the agent needs, beside what the contract says.
        base: the base layer of instances whose requests name none; else the contract's.
        workspace: likewise.
        toolkits: below the package's own layer; else the contract's.
        policy: what instances may do from the start.
        progress: told how far the layer's import is.

    Raises:
        DsecError: as :func:`dsec.pack.package.read_package`, then as
            :meth:`dsec.layers.Layers.import_directory` and :meth:`dsec.agents.Agents.register`.
    """
    data = package_bytes(path)
    package = read_package(data, public_key)
    written, contract = _contract_in(package, path)
    layer = await client.layers.import_package(package, progress=progress)
    return await client.agents.register(
        contract.name,
        contract.version,
        description=description or contract.description,
        contract=written,
        permissions=tuple(dict.fromkeys((*contract.permissions, *permissions))),
        base=base,
        workspace=workspace,
        toolkits=(*(tuple(toolkits) or contract.layers.toolkits), layer.reference),
        package=data,
        policy=policy,
    )


def _contract_in(package: Package, path: Path) -> tuple[dict[str, Any], Contract]:
    try:
        text = package.contract.decode("utf-8")
    except UnicodeDecodeError as error:
        raise refused("bad_contract", f"the contract in {path} is no text: {error}") from None
    read = read_text(text)
    contract = checked(read, f"the contract in {path}")
    said = (contract.name, contract.version)
    if said != (package.manifest.name, package.manifest.version):
        raise refused(
            "bad_contract",
            f"{path} is of {package.manifest.name} {package.manifest.version}, and its contract of "
            f"{' '.join(said)}",
        )
    return read.written, contract


async def update_model(
    client: DSecClient,
    name: str,
    version: str,
    weights: Path,
    *,
    progress: Progress | None = None,
    **rolling: Any,
) -> Governed:
    """Roll out an agent with other weights: a version that differs from the active one in nothing.

    The weights are a layer of their own, so nothing else is stored or fetched again. Instances of
    the version before keep their weights until they leave.

    Args:
        client: of the project.
        name: the agent.
        version: a new version, for these weights.
        weights: a file, which instances find below ``/opt/dsec/models/<name>``.
        progress: told how far the layer's import is.
        **rolling: as :meth:`dsec.agents.Agents.update` takes it.

    Raises:
        DsecError: ``not_found`` for the agent; ``conflict`` for a version with other weights or
            none; as :meth:`dsec.agents.Agents.update`.
    """
    agent = await client.agents.inspect(name)
    versions = {one.version: one for one in agent.versions}
    own = f"{model_layer_name(name)}@"
    known = versions.get(version)
    if known is not None and f"{own}{version}" not in known.toolkits:
        raise DsecError(
            ErrorCode.CONFLICT,
            f"{name} {version} is registered without these weights, and a version never changes: "
            "name a new one",
        )
    layer = await import_model(client, name, version, weights, progress)
    if known is None:
        others = (one for one in versions[agent.active].toolkits if not one.startswith(own))
        await client.agents.register_like(
            name, version, of=agent.active, toolkits=(*others, layer.reference)
        )
    return await client.agents.update(name, version, **rolling)
