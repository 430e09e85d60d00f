"""Flushing and unsubscribing in the order in which they were asked for.

The client writes a PING at once but leaves everything else to a task that runs later: its own
``flush()`` may return before the server has seen a subscription, and its ``Subscription.drain()``
withdraws too late and then throws away the messages that the server sent meanwhile.
"""

from __future__ import annotations

import asyncio

from nats.aio.client import Client
from nats.aio.subscription import Subscription


async def flush(client: Client) -> None:
    """Return when the server has seen everything that ``client`` was asked to send until now.

    Raises:
        nats.errors.Error: when the connection is lost or closed meanwhile.
    """
    while client.is_connected and client.pending_data_size > 0:  # noqa: ASYNC110  it sets no event
        await asyncio.sleep(0)
    await client.flush()


async def withdraw(client: Client, subscription: Subscription) -> None:
    """Unsubscribe, and return when each message that the server had sent was given to the callback.

    Raises:
        nats.errors.Error: when the connection is lost or closed meanwhile.
    """
    await client._send_unsubscribe(subscription._id)  # noqa: SLF001  nothing public unsubscribes and keeps listening
    await flush(client)
    await subscription.drain()  # type: ignore[no-untyped-call]
