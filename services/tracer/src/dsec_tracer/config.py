"""What the tracer is told."""

from __future__ import annotations

from pathlib import Path

from dsec_common.config import ServiceConfig


class TracerConfig(ServiceConfig, frozen=True, kw_only=True):
    """Settings of one tracer.

    Attributes:
        name: tells the tracers of one machine apart; each keeps a directory of its own below
            ``state_directory`` and reads every record by itself.
        sandboxes_max: sandboxes remembered; the one without a new step for longest is forgotten.
        steps_max: steps kept of one sandbox, the first ones.
        kept_s: a sandbox without a new step for so long is forgotten.
        sums_kept_s: how long the hourly sums of what was held and used are kept.
        sweep_interval_s: how often that is looked for.
    """

    name: str = "tracer"
    sandboxes_max: int = 50_000
    steps_max: int = 100_000
    kept_s: float = 7 * 86_400.0
    sums_kept_s: float = 400 * 86_400.0
    sweep_interval_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuse what could only fail later.

        Raises:
            ValueError: naming the setting; it becomes a configuration error.
        """
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ValueError(f"name {self.name!r} must be usable as a directory's name")
        for setting in ("sandboxes_max", "steps_max", "kept_s", "sums_kept_s", "sweep_interval_s"):
            if not getattr(self, setting) > 0:
                raise ValueError(f"{setting} must be more than 0")

    @property
    def state_path(self) -> Path:
        """Where this tracer's RocksDB is."""
        return Path(self.state_directory) / "tracer" / self.name
