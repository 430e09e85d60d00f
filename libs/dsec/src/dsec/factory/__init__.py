"""Environments for agents, made in bulk: built in sandboxes, looked through, proven, published.

See ``docs/factory.md``.
"""

from dsec.factory.building import Environment, Hook, build_environment
from dsec.factory.bulk import build_many
from dsec.factory.checking import check_layer
from dsec.factory.errors import EnvironmentRefused, NotProven
from dsec.factory.evidence import Evidence, evidence_of, read_secrets
from dsec.factory.leaks import Finding, look_through
from dsec.factory.spec import FactorySpec, Item, item_of, read_spec
from dsec.factory.state import Failure, Outcome, State
from dsec.factory.views import Bounds

__all__ = [
    "Bounds",
    "Environment",
    "EnvironmentRefused",
    "Evidence",
    "FactorySpec",
    "Failure",
    "Finding",
    "Hook",
    "Item",
    "NotProven",
    "Outcome",
    "State",
    "build_environment",
    "build_many",
    "check_layer",
    "evidence_of",
    "item_of",
    "look_through",
    "read_secrets",
    "read_spec",
]
