"""Tools of agents: what an agent's contract names, and :meth:`dsec.Agent.get_tool` returns.

Those of this package are known by name; others are plug-ins, classes under the entry point group
``dsec.tools``. Whatever a tool is, each of its calls is held to the contract and told of.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Final

from dsec.tools.tool import Desk, Tool, is_stream, is_tool_call, tool_call
from dsec_common.errors import invalid, not_found

__all__ = [
    "BUILT_IN",
    "GROUP",
    "Desk",
    "Tool",
    "is_stream",
    "is_tool_call",
    "load_tool",
    "tool_call",
]

GROUP: Final = "dsec.tools"


# Each is imported when it is asked for, and by a statement: what packs an agent follows those.
def _files() -> type[Tool]:
    from dsec.tools.files import Files  # noqa: PLC0415  see above

    return Files


def _http() -> type[Tool]:
    from dsec.tools.http import HttpClient  # noqa: PLC0415  see above

    return HttpClient


def _llm() -> type[Tool]:
    from dsec.tools.llm import Llm  # noqa: PLC0415  see above

    return Llm


def _pdf() -> type[Tool]:
    from dsec.tools.pdf import PdfParser  # noqa: PLC0415  see above

    return PdfParser


def _shell() -> type[Tool]:
    from dsec.tools.shell import Shell  # noqa: PLC0415  see above

    return Shell


def _sql() -> type[Tool]:
    from dsec.tools.sql import Sql  # noqa: PLC0415  see above

    return Sql


BUILT_IN: Final = {
    "files": _files,
    "http_client": _http,
    "llm": _llm,
    "llm_summarizer": _llm,
    "pdf_parser": _pdf,
    "shell": _shell,
    "sql": _sql,
}


def load_tool(name: str) -> type[Tool]:
    """Return the class of a tool; a built-in one cannot be replaced.

    Raises:
        DsecError: ``not_found`` when none has the name; ``invalid`` for a plug-in that is no tool.
    """
    found = BUILT_IN[name]() if name in BUILT_IN else _plug_in(name)
    if not (isinstance(found, type) and issubclass(found, Tool)):
        raise invalid(f"the plug-in {name!r} of {GROUP} is no class of dsec.tools.Tool", tool=name)
    return found


def _plug_in(name: str) -> object:
    plug_ins = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in plug_ins:
        known = ", ".join(sorted({*BUILT_IN, *plug_ins}))
        raise not_found(f"there is no tool {name!r}; there are {known}", tool=name)
    return plug_ins[name].load()
