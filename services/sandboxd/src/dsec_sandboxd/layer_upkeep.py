"""What the layer store needs from time to time: garbage collected, holds renewed."""

from __future__ import annotations

from typing import Final

import structlog

from dsec_common.clock import Clock
from dsec_common.errors import DsecError
from dsec_sandboxd.layer_folds import LayerFolds
from dsec_sandboxd.layer_holds import LayerHolds
from dsec_sandboxd.layers.store import LayerStore

_log: Final = structlog.get_logger(__name__)

#: A quarter of the time after which a hold expires.
_RENEW_S: Final = 900.0


class LayerUpkeep:
    """Looks after a node's layers for as long as the daemon runs.

    Attributes:
        store: the layer store; other nodes may share it and collect as well.
        holds: what this node uses.
        garbage_interval_s: seconds between two collections.
        folds: made of layers; they go with them.
    """

    def __init__(
        self,
        store: LayerStore,
        holds: LayerHolds,
        clock: Clock,
        garbage_interval_s: float,
        folds: LayerFolds | None = None,
    ) -> None:
        self._store = store
        self._holds = holds
        self._clock = clock
        self._garbage_interval_s = garbage_interval_s
        self._folds = folds

    async def run(self) -> None:
        """Renew and collect until cancelled. A failure is logged and tried again in time.

        Begin when the node has taken over its sandboxes: what they use is declared at once.
        """
        collected_at = self._clock.monotonic()
        while True:
            try:
                await self._holds.declare()
                if self._clock.monotonic() - collected_at >= self._garbage_interval_s:
                    collected_at = self._clock.monotonic()
                    await self.collect()
            except DsecError as error:
                _log.warning("layers_not_looked_after", error=str(error))
            await self._clock.sleep(min(_RENEW_S, self._garbage_interval_s))

    async def collect(self) -> tuple[str, ...]:
        """Delete the images that nothing means and nobody holds; return their digests.

        Raises:
            DsecError: as the store's ``collect_garbage``.
        """
        removed = await self._store.collect_garbage(self._holds.in_use)
        if self._folds is not None:
            self._folds.forget_absent(self._store.image_path)
        if removed:
            _log.info("layers_collected", digests=removed)
        return removed
