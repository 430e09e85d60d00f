"""A client as the options before the command ask for it."""

from __future__ import annotations

from dsec.cli.output import SETTINGS
from dsec.client import DSecClient


def client() -> DSecClient:
    """Return a client that is not yet connected."""
    return DSecClient(
        SETTINGS.servers,
        SETTINGS.credentials,
        state_directory=SETTINGS.state_directory,
    )
