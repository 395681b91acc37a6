"""The rules of the house that a machine can check: sizes, docstrings, words, JSON, and tests that can fail."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = sorted((ROOT / "src").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SCRIPTS = sorted([*(ROOT / "bench").rglob("*.py"), *(ROOT / "examples").glob("*.py")])

MAX_FUNCTION_LINES = 50

LONG_FUNCTIONS: set[str] = set()
"""Functions of the source that are still too long, as ``path name``. A line may only leave this list."""

BARE_JSON: set[str] = set()
"""Files that still write JSON in which NaN may stand. A line may only leave this list."""

IDLE_TESTS = {
    "tests/maps/test_token_map.py test_csv_takes_any_label",
    "tests/views/test_page.py test_the_document_can_be_written_as_utf8",
}
"""Tests that still assert nothing. A line may only leave this list."""

FORBIDDEN = {
    r"\bevery so many\b": "every `stride`",
    r"\ba row an output\b": "one row per output",
    r"\b(a|one) line a (sample|text)\b": "one line per sample",
    r"\bone object a line\b": "one object per line",
    r"\b(a|one) file a command\b": "one file per command",
    r"\bPerturbationResult\b": "StudyResult",
    r"\btensorlens\.freezing\b": "tensorlens.recording",
    r"\breplay": "run or pull the program",
}
"""Words that are gone, as patterns, and what is said instead. A word that leaves the source is added here."""

PLAIN_ENGLISH = {
    r"(?<!there )\bis no (?!longer|more|less|such|one\b)[a-z]+\b": "is not a",
    r"\b(?:one|a) \w+ an? (?:output|input|sample|row|block|head|token|file|node|pair|line|command)\b": "one … per …",
    r'"""Of |: (?-i:Of) (?:the|a|each) |^ +\w+: (?-i:Of) ': "begin with a verb or a noun",
    r"\bgo(?:es)? on\b": "continues or resumes",
    r"\bhears? padding\b|\bpadding (?:is|was) heard\b": "padding changes results",
    r"\b(?:says?|gives?|carr(?:y|ies)) of\b": "says about, contributes to, the part of … that",
    r"\bless (?:that of|what)\b": "minus",
    r"\b(?:is|are|was|were) told\b": "receives, is passed",
    r"\basked (?:of|where)\b": "a question about, only for",
    r"\bhand(?:s|ed)? on\b": "passes on",
    r"\b(?:and|or) (?:its |their )?kin\b": "and similar ones",
    r"\btak(?:e|es|en|ing) apart\b": "split",
    r'"""What (?![^"\n]*\?)': "a noun: the content, the options, the result",
    r"\bask (?:a|the) lens\b": "call the lens",
    r"\b(?:lies|stands) behind\b": "name the relation: belongs to, explains, follows",
}
"""Patterns of translated English, and what a native writer says instead."""
QUOTED = {"compatibility.md"}
"""Pages of recorded data: they quote messages as they were when a run was made."""
WRITTEN_PLAINLY = [
    *(path for suffix in ("py", "js", "html", "css") for path in sorted((ROOT / "src").rglob(f"*.{suffix}"))),
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name not in QUOTED),
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def functions_in(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def length_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    first = function.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = (first.end_lineno or 0) - first.lineno + 1 if is_docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


# Sizes ---------------------------------------------------------------------------------------------------------------


def test_functions_are_short():
    long = {
        f"{name_of(path)} {function.name}"
        for path in SOURCE
        for function in functions_in(tree_of(path))
        if length_of(function) > MAX_FUNCTION_LINES
    }
    assert long <= LONG_FUNCTIONS


# Docstrings ----------------------------------------------------------------------------------------------------------


def undocumented(body: list[ast.stmt], place: str) -> Iterator[str]:
    """Public classes, functions and methods without a docstring; an overload or a magic method needs none."""
    for node in body:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None:
            yield f"{place} {node.name}"
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node.body, f"{place} {node.name}")


def test_public_names_have_docstrings():
    missing = [
        found
        for path in SOURCE
        if not path.name.startswith("_") or path.name == "__init__.py"
        for found in undocumented(tree_of(path).body, name_of(path))
    ]
    assert not missing


def test_every_file_says_what_it_is():
    silent = [name_of(path) for path in SOURCE + SCRIPTS if ast.get_docstring(tree_of(path)) is None]
    assert not silent


# Doors between the rooms ---------------------------------------------------------------------------------------------


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_only_the_command_line_of_bench_imports_the_app():
    wrong = {
        name_of(path)
        for path in SCRIPTS
        for name in imported(tree_of(path))
        if "bench" in path.parts and name.startswith("tensorlens.app")
    }
    assert wrong == {"bench/__main__.py"}


def test_nothing_in_the_wheel_imports_bench():
    assert not [name_of(path) for path in SOURCE for name in imported(tree_of(path)) if name.split(".")[0] == "bench"]


# Words ---------------------------------------------------------------------------------------------------------------


def lines_with(pattern: str, text: str) -> list[int]:
    return [number for number, line in enumerate(text.splitlines(), 1) if re.search(pattern, line, re.IGNORECASE)]


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_words_that_went_do_not_come_back(pattern):
    found = {name_of(path): lines for path in SOURCE if (lines := lines_with(pattern, path.read_text("utf-8")))}
    assert not found, f"say {FORBIDDEN[pattern]!r} instead: {found}"


@pytest.mark.parametrize("pattern", PLAIN_ENGLISH)
def test_english_is_plain(pattern):
    found = {name_of(path): n for path in WRITTEN_PLAINLY if (n := lines_with(pattern, path.read_text("utf-8")))}
    assert not found, f"write {PLAIN_ENGLISH[pattern]!r} instead: {found}"


# JSON ----------------------------------------------------------------------------------------------------------------


def bare_json_calls(tree: ast.Module) -> Iterator[int]:
    """Lines that call `json.dump` or `json.dumps`, by whatever name the module goes, without ``allow_nan=False``."""
    names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "json"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "json":
            yield from (node.lineno for alias in node.names if alias.name.startswith("dump"))
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        is_dump = node.func.attr in ("dump", "dumps") and isinstance(owner, ast.Name) and owner.id in names
        strict = any(
            keyword.arg == "allow_nan" and isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            for keyword in node.keywords
        )
        if is_dump and not strict:
            yield node.lineno


def test_json_is_strict():
    bare = {name_of(path) for path in SOURCE + SCRIPTS if list(bare_json_calls(tree_of(path)))}
    assert bare <= BARE_JSON, "write with tensorlens.files.to_json, or pass allow_nan=False"


# Tests that can fail -------------------------------------------------------------------------------------------------


def asserts(function: ast.AST, helpers: set[str]) -> bool:
    """Whether a failure can come out: an assertion, an expected error, or a call of a helper that asserts."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in helpers or called.startswith("assert_"):
                return True
        if isinstance(node, ast.Attribute) and node.attr in ("raises", "warns", "fail"):
            return True
    return False


def asserting_helpers() -> set[str]:
    """Names of functions of the tests that assert, by themselves or through another; to a fixed point."""
    functions = [function for path in TESTS for function in functions_in(tree_of(path))]
    helpers: set[str] = {"expect"}  # Playwright's
    while True:
        found = {function.name for function in functions if asserts(function, helpers)} | helpers
        if found == helpers:
            return helpers
        helpers = found


def test_every_test_can_fail():
    helpers = asserting_helpers()
    idle = {
        f"{name_of(path)} {function.name}"
        for path in TESTS
        for function in functions_in(tree_of(path))
        if function.name.startswith("test_") and not asserts(function, helpers)
    }
    assert idle <= IDLE_TESTS


# The checks themselves -----------------------------------------------------------------------------------------------


def test_the_checks_see_what_they_are_for():
    long = ast.parse("def f():\n    '''One.\n\n    Two.'''\n" + "    x = 1\n" * 50)
    assert [length_of(function) for function in functions_in(long)] == [51]
    assert list(undocumented(ast.parse("class A:\n    def b(self): ...\n    def _c(self): ...").body, "x")) == [
        "x A",
        "x A b",
    ]
    assert list(imported(ast.parse("from tensorlens.app.cli import app"))) == ["tensorlens.app.cli.app"]
    assert list(bare_json_calls(ast.parse("import json as j\nj.dumps(1)\nj.dumps(1, allow_nan=False)"))) == [2]
    assert list(bare_json_calls(ast.parse("from json import dumps"))) == [1]
    stiff = ("It is no X.\nThere is no x; it is no longer.", "One row an output.", '"""Of the probes.', "It goes on.")
    stiff += ("Padding was heard.", "What it says of X.\nIt says more. Of X.", "The mean less that of others.")
    stiff += (
        "The reader is told all.\nHe told it.",
        "A question asked of T.",
        "It hands on a state.",
        "GELU and its kin.",
    )
    stiff += (
        "A block taken apart.\nThey go apart.",
        '"""What it gives."""\n"""What is it? A map."""',
        "Ask the lens again.",
    )
    stiff += ("What lies behind it.\nIt is behind.",)
    for text, pattern in zip(stiff, PLAIN_ENGLISH, strict=True):
        assert lines_with(pattern, text) == [1], text
    bodies = ("run()", "pytest.raises(E)", "check()")
    tests = [ast.parse(f"def test_x():\n    {body}") for body in bodies]
    assert [asserts(one, {"check"}) for one in tests] == [False, True, True]
