"""The page on contracts names every field and no other, and shows the two well-known ones."""

from __future__ import annotations

import re

from contracts_shown import PDF_ANALYZER, WEATHER_FORECASTER
from documents import ROOT, Page
from dsec_common.asdl.kinds import ListOf, Table
from dsec_common.asdl.model import CONTRACT

PAGE = Page(ROOT / "docs" / "asdl.md")


def fields(table: Table, around: str = "") -> list[str]:
    """Return the names of all fields, those of inner tables with theirs."""
    names = []
    for name, kind in table.kinds.items():
        names.append(around + name)
        inner = kind.part if isinstance(kind, ListOf) else kind
        if isinstance(inner, Table):
            names += fields(inner, f"{around}{name}.")
    return names


def test_the_table_names_every_field_in_the_order_of_the_code() -> None:
    rows = [cells[0].strip("`") for cells in PAGE.table("field", "what it says")]
    assert rows == fields(CONTRACT)


def test_the_contracts_are_shown_as_they_are() -> None:
    shown = re.findall(r"<<'END'\n(.*?)^END$", PAGE.text, re.DOTALL | re.MULTILINE)
    assert shown[:2] == [WEATHER_FORECASTER, PDF_ANALYZER]
