"""Compute Units that are held. No I/O."""

from __future__ import annotations

import msgspec

from dsec_common.compute.model import Slice


class Granted(msgspec.Struct, frozen=True):
    """Units that are held on a node."""

    node: str
    lease_id: str
    slices: tuple[Slice, ...] = ()
