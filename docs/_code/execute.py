"""Run the Python blocks of a Markdown page in order, as one session, and say what each of them shows.

What a block prints is on the page, in a block `output` below it, so that it can be read anywhere. The tests compare it;
`python docs/_code/execute.py PAGE …` writes it anew. The site adds the maps and figures of the tutorials.
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
OUTPUT = re.compile(r"\s*^(?P<indent> *)```output\n(?P<body>.*?)^(?P=indent)``` *$", re.M | re.S)
NUMBER = re.compile(r"[-+−]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


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


def printed_below(markdown: str, block: Block) -> tuple[str, int]:
    """What the page says that a block printed, and where that ends; empty without a block `output` right below."""
    found = OUTPUT.match(markdown, block.end)
    return (textwrap.dedent(found["body"]), found.end()) if found else ("", block.end)


def same(printed: str, expected: str) -> bool:
    """Whether a block printed what a page says: words exactly, numbers nearly. A line … stands for any lines."""
    got, shown = ([line.split() for line in text.splitlines() if line.strip()] for text in (printed, expected))
    if ["…"] not in shown:
        return _agree(sum(got, []), sum(shown, []))
    start = shown.index(["…"])
    end = len(shown) - start - 1
    return (
        len(got) >= start + end
        and _agree(sum(got[:start], []), sum(shown[:start], []))
        and _agree(sum(got[len(got) - end :], []), sum(shown[start + 1 :], []))
    )


def _agree(got: list[str], shown: list[str]) -> bool:
    texts = [" ".join(words).replace("−", "-") for words in (got, shown)]
    plain = [NUMBER.sub("#", text) for text in texts]
    return plain[0] == plain[1] and all(map(_near, *map(NUMBER.findall, texts)))


def _near(got: str, shown: str) -> bool:
    """To a hundredth or a unit of the last place shown; an error such as 3e-07 to its size, or below 1e-05."""
    digits, _, power = shown.partition("e")
    place = 10.0 ** -len(digits.partition(".")[2])
    allowed = max(0.9 * abs(float(shown)), 1e-5) if power else max(0.01 * abs(float(shown)), place)
    return abs(float(got) - float(shown)) <= allowed


def with_outputs(markdown: str, page: str) -> str:
    """The page with what its blocks print now; an output that is still right stays as it is."""
    parts, start, session = [], 0, Session(page)
    for block in blocks(markdown):
        parts.append(markdown[start : block.end])
        there, start = printed_below(markdown, block)
        shown = "" if block.title else session.run(block).text.rstrip()
        if block.title or (there and same(shown, there)):  # a block with a title runs elsewhere
            parts.append(markdown[block.end : start])
        elif shown:
            lines = "\n".join(line.rstrip() for line in shown.splitlines())
            parts.append("\n\n" + textwrap.indent(f"```output\n{lines}\n```", block.indent))
    return "".join([*parts, markdown[start:]])


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


if __name__ == "__main__":
    import shutil
    import sys

    for name in sys.argv[1:]:
        path = Path(name).resolve()
        with empty_folder():
            shutil.copytree(Path(__file__).parents[2] / "examples" / "judge", "judge")
            text = with_outputs(path.read_text("utf-8"), name)
        path.write_text(text, "utf-8")
