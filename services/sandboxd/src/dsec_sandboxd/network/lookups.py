"""Names, looked up with the node's upstream servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import dns.asyncquery
import dns.exception
import dns.message
import dns.rdatatype
import structlog

from dsec_sandboxd.network.upstreams import Upstream

_log: Final = structlog.get_logger(__name__)

_TIMEOUT_S: Final = 3.0
_UDP_BYTES_MAX: Final = 1232


async def look_up(
    upstreams: Sequence[Upstream], name: str, kind: dns.rdatatype.RdataType
) -> dns.message.Message | None:
    """Return what the first server that answers says of a name; None when none does."""
    query = dns.message.make_query(name, kind, use_edns=0, payload=_UDP_BYTES_MAX)
    for upstream in upstreams:
        try:
            found, _ = await dns.asyncquery.udp_with_fallback(
                query,
                upstream.host,
                timeout=_TIMEOUT_S,
                port=upstream.port,
                ignore_unexpected=True,
                ignore_errors=True,
            )
        except (dns.exception.DNSException, OSError, EOFError, ValueError) as error:
            _log.info("upstream_failed", upstream=upstream.host, error=type(error).__name__)
            continue
        return found
    return None
