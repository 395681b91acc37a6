"""The documentation is true: every snippet runs, every link leads somewhere, the site builds and asks for nothing."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import warnings
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tensorlens

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "_code"))
from execute import Block, Session, blocks  # noqa: E402

PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])
TUTORIALS = DOCS / "tutorials"
"""Their blocks run when the site is built, which is a test below."""

NOT_RUN = ("make ", "pip install ", ". .venv/", "tensorlens explore ", "wait")
"""Set-up, and a server that would not end."""

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _with(language: str) -> list[Path]:
    return [page for page in PAGES if TUTORIALS not in page.parents and _run_here(page, language)]


def _run_here(page: Path, language: str = "python") -> list[Block]:
    """The blocks of a page without those that run with another package (`tests/plugins/test_porting.py`)."""
    return [block for block in blocks(page.read_text("utf-8"), language) if not block.title]


def _printed_below(page: Path) -> dict[int, str]:
    """What a page says that a block printed, by where the block ends: a block `output` right below it."""
    text = page.read_text("utf-8")
    starts = {text.rindex("```output", 0, block.end): block for block in blocks(text, "output")}
    return {len(text[:start].rstrip()): block.source for start, block in starts.items()}


NUMBER = re.compile(r"[-+−]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def _same(printed: str, expected: str) -> bool:
    """Whether two texts agree: words exactly, numbers to a hundredth or a unit of the last place shown."""
    words = [NUMBER.sub("#", " ".join(one.split())) for one in (printed, expected)]
    got, shown = ([float(n.replace("−", "-")) for n in NUMBER.findall(one)] for one in (printed, expected))
    places = [10.0 ** -len(n.partition(".")[2].partition("e")[0]) for n in NUMBER.findall(expected)]
    near = all(abs(a - b) <= max(0.01 * abs(b), place) for a, b, place in zip(got, shown, places, strict=False))
    return words[0] == words[1] and len(got) == len(shown) and near


def test_the_comparison_of_outputs_can_fail():
    assert _same("a 1.234 b", "a 1.23  b") and _same("−0.50", "−0.50")
    assert not _same("a 1.3 b", "a 1.0 b") and not _same("a 1 b", "a 1 c") and not _same("1 2", "1")


# Snippets ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """An empty folder with the data that the pages speak of, and what a notebook would have."""
    monkeypatch.chdir(tmp_path)
    reviews = ["A quiet film about a loud man.", "The second half is long.", "I would see it again.", "Not for me."]
    (tmp_path / "reviews.csv").write_text("text\n" + "\n".join(reviews) + "\n", "utf-8")
    shutil.copytree(ROOT / "examples" / "judge", tmp_path / "judge")
    display = ModuleType("IPython.display")
    for name in ("display", "HTML", "Javascript"):
        setattr(display, name, lambda *_, **__: None)
    notebook = ModuleType("IPython")
    notebook.version_info = (9, 0)  # type: ignore[attr-defined]  # matplotlib looks
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield tmp_path


def _by_cost(pages: list[Path]) -> list[Any]:
    """Pages that load real weights are for `make test-all`, the others for every run."""
    loads = {page: any("tl.load(" in block.source for block in _run_here(page)) for page in pages}
    return [pytest.param(page, id=_name(page), marks=[pytest.mark.large] * loads[page]) for page in pages]


@pytest.mark.usefixtures("unchecked", "reader")
@pytest.mark.parametrize("page", _by_cost(_with("python")))
def test_python_snippets_run(page):
    from tensorlens.maps.methods import METHODS
    from tensorlens.recording import table as functions
    from tensorlens.recording.rules import modules as adapters
    from tensorlens.recording.rules import modules as kernels

    tables = [(table, set(table)) for table in (adapters.ADAPTERS, functions.RULES, kernels.KERNELS, METHODS)]
    session = Session(_name(page))
    try:
        printed = _printed_below(page)
        for block in _run_here(page):
            shown = session.run(block).text
            expected = printed.pop(block.end, None)
            assert expected is None or _same(shown, expected), f"{_name(page)}:{block.line} printed\n{shown}"
        assert not printed, f"{_name(page)}: an output that follows no block"
    finally:
        for table, names in tables:
            for added in set(table) - names:  # what a page registers is gone for the next one
                del table[added]


@pytest.mark.large
@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("page", _with("bash"), ids=_name)
def test_shell_snippets_run(page):
    lines = [line for block in blocks(page.read_text("utf-8"), "bash") for line in block.source.splitlines()]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    started = []
    for line in lines:
        line = line.partition(" # ")[0].strip()
        if not line or line.startswith(NOT_RUN):
            continue
        line = line.removeprefix(".venv/bin/")
        in_background = line.endswith("&")
        words = shlex.split(line.rstrip("& "))
        own = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
        command = words[len(own) :]
        assert command[0] == "tensorlens", f"{_name(page)}: {line}"
        process = subprocess.Popen(command, env=environment | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        started.append((line, process))
        if not in_background:
            for begun, waiting in started:
                output = waiting.communicate(timeout=600)[0]
                assert waiting.returncode == 0, f"{begun}\n{output.decode()[-3000:]}"
            started = []
    assert not started


def test_pages_import_public_names_only():
    text = "\n".join(block.source for page in PAGES for block in blocks(page.read_text("utf-8")))
    inner = re.findall(r"^\s*(?:from|import) (tensorlens\.[\w.]+)", text, flags=re.M)
    assert inner and [name for name in inner if not name.startswith("tensorlens.plugins.")] == []
    used = set(re.findall(r"\btl\.([a-zA-Z_]+)", text))
    assert used and used <= {*tensorlens.__all__}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 75


# Links ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^( *)```.*?^\1``` *$", "", page.read_text("utf-8"), flags=re.M | re.S)
    included = re.findall(r'^--8<-- "(.+)"', text, flags=re.M)
    missing = [name for name in included if not (ROOT / name).is_file()]
    for target in LINK.findall(text):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        found = page if not path else page.parent / path
        if not found.exists() or (anchor and found.suffix == ".md" and anchor not in _anchors(found)):
            missing.append(target)
    assert not missing


def _anchors(page: Path) -> set[str]:
    """As the site makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), flags=re.M)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_every_picture_is_used():
    text = "".join(page.read_text("utf-8") for page in PAGES)
    pictures = [path for path in (DOCS / "assets").iterdir() if path.suffix in (".png", ".svg")]
    assert [path.name for path in pictures if path.name not in text and path.name != "favicon.svg"] == []


def test_the_page_on_the_paper_names_tests_and_functions_that_exist():
    page = (DOCS / "paper-and-code.md").read_text("utf-8")
    tests = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py"))
    source = "\n".join(path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    named = {name.rstrip("…").rstrip("_") for name in re.findall(r"`(test_[a-z0-9_]+…?)`", page)}
    assert [name for name in named if f"def {name}" not in tests] == []
    tables = page.partition("## What the paper leaves open")[0]
    functions = {name.rpartition(".")[2] for name in re.findall(r"`([a-z][a-zA-Z_.]+)`", tables) if "test" not in name}
    known = {path.stem for path in (ROOT / "src").rglob("*")}
    missing = [name for name in functions if f"def {name}" not in source and name not in known]
    assert missing == []


# The site ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """Built strictly, with its tutorials executed."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-4000:]
    return folder


@pytest.mark.large
def test_the_site_builds_and_names_no_other_host(site):
    loads = re.compile(
        r"""<(?:script|img|iframe|source)[^>]+src=["'](?:https?:)?//|<link[^>]+href=["']https?:[^>]+stylesheet"""
    )
    for page in site.rglob("*.html"):
        assert not loads.search(page.read_text("utf-8")), page
    assert not re.search(r"url\(['\"]?(?:https?:)?//", (site / "assets" / "site.css").read_text("utf-8"))


@pytest.mark.large
@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_in_a_browser_are_whole_and_ask_no_one(site, browser, scheme):
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Silent, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        context = browser.new_context(color_scheme=scheme)
        tab, problems, n_maps = context.new_page(), [], 0
        tab.on("request", lambda r: None if r.url.startswith((address, "data:", "blob:")) else problems.append(r.url))
        tab.on("response", lambda r: problems.append(f"{r.status} {r.url}") if r.status >= 400 else None)
        tab.on("pageerror", lambda error: problems.append(f"{tab.url}: {error}"))
        for page in sorted(site.rglob("*.html")):
            tab.goto(address + page.relative_to(site).as_posix(), wait_until="load")
            wrong = tab.locator(".katex-error, .arithmatex:not(:has(.katex))").count()
            problems += [f"{tab.url}: {wrong} formulas"] if wrong else []
            shades = tab.locator("[data-tensorlens]").evaluate_all("maps => maps.map((map) => map.dataset.shade)")
            problems += [f"{tab.url}: a {shade} map" for shade in shades if shade != scheme]
            n_maps += len(shades)
        context.close()
        server.shutdown()
    assert problems == []
    assert n_maps >= 6


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing."""
