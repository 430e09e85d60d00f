"""YAML of a stranger into nodes that know where they stand. No I/O.

What YAML offers beyond text, lists and tables is refused: anchors and aliases, with which a small
file becomes a huge one, tags, and more than one document. So are files and nestings larger than any
contract.

One thing is read that is no YAML: ``state_key_prefix: {agent_type}_{shard_id}``, which is how
people write it. After that name, a line that begins with a placeholder is text.
"""

from __future__ import annotations

import re
from typing import Any, Final

import yaml
from yaml.composer import Composer
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.resolver import Resolver
from yaml.scanner import Scanner

from dsec_common.asdl.problems import Findings, Path

TEXT_CHARACTERS_MAX: Final = 128 * 1024
"""The longest contract, as YAML."""

DEPTH_MAX: Final = 32
"""The deepest nesting."""

NODES_MAX: Final = 20_000
"""The most names and values."""

TEMPLATE_KEY: Final = "state_key_prefix"

STR: Final = "tag:yaml.org,2002:str"
INT: Final = "tag:yaml.org,2002:int"
FLOAT: Final = "tag:yaml.org,2002:float"
BOOL: Final = "tag:yaml.org,2002:bool"
NULL: Final = "tag:yaml.org,2002:null"

INTEGERS: Final = range(-(2**63), 2**64)
"""The whole numbers that every part of the platform can pass on."""

TOO_LARGE: Final = "a whole number has at most 64 bits: put text in quotes"
"""What is said of one that is not among :data:`INTEGERS`."""

_NO_TEXT: Final = "it holds NUL or half a character, which no program can be given: leave it out"
_LINE_END: Final = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
_TEMPLATE: Final = re.compile(r"(?:\{\w+\}[^\s#{},\[\]:]*)+(?=\s|$)")


class _RefusedError(yaml.MarkedYAMLError):
    """YAML that is well-formed, and not taken."""


class _TemplateScanner(Reader, Scanner):
    """Reads ``{a}_{b}`` after :data:`TEMPLATE_KEY` as text."""

    _last_word = ""
    _template_follows = False

    def fetch_plain(self) -> None:
        super().fetch_plain()
        self._last_word = self.tokens[-1].value
        self._template_follows = False

    def fetch_value(self) -> None:
        super().fetch_value()
        self._template_follows = self._last_word == TEMPLATE_KEY and not self.flow_level

    def fetch_flow_mapping_start(self) -> None:
        follows, self._template_follows = self._template_follows, False
        found = _TEMPLATE.match(self._rest_of_line()) if follows else None
        if found is None:
            super().fetch_flow_mapping_start()
            return
        self.save_possible_simple_key()
        self.allow_simple_key = False
        start = self.get_mark()
        self.forward(found.end())
        self.tokens.append(yaml.ScalarToken(found[0], False, start, self.get_mark(), '"'))

    def _rest_of_line(self) -> str:
        length = 0
        while self.peek(length) not in "\0\r\n\x85\u2028\u2029":
            length += 1
        return str(self.prefix(length))


class _Loader(_TemplateScanner, Parser, Composer, Resolver):
    """Composes nodes and constructs nothing."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        Resolver.__init__(self)
        self._depth = 0
        self._count = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        mark = event.start_mark
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise _RefusedError(
                problem="anchors and aliases are not taken: write it out", problem_mark=mark
            )
        if event.tag is not None:
            raise _RefusedError(
                problem=f"tags such as {event.tag[:40]} are not taken: leave it out",
                problem_mark=mark,
            )
        self._count += 1
        if self._count > NODES_MAX:
            raise _RefusedError(
                problem=f"it has more than {NODES_MAX} parts: no contract is that large",
                problem_mark=mark,
            )
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise _RefusedError(
                problem=f"it is nested deeper than {DEPTH_MAX}: make it simpler", problem_mark=mark
            )
        try:
            node = super().compose_node(parent, index)
        finally:
            self._depth -= 1
        if isinstance(node, ScalarNode) and not _is_text(node.value):  # by an escape such as \0
            raise _RefusedError(problem=_NO_TEXT, problem_mark=mark)
        return node


def _is_text(value: str) -> bool:
    try:
        return b"\0" not in value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def node_of_text(text: str, findings: Findings) -> Node | None:
    """Return the one document of a text, or note why there is none."""
    if len(text) > TEXT_CHARACTERS_MAX:
        what = f"it has {len(text)} characters: a contract has at most {TEXT_CHARACTERS_MAX}"
        findings.add(_place_of(TEXT_CHARACTERS_MAX, text), (), what)
        return None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        context = "" if isinstance(error, _RefusedError) else "this is not YAML: "
        mark = error.problem_mark or error.context_mark
        findings.add(mark, (), f"{context}{error.problem or error.context}")
        return None
    except ReaderError as error:
        what = f"this is not YAML: the character U+{error.character:04X} is none of a text"
        findings.add(_place_of(error.position, text), (), what)
        return None
    except (ValueError, OverflowError):
        # PyYAML takes any digits for a character's code, or for the version of YAML.
        what = "this is not YAML: there is no character, or no version of YAML, of this number"
        findings.add(loader.get_mark(), (), what)
        return None
    return root if root is not None else MappingNode("", [], _place_of(0, text))


def _place_of(position: int, text: str) -> yaml.Mark:
    lines = _LINE_END.split(text[:position])
    return yaml.Mark("", position, len(lines) - 1, len(lines[-1]), None, 0)


def node_of_value(value: Any, findings: Findings) -> Node | None:
    """Return the node of a plain value, as JSON has them, or note why it has none."""
    left = NODES_MAX

    def node_of(value: Any, path: Path) -> Node | None:
        nonlocal left
        left -= 1
        if left < 0 or len(path) > DEPTH_MAX:
            rule = f"more than {NODES_MAX} parts" if left < 0 else f"parts deeper than {DEPTH_MAX}"
            findings.add(None, () if left < 0 else path, f"it has {rule}: make it simpler")
            return None
        if isinstance(value, dict):
            table = [
                (key, node)
                for name, part in value.items()
                if left >= 0
                and (key := _name_of(name, path, findings)) is not None
                and (node := node_of(part, (*path, key.value))) is not None
            ]
            return MappingNode("", table)
        if isinstance(value, list | tuple):
            parts = (node_of(part, (*path, at)) for at, part in enumerate(value) if left >= 0)
            return SequenceNode("", [part for part in parts if part is not None])
        return _scalar_of(value, path, findings)

    return node_of(value, ())


def _name_of(name: Any, path: Path, findings: Findings) -> ScalarNode | None:
    if not isinstance(name, str):  # whoever reads the table says that a name is text
        return ScalarNode(INT, str(name) if name in INTEGERS else type(name).__name__)
    if _is_text(name):
        return ScalarNode(STR, name)
    findings.add(None, path, f"a name is no text: {_NO_TEXT}")
    return None


def _scalar_of(value: Any, path: Path, findings: Findings) -> ScalarNode | None:
    why = f"a {type(value).__name__} is no part of a contract"
    for kind, tag in ((bool, BOOL), (int, INT), (float, FLOAT), (str, STR), (type(None), NULL)):
        if not isinstance(value, kind):
            continue
        if isinstance(value, str) and not _is_text(value):
            why = _NO_TEXT
        elif isinstance(value, int) and value not in INTEGERS:
            why = TOO_LARGE
        else:
            return ScalarNode(tag, str(value))
        break
    findings.add(None, path, why)
    return None
