"""The Kafka topics. No service spells a topic's name itself."""

from __future__ import annotations

import re
from typing import Final

from dsec_common.errors import invalid
from dsec_common.subjects import DEFAULT_PROJECT, validate_project

BEHAVIOR_LOGS: Final = "dsec-behavior-logs"
"""The behaviour logs of the project ``default``."""

VERDICTS: Final = "dsec-verdicts"
"""What governance decided about agents' actions."""

METERING: Final = "dsec-metering"
"""Capacity used, for the bill."""

ALL_BEHAVIOR_LOGS: Final = rf"^{re.escape(BEHAVIOR_LOGS)}(\.[a-z0-9-]+)?$"
"""A pattern that matches every project's behaviour logs."""


def behavior_logs(project: str = DEFAULT_PROJECT) -> str:
    """Return the topic of a project's behaviour logs. Each has its own, so Kafka's ACLs apply.

    Raises:
        DsecError: ``invalid`` when the name is not a project's.
    """
    validate_project(project)
    return BEHAVIOR_LOGS if project == DEFAULT_PROJECT else f"{BEHAVIOR_LOGS}.{project}"


def project_of(topic: str) -> str:
    """Return the project whose behaviour logs a topic carries.

    Raises:
        DsecError: ``invalid`` when the topic carries none.
    """
    if topic == BEHAVIOR_LOGS:
        return DEFAULT_PROJECT
    prefix, _, project = topic.partition(".")
    if prefix != BEHAVIOR_LOGS:
        raise invalid(f"topic {topic[:80]!r} carries no behaviour logs", topic=topic[:80])
    return validate_project(project)
