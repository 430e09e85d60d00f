"""Signatures of packages: Ed25519, keys written as NATS writes those of users.

What is signed is the manifest, which has the hash of each file.
"""

from __future__ import annotations

import base64
import binascii
import os
from pathlib import Path
from typing import Final

import msgspec
import nacl.exceptions
import nacl.signing
import nkeys

from dsec.pack.errors import refused, untrusted
from dsec_common.errors import invalid

#: Before what is signed: a signature of anything else is none of a package.
_PURPOSE: Final = b"dsec package 1\n"
_KEY_BYTES: Final = 32
#: Its kind before the key, a checksum after it.
_PUBLIC_BYTES: Final = 35
_KEY_FILE_MAX_BYTES: Final = 4096


class Signature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who signed, and the signature."""

    public_key: str
    signature: bytes


class SigningKey:
    """A private key. It shows its public one only."""

    def __init__(self, seed: str) -> None:
        try:
            self._pair = nkeys.from_seed(bytearray(seed.strip().encode("ascii")))
        except (nkeys.NkeysError, ValueError):
            raise invalid("this is no key to sign with: one begins with 'SU'") from None
        self.public_key: str = self._pair.public_key.decode("ascii")

    @classmethod
    def read(cls, path: Path) -> SigningKey:
        """Return the key in a file that :func:`write_new_key` made.

        Raises:
            DsecError: ``invalid``.
        """
        return cls(_text_of(path))

    def sign(self, manifest: bytes) -> bytes:
        """Return what :func:`check_signature` takes."""
        signature: bytes = self._pair.sign(_PURPOSE + manifest)
        return msgspec.json.encode(Signature(public_key=self.public_key, signature=signature))


def write_new_key(path: Path) -> SigningKey:
    """Make a key and write it to a new file that its owner alone can read.

    Raises:
        DsecError: ``invalid`` when the file is there, or cannot be written.
    """
    seed = nkeys.encode_seed(os.urandom(_KEY_BYTES), nkeys.PREFIX_BYTE_USER).decode("ascii")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(seed + "\n")
    except OSError as error:
        raise invalid(f"the key cannot be written to {path}: {error.strerror}") from None
    return SigningKey(seed)


def check_signature(manifest: bytes, stored: bytes) -> str:
    """Return the public key of who signed a manifest.

    Raises:
        DsecError: ``invalid`` for what is no signature; ``denied`` for one of something else.
    """
    try:
        signature = msgspec.json.decode(stored, type=Signature)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refused("bad_signature", f"its signature cannot be read: {error}") from None
    key = _verify_key(signature.public_key)
    try:
        key.verify(_PURPOSE + manifest, signature.signature)
    except (nacl.exceptions.CryptoError, ValueError):
        raise untrusted(
            "bad_signature", "its signature is wrong: the package was changed after it was signed"
        ) from None
    return signature.public_key


def public_key(text: str) -> str:
    """Return the public key that is meant: itself, or the file that it is in.

    Raises:
        DsecError: ``invalid``.
    """
    key = text if text.startswith("U") and "/" not in text else _text_of(Path(text)).strip()
    _verify_key(key)
    return key


def _verify_key(text: str) -> nacl.signing.VerifyKey:
    try:
        raw = base64.b32decode(text)
    except (binascii.Error, ValueError):
        raw = b""
    checksum = binascii.crc_hqx(raw[:-2], 0).to_bytes(2, "little")
    if len(raw) != _PUBLIC_BYTES or raw[0] != nkeys.PREFIX_BYTE_USER or raw[-2:] != checksum:
        raise refused("bad_key", f"{text[:64]!r} is no public key: one begins with 'U'")
    return nacl.signing.VerifyKey(raw[1 : 1 + _KEY_BYTES])


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_KEY_FILE_MAX_BYTES).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(f"{path} cannot be read as a key: {error}") from None
