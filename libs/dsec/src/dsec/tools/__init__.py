"""Tools of agents: what an agent's contract names, and :meth:`dsec.Agent.get_tool` returns.

Those of this package are known by name; others are plug-ins, classes under the entry point group
``dsec.tools``. Whatever a tool is, each of its calls is held to the contract and told of.
"""

from __future__ import annotations

import importlib
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

#: Known without their distribution's metadata, which a packed agent does not have.
BUILT_IN: Final = {
    "files": "dsec.tools.files:Files",
    "http_client": "dsec.tools.http:HttpClient",
    "llm": "dsec.tools.llm:Llm",
    "llm_summarizer": "dsec.tools.llm:Llm",
    "pdf_parser": "dsec.tools.pdf:PdfParser",
    "shell": "dsec.tools.shell:Shell",
    "sql": "dsec.tools.sql:Sql",
}


def load_tool(name: str) -> type[Tool]:
    """Return the class of a tool; a built-in one cannot be replaced.

    Raises:
        DsecError: ``not_found`` when none has the name; ``invalid`` for a plug-in that is no tool.
    """
    home = BUILT_IN.get(name)
    if home is not None:
        module, _, attribute = home.partition(":")
        found = getattr(importlib.import_module(module), attribute)
    else:
        plug_ins = {entry.name: entry for entry in entry_points(group=GROUP)}
        if name not in plug_ins:
            known = ", ".join(sorted({*BUILT_IN, *plug_ins}))
            raise not_found(f"there is no tool {name!r}; there are {known}", tool=name)
        found = plug_ins[name].load()
    if not (isinstance(found, type) and issubclass(found, Tool)):
        raise invalid(f"the plug-in {name!r} of {GROUP} is no class of dsec.tools.Tool", tool=name)
    return found
