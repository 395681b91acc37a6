"""Run a notebook without Jupyter, cell by cell; `python tests/notebooks.py FILE` stores the outputs."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def run(document: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of its code cells; an error ends the run."""
    names: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for cell in document["cells"]:
        if cell["cell_type"] != "code":
            continue
        count += 1
        value, printed = _run_cell("".join(cell["source"]), names)
        cell["execution_count"], cell["outputs"] = count, _outputs(value, printed, count)
    return document


def _run_cell(source: str, names: dict[str, Any]) -> tuple[Any, str]:
    tree = ast.parse(source)
    shown = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, "<cell>", "exec"), names)
        value = None if shown is None else eval(compile(ast.Expression(shown.value), "<cell>", "eval"), names)
    return value, printed.getvalue()


def _outputs(value: Any, printed: str, count: int) -> list[dict[str, Any]]:
    outputs: list[dict[str, Any]] = []
    if printed:
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed})
    if value is not None:
        data = {"text/plain": repr(value)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_()
        outputs.append({"output_type": "execute_result", "execution_count": count, "metadata": {}, "data": data})
    return outputs


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(json.dumps(run(json.loads(path.read_text("utf-8"))), indent=1, ensure_ascii=False) + "\n", "utf-8")
