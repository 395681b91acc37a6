"""The documentation is true: every snippet runs, every link leads somewhere, the site builds and asks for nothing."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from answers.vision_language import PICTURE, TYPES
from studies.test_paper_tables import small_protocol, write_data, write_model
from tiny_language import save_tiny

import tensorlens

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "_code"))
from execute import NUMBER, OUTPUT, Block, Session, blocks, printed_below, same  # noqa: E402  # pyright: ignore[reportMissingImports]

PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])
NOT_RUN = ("make ", "pip install ", ". .venv/", "wait")
"""Set-up, which would be one inside the other."""

ELSEWHERE = {"needs Ray": "test_ray.py"} | dict.fromkeys(
    ("inseq", "captum", "transformer_lens", "nnsight", "sentence_transformers"), "plugins/test_porting.py"
)
"""Titles of blocks that run with another package, and their test."""

SMALLER = {
    "downloads a model": {},
    "with this model": {},
    "takes 200 seconds": {"240": "2", "1024": "32", "1500": "3", "512": "32"},
}
"""Titles of blocks that run here on tiny models under the names of those of the hub, or with smaller numbers."""

LONG = {"perturbation.md", "large-models.md", "add-a-method.md"}
"""Pages with blocks that take a while even on the smallest model."""

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _with(language: str) -> list[Path]:
    return [page for page in PAGES if _run_here(page, language)]


def _run_here(page: Path, language: str = "python") -> list[Block]:
    """The blocks of a page without those that run elsewhere."""
    found = [block for block in blocks(page.read_text("utf-8"), language) if block.title not in ELSEWHERE]
    for i, block in enumerate(found):
        for number, smaller in (SMALLER[block.title] if block.title else {}).items():
            found[i] = replace(found[i], source=found[i].source.replace(number, smaller))
    return found


def test_every_block_runs_somewhere():
    languages = {"python", "bash", "output", "csv", "toml"}  # the last two: `test_files_on_pages_are_valid`
    for page in PAGES:
        if page.name != "ARCHITECTURE.md":  # a drawing
            assert {*re.findall(r"^ *```(\S*).*\n(?:.*\n)*?^ *```$", page.read_text("utf-8"), re.M)} <= languages, page
    for test in ELSEWHERE.values():
        assert "blocks(" in (ROOT / "tests" / test).read_text("utf-8")


def test_the_comparison_of_outputs_can_fail():
    assert same("a 1.234 b", "a 1.23  b") and same("−0.50", "−0.50")
    assert not same("a 1.3 b", "a 1.0 b") and not same("a 1 b", "a 1 c") and not same("1 2", "1")
    assert same("3e-7", "9.1e-08") and same("0e+00", "1e-06") and not same("3e-3", "9e-4")
    assert (
        same("a\nb\nc\nd", "a\n…\nd") and same("a\nb", "a\n…") and not same("a\nb", "b\n…") and same("a.\nb", "a.\nb")
    )


# Snippets ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """An empty folder with the data that the pages speak of, and what a notebook would have."""
    monkeypatch.chdir(tmp_path)
    reviews = ["A quiet film about a loud man.", "The second half is long.", "I would see it again.", "Not for me."]
    (tmp_path / "reviews.csv").write_text("text\n" + "\n".join(reviews) + "\n", "utf-8")
    (tmp_path / "wikitext-2.txt").write_text("It rained all day in the city of Paris . " * 20, "utf-8")
    shutil.copytree(ROOT / "examples" / "judge", tmp_path / "judge")
    for name in ("Llama-3.1-8B", "Llama-3.1-70B"):
        save_tiny(tmp_path / "meta-llama" / name, "llama")
    for part in TYPES["llava"]():
        part.save_pretrained(tmp_path / "Qwen" / "Qwen2.5-VL-3B-Instruct")
    PICTURE.save(tmp_path / "table.jpg")
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
    """Pages that load more than the smallest model, or run for long, are for `make test-all`."""
    loaded = {page: re.findall(r"tl\.load\(.(\w+)", "".join(one.source for one in _run_here(page))) for page in pages}
    large = [page for page in pages if {*loaded[page]} - {"minilm", "Qwen"} or page.name in LONG]
    return [pytest.param(page, id=_name(page), marks=[pytest.mark.large] * (page in large)) for page in pages]


@pytest.mark.usefixtures("unchecked", "reader")
@pytest.mark.parametrize("page", _by_cost(_with("python")))
def test_python_snippets_run(page):
    from tensorlens.maps.methods import METHODS
    from tensorlens.recording import tape as functions
    from tensorlens.recording.rules import modules as adapters
    from tensorlens.recording.rules import modules as kernels

    tables = [(table, set(table)) for table in (adapters.ADAPTERS, functions.RULES, kernels.KERNELS, METHODS)]
    session = Session(_name(page))
    try:
        text = page.read_text("utf-8")
        for block in _run_here(page):
            shown, (expected, _) = session.run(block).text, printed_below(text, block)
            assert block.title or same(shown, expected), f"{_name(page)}:{block.line} printed\n{shown}"
        below = [one for block in blocks(text) if (one := printed_below(text, block)[0])]
        assert len(below) == len(OUTPUT.findall(text)), f"{_name(page)}: an output that follows no block"
    finally:
        for table, names in tables:
            for added in set(table) - names:  # what a page registers is gone for the next one
                del table[added]


@pytest.fixture
def shell(reader):
    """The environment of a reader's shell: the commands of this clone, and a home of its own."""
    folder = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    modules = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"  # of `bench`, which is run in a clone
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    own = {"PATH": folder, "PYTHONPATH": modules, "OMP_NUM_THREADS": "1", "BROWSER": "true", "SHELL": "/bin/bash"}
    return os.environ | own | {"HOME": str(reader), "XDG_CACHE_HOME": cache}


@pytest.mark.large
@pytest.mark.parametrize("page", _with("bash"), ids=_name)
def test_shell_snippets_run(page, reader, shell):
    for block in _run_here(page, "bash"):
        more = _data_of_the_paper(reader) if "paper.md" in page.name else ""
        started = []
        for line in block.source.splitlines():
            line = line.partition(" # ")[0].strip()
            if not line or line.startswith(NOT_RUN):
                continue
            line = line.removeprefix(".venv/bin/").replace(".venv-judges/bin/python", sys.executable) + more
            in_background = line.endswith("&")
            words = shlex.split(line.rstrip("& "))
            own = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
            command = words[len(own) :]
            known = command[0] in ("tensorlens", "torchrun", "accelerate") or command[:3] == ["python", "-m", "bench"]
            assert known, f"{_name(page)}: {line}"
            process = subprocess.Popen(command, env=shell | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            if command[1] == "explore":  # a server, which ends when it is asked to
                assert "http://" in process.stdout.readline().decode()  # type: ignore[union-attr]
                process.send_signal(signal.SIGINT)
            started.append((line, process))
            if not in_background:
                for begun, waiting in started:
                    output = waiting.communicate(timeout=600)[0]
                    codes = (0, 130) if " explore " in f" {begun} " else (0,)
                    assert waiting.returncode in codes, f"{begun}\n{output.decode()[-3000:]}"
                started = []
        assert not started
        shutil.rmtree(reader / "runs", ignore_errors=True)  # the next block is another way to do the same


def _data_of_the_paper(folder: Path) -> str:
    """What `how-to/paper.md` reads: tiny models and data under the names on the page, and options for short texts."""
    from tensorlens.studies.paper.run import TABLES

    for name, table in TABLES.items():
        for place in (folder / table.model, folder / "MODELS" / name):
            write_tiny = save_tiny if name == "relations" else write_model
            write_tiny(place, "neox" if name == "relations" else name)
    for kind in {table.kind for table in TABLES.values()}:
        write_data(folder / "DATA", kind)
    for data, name in (("imdb", "aclImdb"), ("wikitext-103", "wikitext-103"), ("relations", "relations")):
        (folder / name).symlink_to(folder / "DATA" / data)
    return f" --limit 2 --device cpu --protocol {small_protocol(folder)}"


def test_files_on_pages_are_valid(tmp_path):
    from tensorlens.studies.paper.protocol import Protocol, read_protocol

    (protocol,) = blocks((DOCS / "how-to" / "paper.md").read_text("utf-8"), "toml")
    (tmp_path / "mine.toml").write_text(protocol.source, "utf-8")
    assert read_protocol(tmp_path / "mine.toml") != Protocol()
    (rows,) = blocks((DOCS / "how-to" / "judge-of-your-own.md").read_text("utf-8"), "csv")
    assert {*rows.source.splitlines()} <= {
        *(ROOT / "examples" / "judge" / "capitals.csv").read_text("utf-8").splitlines()
    }


def test_pages_import_public_names_only():
    text = "\n".join(block.source for page in PAGES for block in blocks(page.read_text("utf-8")))
    inner = re.findall(r"^\s*(?:from|import) (tensorlens\.[\w.]+)", text, flags=re.M)
    assert inner and [name for name in inner if not name.startswith("tensorlens.plugins.")] == []
    used = set(re.findall(r"\btl\.([a-zA-Z_]+)", text))
    assert used and used <= {*tensorlens.__all__}


def test_every_public_name_is_in_the_reference():
    shown = re.findall(
        r"^::: tensorlens\.(\w+)$", "".join(page.read_text("utf-8") for page in (DOCS / "reference").glob("*.md")), re.M
    )
    beside = {"METHODS", "studies", "__version__"}  # a table, a page, a text
    names = {*tensorlens.__all__} - beside - {*vars(import_module("tensorlens.errors"))}
    assert names and names <= {*shown}, names - {*shown}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 75


# Numbers -------------------------------------------------------------------------------------------------------------

UNITS = (1, 1e3, 1e2, 2**-30)
"""From what a record holds (seconds, shares, bytes) to what a page shows (also ms, percent, GiB)."""


def _numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        for one in value:
            yield from _numbers_in(one)
    elif isinstance(value, str):
        yield from map(float, NUMBER.findall(re.sub(r"(?<=\d),(?=\d)", "", value).replace("–", " ")))
    elif value is not None:
        yield float(value)


RECORDS = [path for folder in ("records", "speed/results") for path in (ROOT / "bench" / folder).glob("*.json")]


def test_every_measured_number_is_in_its_record():
    known = {path.name: list(_numbers_in(json.loads(path.read_text("utf-8")))) for path in RECORDS}
    used = set()
    for page in PAGES:
        text = page.read_text("utf-8")
        tables = re.findall(r"^<!-- record: (.+?) -->\n\n((?:\|.*\n)+)", text, flags=re.M)
        assert len(tables) == text.count("\n<!-- record:"), f"{_name(page)}: a table right below its record"
        for names, table in tables:
            used |= {*names.split()}
            numbers = [number for name in names.split() for number in known[name]]
            cells = " ".join("".join(table.splitlines(True)[2:]).split("|")).replace(",", "").replace("–", " ")
            for shown in NUMBER.findall(cells):
                digits = int(shown.partition("e")[0].lstrip("-+0.").replace(".", "") or 1)
                near = 0.51 * abs(float(shown)) / digits  # half a unit of the last place
                assert any(abs(n * unit - float(shown)) <= near for n in numbers for unit in UNITS), (
                    f"{_name(page)}: {shown} is not in {names}"
                )
    assert used == {*known}, "a record that no page shows"
    performance = (DOCS / "performance.md").read_text("utf-8")
    assert performance.count("<!-- record:") == len(re.findall(r"^\|[- |]+\|$", performance, re.M))


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
    """As the site makes them of headings, and those that a page names itself."""
    text = page.read_text("utf-8")
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {*re.findall(r' id="([\w-]+)"', text)} | {
        re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings
    }


def test_the_glossary_is_twelve_words_and_each_is_linked():
    text = (DOCS / "glossary.md").read_text("utf-8")
    words = re.findall(r'<span id="([\w-]+)">', text)
    others = "".join(page.read_text("utf-8") for page in PAGES if page.name != "glossary.md")
    assert len(words) == 12
    assert [word for word in words if f"glossary.md#{word})" not in others] == []


def test_every_picture_is_used():
    text = "".join(page.read_text("utf-8") for page in PAGES)
    pictures = [path for path in (DOCS / "assets").iterdir() if path.suffix in (".png", ".svg")]
    assert [path.name for path in pictures if path.name not in text and path.name != "favicon.svg"] == []


def test_the_page_on_the_paper_names_tests_and_functions_that_exist():
    page = (DOCS / "paper-and-code.md").read_text("utf-8")
    tests = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py"))
    files = [*(ROOT / "src").rglob("*.py"), ROOT / "tests" / "equations.py"]
    source = "\n".join(path.read_text("utf-8") for path in files)
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


@pytest.mark.large
@pytest.mark.browser
@pytest.mark.parametrize("width", [1400, 420])
def test_no_page_is_longer_than_twenty_screens(site, browser, width):
    tab = browser.new_page(viewport={"width": width, "height": 900})
    screens = {}
    for page in site.rglob("*.html"):
        tab.goto(page.as_uri(), wait_until="load")
        screens[page.name] = tab.evaluate("document.documentElement.scrollHeight") / 900
    tab.close()
    assert {name: round(n) for name, n in screens.items() if n > 20} == {}


@pytest.mark.large
@pytest.mark.browser
def test_a_box_filters_long_tables(site, browser):
    tab = browser.new_page()
    tab.goto((site / "compatibility.html").as_uri())
    rows = tab.locator("article tbody tr:visible")
    n_rows = rows.count()
    tab.locator(".row-filter").fill("whisper")
    assert {"whisper" in text for text in rows.all_inner_texts()} == {True}
    assert tab.locator("article p:visible").count() == 0
    tab.locator(".row-filter").fill("")
    assert rows.count() == n_rows
    tab.close()


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""
