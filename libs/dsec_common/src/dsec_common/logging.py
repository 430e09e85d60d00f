"""Structured logs: one JSON object a line on standard error, or readable lines on a terminal."""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logging(service: str, *, level: str = "info", json_lines: bool | None = None) -> None:
    """Set up structlog for this process.

    Args:
        service: bound to every line.
        level: ``debug``, ``info``, ``warning`` or ``error``.
        json_lines: JSON objects when true, columns when false; by default what standard error is.
    """
    if json_lines is None:
        json_lines = not sys.stderr.isatty()
    renderer: structlog.types.Processor = (
        structlog.processors.JSONRenderer() if json_lines else structlog.dev.ConsoleRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
