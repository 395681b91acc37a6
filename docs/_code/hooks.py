"""What mkdocs calls while it builds the site: tutorials are executed, commands and methods written out.

A hook of our own rather than a plugin: the blocks stay plain ```python that any reader of Markdown shows and that the
tests collect, a map shows itself as in a notebook, and an error stops the build with the line of the page.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from execute import Session, blocks, empty_folder, printed_below  # noqa: E402

_TARGET = "; takes a `target`"
log = logging.getLogger("mkdocs.hooks.tutorials")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Run the blocks of a tutorial and put maps and figures below each; write out commands and methods."""
    for name, written in (("{{ commands }}", _commands), ("{{ methods }}", _methods)):
        markdown = markdown.replace(name, written()) if name in markdown else markdown
    if not (page.file.src_uri.startswith("tutorials/") and config["extra"]["execute"]):
        return markdown
    page.meta["outputs"] = outputs = []
    parts, start, session, began = [], 0, Session(page.file.src_uri), time.perf_counter()
    _quiet()
    with empty_folder():
        for block in blocks(markdown):
            markup, before = session.run(block).markup, start
            _, start = printed_below(markdown, block)
            parts.append(markdown[before:start])
            if markup:
                parts.append(f'\n\n<div class="shown" data-place="{len(outputs)}"></div>\n')
                outputs.append(markup)
    log.info("%s: %.1f s", page.file.src_uri, time.perf_counter() - began)
    return "".join([*parts, markdown[start:]])


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Put markup where its place was kept; Markdown never sees it."""
    scripts = set()
    for number, markup in enumerate(page.meta.get("outputs", ())):
        host, _, script = markup.partition("\n<script>(")
        scripts |= {f"<script>({script}"} if script else set()
        html = html.replace(f'<div class="shown" data-place="{number}"></div>', f'<div class="shown">{host}</div>')
    return html + "".join(scripts)  # the component once, for all maps above it


def _commands() -> str:
    """A section for each command, from the program itself."""
    import typer

    from tensorlens.app.cli import app

    parts = []
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        summary, _, rest = (command.help or "").partition("\n\n")
        example = re.search(r"(?<=Example: ).*", rest)
        parts.append(f"## {name}\n\n{summary}\n")
        parts.append(f"```text\n{example.group()}\n```\n" if example else "")
        table = "| argument | meaning |\n|---|---|\n" + "\n".join(map(_parameter, command.params))
        parts.append(f"<details markdown><summary>Arguments</summary>\n\n{table}\n\n</details>\n")
    return "\n".join(parts)


def _methods() -> str:
    """A row for each method, from the table itself."""
    import tensorlens as tl

    rows = (f"| `{name}` | {one.summary}{_TARGET * one.takes_target} |" for name, one in tl.METHODS.items())
    return "| method | what it shows |\n|---|---|\n" + "\n".join(rows) + "\n"


def _parameter(parameter: Any) -> str:
    is_option = parameter.param_type_name == "option"
    name = " / ".join([*parameter.opts, *parameter.secondary_opts]) if is_option else parameter.name.upper().rstrip("_")
    default = parameter.default
    shown = f" Default: `{default}`." if is_option and default not in (None, False, True, ()) else ""
    return f"| `{name}` | {(parameter.help or '').replace('|', '&#124;')}{shown} |"


def _quiet() -> None:
    """No bars; and one thread, since two that wait for each other on shared cores take ten times as long."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
