"""Node providers: processes of this machine, a webhook, Kubernetes; each against a real peer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from dsec_broker.providers import Order, open_provider
from dsec_broker.providers.kubernetes import KubernetesProvider, open_kubernetes
from dsec_broker.providers.local import LocalProvider, open_local
from dsec_broker.providers.webhook import open_webhook, sign
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.processes import ProcessIdentity

# --- Choosing one -----------------------------------------------------------------------------


def test_providers_are_found_by_their_entry_point(tmp_path: Path) -> None:
    assert isinstance(open_provider("local", {"directory": str(tmp_path)}), LocalProvider)
    assert isinstance(open_provider("kubernetes", {"name": "nodes"}), KubernetesProvider)
    with pytest.raises(DsecError, match="installed: kubernetes, local, webhook"):
        open_provider("cloud", {})


@pytest.mark.parametrize(
    ("name", "settings", "names"),
    [
        ("local", {"directory": ""}, "directory"),
        ("local", {"directory": "/x", "prefix": "a.b"}, "a.b-1"),
        ("local", {}, "directory"),
        ("webhook", {"url": "ftp://x"}, "url"),
        ("webhook", {"url": "http://x", "retries": "2"}, "retries"),
        ("webhook", {"url": "http://x", "attempts": "0"}, "attempts"),
        ("kubernetes", {"name": "Nodes"}, "Nodes"),
        ("kubernetes", {"name": "nodes", "kind": "daemonset"}, "daemonset"),
        ("kubernetes", {"name": "nodes", "timeout_s": "nan"}, "timeout_s"),
    ],
)
def test_wrong_settings_are_refused_by_name(
    name: str, settings: dict[str, str], names: str
) -> None:
    with pytest.raises(DsecError, match=names) as caught:
        open_provider(name, settings)
    assert caught.value.code is ErrorCode.INVALID


# --- Local ------------------------------------------------------------------------------------


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Have nodes be a program that tells its arguments and waits; yield the nodes' directory."""
    package = tmp_path / "programs" / "dsec_sandboxd"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import json, signal, sys\nprint(json.dumps(sys.argv[1:]), flush=True)\n"
        "signal.sigwait([signal.SIGTERM])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    directory = tmp_path / "nodes"
    yield directory
    for file in directory.glob("*.json"):
        ProcessIdentity(**json.loads(file.read_text())).end(5)
    with contextlib.suppress(ChildProcessError):
        # Those that another provider had started are left to us.
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def living(directory: Path) -> dict[str, int]:
    found = {}
    for file in sorted(directory.glob("*.json")):
        identity = ProcessIdentity(**json.loads(file.read_text()))
        if identity.alive:
            found[file.stem] = identity.pid
    return found


def end_at_once(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def write_identity(directory: Path, name: str, identity: ProcessIdentity) -> None:
    directory.mkdir()
    (directory / f"{name}.json").write_bytes(msgspec.json.encode(identity))


def nodes_credentials(auth: Path) -> Path:
    (found,) = (auth / "creds").glob("sandboxd-*.creds")
    return found


def log_of(directory: Path, node: str) -> list[str]:
    told: list[str] = json.loads((directory / f"{node}.log").read_text() or "[]")
    return told


async def test_a_local_provider_starts_what_is_missing_and_ends_only_what_leaves(
    stand_in: Path,
) -> None:
    provider = open_local({"directory": str(stand_in)})
    await provider.scale(Order(wanted=2))
    first = living(stand_in)
    assert list(first) == ["elastic-1", "elastic-2"]
    await provider.scale(Order(wanted=2))
    assert living(stand_in) == first
    # Fewer are wanted, but nobody said which has nothing to do.
    await provider.scale(Order(wanted=0))
    assert living(stand_in) == first
    await provider.scale(Order(wanted=1, leaving=("elastic-1",)))
    assert living(stand_in) == {"elastic-2": first["elastic-2"]}
    await provider.scale(Order(wanted=2))
    assert list(living(stand_in)) == ["elastic-1", "elastic-2"]


async def test_the_next_broker_goes_on_with_the_nodes_of_the_one_before(stand_in: Path) -> None:
    await open_local({"directory": str(stand_in)}).scale(Order(wanted=2))
    before = living(stand_in)
    later = open_local({"directory": str(stand_in)})
    await later.scale(Order(wanted=2))
    assert living(stand_in) == before
    end_at_once(before["elastic-1"])
    await later.scale(Order(wanted=2))
    after = living(stand_in)
    assert list(after) == ["elastic-1", "elastic-2"]
    assert after["elastic-1"] != before["elastic-1"]
    await later.scale(Order(wanted=0, leaving=("elastic-1", "elastic-2")))
    assert living(stand_in) == {}


async def test_a_process_that_took_over_the_pid_is_nobodys_node(stand_in: Path) -> None:
    provider = open_local({"directory": str(stand_in)})
    own = ProcessIdentity.of(os.getpid())
    assert own is not None
    write_identity(stand_in, "elastic-1", ProcessIdentity(own.pid, own.start_time - 1))
    await provider.scale(Order(wanted=0, leaving=("elastic-1",)))
    assert own.alive
    assert living(stand_in) == {}


async def test_a_local_node_is_told_its_name_its_label_and_its_credentials(
    stand_in: Path, tmp_path: Path
) -> None:
    settings = {
        "directory": str(stand_in),
        "config": "/etc/dsec.toml",
        "auth_directory": str(tmp_path / "auth"),
        "prefix": "more",
    }
    provider = open_local(settings)
    await provider.scale(Order(wanted=1))
    await provider.scale(Order(wanted=0, leaving=("more-1",)))
    told = log_of(stand_in, "more-1")
    credentials = nodes_credentials(tmp_path / "auth")
    assert credentials.name == "sandboxd-more-1.creds"
    if told:  # it may have been ended before it said anything
        assert set(told) == {
            "--node=more-1",
            "--labels=provider=local",
            "--config=/etc/dsec.toml",
            f"--nats-credentials={credentials}",
        }


# --- A peer that speaks HTTP ------------------------------------------------------------------


class Peer:
    """An HTTP server that keeps what it was asked and answers as told."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []
        self.answers: list[int] = []

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.asked.append((request.method, request.path, dict(request.headers), body))
        return web.Response(status=self.answers.pop(0) if self.answers else 200, text="told so")


async def serve(handler: Any) -> tuple[web.AppRunner, str]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    peer = Peer()
    runner, peer.url = await serve(peer.answer)
    yield peer
    await runner.cleanup()


# --- Webhook ----------------------------------------------------------------------------------


async def test_a_webhook_is_sent_the_order_signed(peer: Peer, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    provider = open_webhook({"url": peer.url + "/nodes", "secret_file": str(secret)})
    await provider.scale(Order(wanted=3, leaving=("n-1",), fence=7))
    await provider.close()
    ((method, path, headers, body),) = peer.asked
    assert (method, path) == ("POST", "/nodes")
    assert json.loads(body) == {"wanted": 3, "leaving": ["n-1"], "fence": 7}
    told = headers["dsec-signature"]
    assert told == "sha256=" + sign(b"s3cret", headers["dsec-timestamp"], body)
    assert told != "sha256=" + sign(b"another", headers["dsec-timestamp"], body)
    assert provider.may_leave(["a", "b", "c"], {"c", "a"}) == ["a", "c"]


async def test_a_webhook_that_fails_is_tried_again_until_it_takes_the_order(peer: Peer) -> None:
    provider = open_webhook({"url": peer.url, "attempts": "3", "pause_s": "0"})
    peer.answers = [503, 429]
    await provider.scale(Order(wanted=1))
    assert len(peer.asked) == 3
    peer.answers = [500, 500, 500]
    with pytest.raises(DsecError, match="answered 500: told so") as caught:
        await provider.scale(Order(wanted=1))
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert len(peer.asked) == 6
    await provider.close()


@pytest.mark.parametrize(("status", "code"), [(403, ErrorCode.DENIED), (400, ErrorCode.INVALID)])
async def test_an_order_that_is_refused_is_not_sent_again(
    peer: Peer, status: int, code: ErrorCode
) -> None:
    provider = open_webhook({"url": peer.url, "pause_s": "0"})
    peer.answers = [status]
    with pytest.raises(DsecError) as caught:
        await provider.scale(Order(wanted=1))
    assert caught.value.code is code
    assert len(peer.asked) == 1
    await provider.close()


async def test_a_webhook_that_nobody_serves_is_unavailable(peer: Peer) -> None:
    provider = open_webhook({"url": "http://127.0.0.1:9", "attempts": "2", "pause_s": "0"})
    with pytest.raises(DsecError) as caught:
        await provider.scale(Order(wanted=1))
    assert caught.value.code is ErrorCode.UNAVAILABLE
    await provider.close()


# --- Kubernetes -------------------------------------------------------------------------------


class Cluster:
    """The part of the Kubernetes API that scaling takes, over one set and its pods."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.replicas = 0
        self.version = 1
        self.pods: dict[str, dict[str, str]] = {}
        self.created = 0
        self.conflicts = 0
        self.url = ""

    def become(self, replicas: int) -> None:
        """Do what the set's controller does."""
        self.replicas = replicas
        if self.kind == "statefulset":
            self.pods = {
                name: notes
                for name, notes in self.pods.items()
                if int(name.rpartition("-")[2]) < replicas
            }
            for number in range(replicas):
                self.pods.setdefault(f"nodes-{number}", {})
            return
        cost = "controller.kubernetes.io/pod-deletion-cost"
        while len(self.pods) > replicas:
            del self.pods[
                min(self.pods, key=lambda name: (int(self.pods[name].get(cost, 0)), name))
            ]
        while len(self.pods) < replicas:
            self.created += 1
            self.pods[f"nodes-x{self.created}"] = {}

    async def answer(self, request: web.Request) -> web.Response:
        if request.headers.get("authorization") != "Bearer t0ken":
            return self._status(401, "Unauthorized")
        parts = request.path.strip("/").split("/")
        scale = ["apis", "apps", "v1", "namespaces", "prod", f"{self.kind}s", "nodes", "scale"]
        if parts == scale and request.method in {"GET", "PUT"}:
            return await self._scale(request)
        if parts[:5] == ["api", "v1", "namespaces", "prod", "pods"] and len(parts) == 6:
            return await self._pod(request, parts[5])
        return self._status(404, "the server could not find the requested resource")

    async def _scale(self, request: web.Request) -> web.Response:
        if request.method == "PUT":
            asked = await request.json()
            if self.conflicts or asked["metadata"]["resourceVersion"] != str(self.version):
                self.conflicts = max(0, self.conflicts - 1)
                self.version += 1
                return self._status(409, "the object has been modified")
            self.version += 1
            self.become(asked["spec"]["replicas"])
        document = {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {"name": "nodes", "resourceVersion": str(self.version)},
            # What is 0 is left out, as the API does.
            "spec": {"replicas": self.replicas} if self.replicas else {},
            "status": {"replicas": len(self.pods)},
        }
        return web.json_response(document)

    async def _pod(self, request: web.Request, name: str) -> web.Response:
        if name not in self.pods:
            return self._status(404, f'pods "{name}" not found')
        if request.method == "PATCH":
            assert request.headers["content-type"] == "application/merge-patch+json"
            self.pods[name] |= (await request.json())["metadata"]["annotations"]
        elif request.method == "DELETE":
            del self.pods[name]
            self.become(self.replicas)
        return web.json_response({"kind": "Pod", "metadata": {"name": name}})

    def _status(self, code: int, message: str) -> web.Response:
        return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)


@pytest.fixture(params=["statefulset", "deployment"])
async def cluster(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[tuple[Cluster, KubernetesProvider]]:
    (tmp_path / "token").write_text("t0ken\n")
    cluster = Cluster(request.param)
    runner, cluster.url = await serve(cluster.answer)
    provider = open_kubernetes(
        {
            "name": "nodes",
            "namespace": "prod",
            "kind": cluster.kind,
            "url": cluster.url,
            "token_file": str(tmp_path / "token"),
        }
    )
    yield cluster, provider
    await provider.close()
    await runner.cleanup()


async def test_a_set_gets_the_replicas_that_are_wanted(
    cluster: tuple[Cluster, KubernetesProvider],
) -> None:
    kubernetes, provider = cluster
    await provider.scale(Order(wanted=3))
    assert kubernetes.replicas == 3
    version = kubernetes.version
    await provider.scale(Order(wanted=3))
    assert kubernetes.version == version
    # Nobody leaves, so nothing is taken away.
    await provider.scale(Order(wanted=1))
    assert kubernetes.replicas == 3


async def test_only_the_pods_that_leave_are_taken_away(
    cluster: tuple[Cluster, KubernetesProvider],
) -> None:
    kubernetes, provider = cluster
    await provider.scale(Order(wanted=4))
    pods = sorted(kubernetes.pods)
    idle = {pods[1], pods[3]}
    leaving = tuple(provider.may_leave(pods, idle))
    # A StatefulSet takes away its last; a Deployment those that are marked.
    assert set(leaving) == ({pods[3]} if kubernetes.kind == "statefulset" else idle)
    await provider.scale(Order(wanted=4 - len(leaving), leaving=leaving))
    assert set(kubernetes.pods) == set(pods) - set(leaving)
    assert kubernetes.replicas == 4 - len(leaving)
    left = dict(kubernetes.pods)
    await provider.scale(Order(wanted=kubernetes.replicas, leaving=leaving))
    assert kubernetes.pods == left


async def test_a_pod_that_leaves_while_all_are_wanted_again_comes_back_fresh(
    cluster: tuple[Cluster, KubernetesProvider],
) -> None:
    kubernetes, provider = cluster
    await provider.scale(Order(wanted=2))
    first = min(kubernetes.pods)
    kubernetes.pods[first]["old"] = "yes"
    await provider.scale(Order(wanted=2, leaving=(first,)))
    assert kubernetes.replicas == len(kubernetes.pods) == 2
    assert not any(kubernetes.pods.values())


async def test_a_set_that_others_change_is_read_again(
    cluster: tuple[Cluster, KubernetesProvider],
) -> None:
    kubernetes, provider = cluster
    kubernetes.conflicts = 2
    await provider.scale(Order(wanted=2))
    assert kubernetes.replicas == 2
    kubernetes.conflicts = 99
    with pytest.raises(DsecError, match="changed by others") as caught:
        await provider.scale(Order(wanted=3))
    assert caught.value.code is ErrorCode.UNAVAILABLE


async def test_what_the_api_server_says_is_told(
    cluster: tuple[Cluster, KubernetesProvider], tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("expired")
    with pytest.raises(DsecError, match="answered 401: Unauthorized") as caught:
        await cluster[1].scale(Order(wanted=1))
    assert caught.value.code is ErrorCode.DENIED
    (tmp_path / "token").unlink()
    with pytest.raises(DsecError, match="token"):
        await cluster[1].scale(Order(wanted=1))
