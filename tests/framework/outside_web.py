"""Servers that agents call, on this machine: HTTPS hosts behind a proxy, and a scripted model."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


@dataclass
class Asked:
    """One request that a server got."""

    method: str
    host: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Answer:
    """What a server says; with ``cut`` it promises more and hangs up."""

    status: int = 200
    body: bytes | str = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False


@dataclass
class Web:
    """A server that answers as a test says."""

    answer: Callable[[Asked], Answer]
    url: str = ""
    asked: list[Asked] = field(default_factory=list)


@contextlib.contextmanager
def web(
    answer: Callable[[Asked], Answer], certificate: ssl.SSLContext | None = None
) -> Iterator[Web]:
    """Yield a server; with a certificate it is a proxy, and every host that is asked of it."""
    running = Web(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 10

        def do_CONNECT(self) -> None:
            assert certificate is not None
            self.send_response(200)
            self.end_headers()
            self.connection = certificate.wrap_socket(self.connection, server_side=True)
            self.rfile = self.connection.makefile("rb")
            self.wfile = self.connection.makefile("wb", 0)
            self.close_connection = False

        def _any(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            asked = Asked(
                self.command,
                self.headers.get("Host", ""),
                self.path,
                {name.lower(): value for name, value in self.headers.items()},
                self.rfile.read(length),
            )
            running.asked.append(asked)
            told = running.answer(asked)
            body = told.body.encode() if isinstance(told.body, str) else told.body
            self.send_response(told.status)
            for name, value in told.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body) + told.cut))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = _any  # noqa: N815  the library's names

        def finish(self) -> None:
            super().finish()
            self.connection.close()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield running
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def certificate_for(host: str, directory: Path) -> tuple[ssl.SSLContext, Path]:
    """Return the server's side of a host's TLS, and the file that clients trust."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host)])
    now = dt.datetime.now(dt.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    trusted, private = directory / "trusted.pem", directory / "private.pem"
    trusted.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(trusted, private)
    return context, trusted


def completion(text: str, **choice: Any) -> Answer:
    """Return a chat completion as model servers write it."""
    message = {"role": "assistant", "content": text}
    told = {
        "model": "deepseek-v2-7b",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop", **choice}],
        "usage": {"prompt_tokens": 11, "completion_tokens": 7},
    }
    return Answer(body=json.dumps(told), headers={"Content-Type": "application/json"})
