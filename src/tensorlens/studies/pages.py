"""A run's `report.html`: one page without links to anywhere, made of text, Markdown tables and figures."""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tensorlens.studies.runs import Run

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222930 }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; display: block; overflow-x: auto }
th, td { border-bottom: 1px solid #d7dbe0; padding: .25rem .6rem; text-align: left; white-space: nowrap }
svg { max-width: 100%; height: auto } .text { white-space: pre-line } .muted { color: #5b6570 }
"""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of a page.

    Attributes:
        title: Its heading.
        text: Plain text, line breaks kept.
        tables: Markdown tables.
        pictures: SVG documents.
    """

    title: str
    text: str = ""
    tables: list[str] | tuple[str, ...] = ()
    pictures: list[str] | tuple[str, ...] = ()


def write_page(run: Run, title: str, sections: list[Section]) -> None:
    """Write `report.html` into the folder of a run."""
    config = run.config
    versions = ", ".join(f"{name} {version}" for name, version in config["versions"].items())
    commit = config["origin"]["commit"]
    origin = f"{versions}, {config['origin']['device']}" + (f", commit {commit[:12]}" if commit else "")
    body = "".join(_section(section) for section in sections)
    run.write_text(
        "report.html",
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1>"
        f'<p class="muted">{html.escape(origin)}</p>{body}</html>\n',
    )


def _section(section: Section) -> str:
    text = f'<p class="text">{html.escape(section.text)}</p>' if section.text else ""
    pictures = "".join(picture[picture.index("<svg") :] for picture in section.pictures)
    tables = "".join(map(_table, section.tables))
    return f"<h2>{html.escape(section.title)}</h2>{text}{pictures}{tables}"


def _table(markdown: str) -> str:
    head, *rows = cells_of(markdown)
    return html_table(head, rows)


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]], best: Collection[str] = ()) -> str:
    """A table; rows that begin with one of the `best` are of that class."""
    body = "".join(_row(row, "td", " class=best" if row[0] in best else "") for row in rows)
    return f"<table>{_row(head, 'th')}{body}</table>"


def _row(cells: Sequence[str], tag: str, attributes: str = "") -> str:
    return f"<tr{attributes}>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """A Markdown table of records with the same keys."""
    head = list(rows[0]) if rows else []
    return markdown_table(head, [[str(row[key]) for key in head] for row in rows])


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table of cells."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def cells_of(markdown: str) -> list[list[str]]:
    """The cells of a Markdown table, its head first."""
    lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in markdown.splitlines()]
    return [lines[0], *lines[2:]]
