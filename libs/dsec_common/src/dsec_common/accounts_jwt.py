"""Keys and signed claims as NATS wants them: nkeys, ``ed25519-nkey`` JWTs, credentials files."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import time
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final

import msgspec
import nacl.exceptions
import nacl.signing
import nkeys

from dsec_common.errors import invalid

_HEADER: Final = b'{"typ":"JWT","alg":"ed25519-nkey"}'
_PUBLIC_KEY_BYTES: Final = 35
"""One byte of kind, 32 of key, two of checksum."""


class KeyKind(IntEnum):
    """What a key may stand for; the prefix byte of its text form."""

    OPERATOR = nkeys.PREFIX_BYTE_OPERATOR
    ACCOUNT = nkeys.PREFIX_BYTE_ACCOUNT
    USER = nkeys.PREFIX_BYTE_USER


class Identity:
    """An ed25519 key pair in NATS's text form."""

    def __init__(self, seed: str) -> None:
        try:
            self._pair = nkeys.from_seed(bytearray(seed.encode("ascii")))
        except (nkeys.NkeysError, ValueError) as error:
            raise invalid("a key file does not hold an nkey seed; it begins with 'S'") from error
        self.seed = seed
        self.public_key: str = self._pair.public_key.decode("ascii")

    @classmethod
    def new(cls, kind: KeyKind) -> Identity:
        """Return a fresh key of ``kind``."""
        return cls(nkeys.encode_seed(os.urandom(32), int(kind)).decode("ascii"))

    def sign(self, data: bytes) -> bytes:
        """Return the signature of ``data``."""
        signature: bytes = self._pair.sign(data)
        return signature


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def encode_claims(subject: str, name: str, nats: Mapping[str, Any], issuer: Identity) -> str:
    """Return a JWT in which ``issuer`` says ``nats`` of ``subject``. It does not expire."""
    claims: dict[str, Any] = {
        "iat": int(time.time()),
        "iss": issuer.public_key,
        "name": name,
        "nats": dict(nats),
        "sub": subject,
    }
    digest = hashlib.sha256(msgspec.json.encode(claims)).digest()
    claims["jti"] = base64.b32encode(digest).rstrip(b"=").decode("ascii")
    signed = f"{_encode(_HEADER)}.{_encode(msgspec.json.encode(claims))}"
    return f"{signed}.{_encode(issuer.sign(signed.encode('ascii')))}"


def decode_claims(token: str, issuer_public_key: str) -> dict[str, Any]:
    """Return the claims of ``token`` after checking that this issuer signed them.

    Raises:
        DsecError: ``invalid`` when the token is malformed, of another algorithm, issued by someone
            else or changed after signing.
    """
    try:
        signed, _, signature = token.rpartition(".")
        header, _, body = signed.partition(".")
        if msgspec.json.decode(_decode(header)) != msgspec.json.decode(_HEADER):
            raise invalid("the token is not an ed25519-nkey JWT")
        claims: dict[str, Any] = msgspec.json.decode(_decode(body), type=dict[str, Any])
        key = base64.b32decode(issuer_public_key)
        if len(key) != _PUBLIC_KEY_BYTES or claims.get("iss") != issuer_public_key:
            raise invalid("the token was issued by someone else")
        nacl.signing.VerifyKey(key[1:33]).verify(signed.encode("ascii"), _decode(signature))
    except (msgspec.DecodeError, binascii.Error, ValueError) as error:
        raise invalid(f"the token is malformed: {error}") from error
    except nacl.exceptions.CryptoError as error:
        raise invalid("the token was changed after it was signed") from error
    return claims


def credentials_text(token: str, identity: Identity) -> str:
    """Return the content of a ``.creds`` file, which every NATS client reads."""
    return (
        "-----BEGIN NATS USER JWT-----\n"
        f"{token}\n"
        "------END NATS USER JWT------\n\n"
        "-----BEGIN USER NKEY SEED-----\n"
        f"{identity.seed}\n"
        "------END USER NKEY SEED------\n"
    )


def read_credentials(text: str) -> tuple[str, str]:
    """Return the JWT and the seed in the content of a ``.creds`` file.

    Raises:
        DsecError: ``invalid`` when it is not one.
    """
    lines = text.splitlines()
    try:
        token = lines[lines.index("-----BEGIN NATS USER JWT-----") + 1]
        seed = lines[lines.index("-----BEGIN USER NKEY SEED-----") + 1]
    except (ValueError, IndexError) as error:
        raise invalid("not a NATS credentials file") from error
    return token, seed
