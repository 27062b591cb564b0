"""Markdown that the pages share, and reading docstrings."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence

MOST_COLUMNS = 100


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; bars within cells are escaped."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [cell.replace("|", r"\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def wrapped(text: str) -> str:
    """A paragraph in lines of at most 100 columns; inline code is not broken."""
    words = re.findall(r"(?:`[^`]*`|\S)+", text)
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + 1 + len(word) > MOST_COLUMNS:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def code(text: str) -> str:
    """The text as inline code; an empty text stays empty."""
    return f"`{text}`" if text else ""


def sentence(text: str) -> str:
    """The text with a capital letter and a full stop."""
    text = f"{text[:1].upper()}{text[1:]}"
    return text if text.endswith(".") else f"{text}."


def paragraphs(described: object) -> list[str]:
    """The paragraphs of a docstring before `Args:` and the like, each on one line."""
    text = inspect.getdoc(described) or ""
    before = re.split(r"^(?:Args|Raises|Returns|Attributes|Yields):$", text, flags=re.MULTILINE)[0]
    return [" ".join(part.split()) for part in before.strip().split("\n\n") if part.strip()]


def field_docs(cls: type) -> dict[str, str]:
    """The docstring below each field of a class; empty if there is none."""
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    last = None
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            last = node.target.id
            found[last] = ""
        elif last and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found[last] = " ".join(str(node.value.value).split())
            last = None
    return found
