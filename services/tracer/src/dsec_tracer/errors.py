"""The tracer's refusals, worded once."""

from __future__ import annotations

from dsec_common.errors import DsecError, invalid, not_found


def sandbox_unknown(sandbox_id: str) -> DsecError:
    """Return the error for a sandbox of which nothing was read, or another project's."""
    return not_found(
        f"nothing was read yet of a sandbox {sandbox_id} of this project; a step comes here within "
        "a second of its end, and is forgotten some days after the last one",
        sandbox_id=sandbox_id,
    )


def no_kafka() -> DsecError:
    """Return the error for a tracer that was not told where the log is."""
    return invalid(
        "the tracer reads the behaviour log from Kafka: set kafka_bootstrap (host:port,…)",
        setting="kafka_bootstrap",
    )
