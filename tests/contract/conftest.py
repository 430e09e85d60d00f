"""Fixtures that the contract suites share."""

from kafka_brokers import kafka, project  # noqa: F401  fixtures
from statedb_world import clock, database  # noqa: F401  fixtures
