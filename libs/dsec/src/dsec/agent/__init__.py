"""Agents as their authors write them: a class with ``execute``, its tools, its way to the platform.

Runs inside a sandbox or anywhere else, and needs nothing of the platform's client: importing it
loads the standard library alone.
"""

from __future__ import annotations

from dsec.agent.agent import Agent, AsyncTool
from dsec.agent.context import Artefact, Context, Feedback
from dsec.agent.state import State
from dsec.tools.calls import ToolCall, ToolResult

__all__ = [
    "Agent",
    "Artefact",
    "AsyncTool",
    "Context",
    "Feedback",
    "State",
    "ToolCall",
    "ToolResult",
]
