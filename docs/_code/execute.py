"""Run the Python blocks of a Markdown page in order, as one session, and say what each of them shows.

The site shows what the tutorials' blocks give; the tests run the blocks of every other page. Both go through here, so
that a page is plain Markdown wherever else it is read.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import html
import io
import os
import re
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FENCE = re.compile(
    r'^(?P<indent> *)```(?P<language>[a-z]+)(?: title="(?P<title>[^"]*)")?[^\n]*\n(?P<body>.*?)^(?P=indent)``` *$',
    re.M | re.S,
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: its language, its code, its first line in the page, and where it ends in the text.

    A block with a title runs elsewhere: in the environment of the package that the title names.
    """

    language: str
    source: str
    line: int
    end: int
    indent: str
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a block gave: printed text, and its last expression as text or markup."""

    text: str = ""
    markup: str = ""


def blocks(markdown: str, language: str = "python") -> list[Block]:
    """The fenced blocks of one language, in order."""
    return [
        Block(
            language=found["language"],
            source=textwrap.dedent(found["body"]),
            line=markdown.count("\n", 0, found.start("body")) + 1,
            end=found.end(),
            indent=found["indent"],
            title=found["title"] or "",
        )
        for found in FENCE.finditer(markdown)
        if found["language"] == language
    ]


class Session:
    """Names that the blocks of one page share."""

    def __init__(self, page: str) -> None:
        self.page = page
        self.names: dict[str, Any] = {"__name__": "__main__"}

    def run(self, block: Block) -> Shown:
        """Run a block as a notebook runs a cell."""
        # As many empty lines before it as the page has, so that an error names the line of the page.
        tree = ast.parse("\n" * (block.line - 1) + block.source, self.page)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(tree, self.page, "exec"), self.names)
            value = None if last is None else eval(compile(ast.Expression(last.value), self.page, "eval"), self.names)
        if value is None:
            return Shown(text=printed.getvalue())
        markup = as_markup(value)
        return Shown(text=printed.getvalue() + ("" if markup else repr(value)), markup=markup)


@contextlib.contextmanager
def empty_folder() -> Iterator[Path]:
    """Work in a new folder that goes away."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


def as_markup(value: Any) -> str:
    """A map, a matplotlib figure or a picture as HTML; empty for anything else."""
    if hasattr(value, "savefig"):
        buffer = io.BytesIO()
        value.savefig(buffer, format="png", dpi=144)
        return _picture(buffer, "figure")
    if hasattr(value, "thumbnail"):
        small, buffer = value.copy(), io.BytesIO()
        small.thumbnail((480, 360))
        small.convert("RGB").save(buffer, format="JPEG", quality=85)
        return _picture(buffer, "picture", "jpeg")
    return value._repr_html_() if hasattr(value, "_repr_html_") else ""


def _picture(buffer: io.BytesIO, name: str, kind: str = "png") -> str:
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{html.escape(name)}" src="data:image/{kind};base64,{data}">'
