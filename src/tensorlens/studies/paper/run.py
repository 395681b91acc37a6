"""One table of the paper, from its model and data to files in its layout.

Everything that can be refused is refused before a model is loaded: data that are not there, labels that are missing,
fewer samples than asked for, a checkpoint that does not exist.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tensorlens.errors import InputError, LoadError, TensorLensError
from tensorlens.files import write_json, write_whole
from tensorlens.lens import load
from tensorlens.models.loading import read_config
from tensorlens.models.resolving import ask_hub, check_model_name, is_hub_id, local_folder
from tensorlens.recording.conventions import Rules
from tensorlens.studies.datasets import SUFFIXES, Dataset, read_dataset
from tensorlens.studies.paper import layout
from tensorlens.studies.paper.protocol import Protocol, differences, with_changes
from tensorlens.studies.paper.training import is_classifier, trained
from tensorlens.studies.perturbation_study.run import PerturbationOptions, perturbation
from tensorlens.studies.perturbation_study.samples import drawn_order, text_pieces
from tensorlens.studies.processes import Processes
from tensorlens.studies.relation_study.prompts import load_relations
from tensorlens.studies.relation_study.run import RelationOptions, relations
from tensorlens.studies.runs import StudyResult, check_run_folder

FOLDERS = {
    "imagenet": ("imagenet", "ILSVRC2012", "images"),
    "imdb": ("imdb", "aclImdb"),
    "wikitext": ("wikitext-103", "wikitext-103-raw", "wikitext-103-raw-v1", "wikitext", "wikitext-2"),
    "relations": ("relations",),
}
"""Names that the data of each kind may have in a folder with several kinds."""
SAID = {
    "imagenet": "ImageNet (a folder of pictures by class)",
    "imdb": "IMDB reviews with labels (a file, the aclImdb folder, or stanfordnlp/imdb)",
    "wikitext": "WikiText-103 (a file, a folder, or Salesforce/wikitext:wikitext-103-raw-v1)",
    "relations": "the relations data set (a folder of files by category)",
}


class TableSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the paper's tables or figures.

    Attributes:
        title: Model and data.
        model: Its hub id.
        kind: Its data: a key of `FOLDERS`.
        data: Their hub id, if they have one that needs no agreement.
        options: Single options of the protocol that are this table's own.
        paper: The paper's numbers, by metric and method.
        notes: Notes for the reader.
        trains: Whether the model is fine-tuned first.
    """

    title: str
    model: str
    kind: str
    data: str
    options: dict[str, Any]
    paper: dict[str, dict[str, str]]
    notes: list[str]
    trains: bool


TABLES: dict[str, TableSettings] = msgspec.json.decode(
    Path(__file__).with_name("tables.json").read_bytes(), type=dict[str, TableSettings]
)


class PaperTable:
    """A table to be made.

    Args:
        name: A key of `TABLES`.
        data: File, folder or hub id of its data, or a folder that holds the data of several tables.
        out: The run's folder.
        model: Folder or id of the model; the paper's if None.
        protocol: Its settings; the paper's if None.
        limit: Samples, or relations of each category; the protocol's if None.
        seed: Seed of the draw, the splits and the bootstrap; the protocol's if None.
        device: Where it runs; the accelerator if None.
        trust_remote_code: Whether code that comes with the model may run.
        revision: The version of the model.
    """

    def __init__(
        self,
        name: str,
        data: str | Path | None,
        out: str | Path,
        *,
        model: str | None = None,
        protocol: Protocol | None = None,
        limit: int | None = None,
        seed: int | None = None,
        device: str | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
    ) -> None:
        if name not in TABLES:
            raise InputError(f"TABLE must be one of {', '.join(TABLES)} or all; got {name!r}.")
        self.name, self.table, self.out = name, TABLES[name], Path(out)
        self.model, self.revision, self.trust = model or self.table.model, revision, trust_remote_code
        self.protocol, self.device = protocol or Protocol(), device
        self.limit, self.seed = limit, seed
        check_model_name(self.model, revision)
        check_run_folder(out, "relations" if self.table.kind == "relations" else "perturbation")
        self.data = located(data, self.table, name)
        self.deviations: list[str] = []

    @property
    def options(self) -> PerturbationOptions:
        """The protocol of this table."""
        changes: dict[str, Any] = {"limit": self.limit or self.protocol.n_samples}
        changes |= {} if self.seed is None else {"seed": self.seed}
        given, usual = self.protocol.perturbation, Protocol().perturbation
        own = {
            name: value for name, value in self.table.options.items() if getattr(given, name) == getattr(usual, name)
        }
        usual = with_changes(given, own, self.protocol.tables.get(self.name, {}))
        if self.table.kind != "wikitext":
            changes["methods"] = [name for name in usual.methods or () if name != "tensor.in_class"]
        return with_changes(usual, changes)

    @property
    def relation_options(self) -> RelationOptions:
        """The protocol of the relations."""
        changes: dict[str, Any] = {"limit": self.limit} if self.limit else {}
        changes |= {} if self.seed is None else {"seed": self.seed}
        return msgspec.structs.replace(self.protocol.relations, **changes)

    def check(self) -> None:
        """Refuse what cannot be run, before a model is loaded."""
        if is_hub_id(self.model):
            ask_hub(self.model, self.revision)
        read_config(self.model, trust_remote_code=self.trust, revision=self.revision)
        if self.table.kind == "relations":
            load_relations(self.data, self.relation_options.categories)
            return
        self._read_data()
        if self.table.kind != "wikitext" and self.protocol.stratify and self.samples.labels is None:
            raise InputError(
                f"The table {self.name} draws samples by label, and {str(self.data)!r} has none. Add a column called "
                "label (pictures: a folder for each class), or set stratify = false in the protocol."
            )
        self._check_number()

    def _check_number(self) -> None:
        options, wanted = self.options, self.options.limit or 0
        n_found = len(self.samples)
        if self.samples.kind == "text":
            tokenizer = _tokenizer(self.model, self.revision, trust=self.trust)
            if tokenizer is not None:
                n_found = len(text_pieces(tokenizer, self.samples, options, options.n_tokens)[0])
        if n_found < wanted:
            long = f" of at least {options.min_tokens} tokens" if self.samples.kind == "text" else ""
            raise InputError(
                f"{wanted} samples{long} were asked for; {str(self.data)!r} has {n_found}. Pass --limit {n_found}."
            )

    # Data -------------------------------------------------------------------------------------------------------------

    def _read_data(self) -> None:
        """The data to measure on, and to train on: the test part and that for training, or two halves of one part."""
        self.samples = self._part(self.options.split)
        expected = "image" if self.table.kind == "imagenet" else "text"
        if self.samples.kind != expected:
            raise InputError(
                f"The table {self.name} needs {SAID[self.table.kind]}; {str(self.data)!r} has {self.samples.kind}s."
            )
        if self.table.trains:
            whole, self.training = self.samples, self._part("train")
            if self.training.fingerprint == whole.fingerprint:  # there is one part
                order = drawn_order(whole.labels, len(whole), self.options.seed)
                n_held = max(1, round(self.protocol.training.held_out * len(whole)))
                self.samples, self.training = whole.select(sorted(order[:n_held])), whole.select(order[n_held:])

    def _part(self, split: str) -> Dataset:
        options = self.options
        return read_dataset(self.data, column=options.column, label=options.label, split=split)

    # The run ----------------------------------------------------------------------------------------------------------

    def run(self, progress: bool | None = None) -> StudyResult:
        """Measure, or continue, and write the table, as .tex and .md, and the figures."""
        self.check()
        if self.table.kind == "relations":
            result, about, texts = self._relations(progress)
        else:
            result, about, texts = self._perturbation(progress)
        if Processes.from_environment().is_first:
            for suffix, text in texts.items():
                write_whole(self.out / f"table.{suffix}", text)
            write_json(self.out / "protocol.json", msgspec.to_builtins(self.protocol))
            write_json(self.out / "about.json", about)
        return result

    def _lens(self, model: str, *, final_norm: bool = True) -> Any:
        rules = Rules(include_final_norm=final_norm)
        where = self.device or Processes.device()
        revision = self.revision if model == self.model else None
        lens = load(model, device=where, rules=rules, trust_remote_code=self.trust, revision=revision)
        lens.specimen.name = self.model
        return lens

    def _perturbation(self, progress: bool | None) -> tuple[StudyResult, dict[str, Any], dict[str, str]]:
        model, options = self.model, self.options
        if self.table.trains:
            model = self._trained()
        drawn = self.samples if self.protocol.stratify else replace(self.samples, labels=None)
        result = perturbation(self._lens(model), drawn, self.out, options=options, progress=progress)
        result.areas()  # says why if nothing could be measured
        settings = json.loads((self.out / "config.json").read_text("utf-8"))["settings"]
        about = self._about(self._said(options, settings, result.summary), self._open(options, settings))
        about["line"] = (
            f"{result['n_measured']} samples of {self.data}, {result['n_skipped']} skipped; {self.model}; "
            f"watched: {settings['watched']}."
        )
        methods = options.methods or ()
        shown = [name for name in layout.NAMES if name in methods]
        why = layout.write_figures(self.out / "figures", result.summary, methods)
        about["deviations"] += [] if why is None else [f"no figures: {why}"]
        return result, about, layout.perturbation_texts(about, result.summary, shown)

    def _trained(self) -> str:
        if is_classifier(self.model, self.revision):
            self.deviations.append(f"{self.model} was fine-tuned elsewhere, not by this command")
            return self.model
        self.out.mkdir(parents=True, exist_ok=True)
        found = trained(
            self.model,
            self.training,
            self.samples,
            self.out / "model",
            self.protocol.training,
            seed=self.options.seed,
            device=self.device,
        )
        self.deviations.append(
            f"fine-tuned here on {found['n_training']} reviews, {found['epochs']} epochs: accuracy "
            f"{found['accuracy']:.3f} on {found['n_held_out']} others; the paper does not say how it was done"
        )
        return str(self.out / "model")

    def _relations(self, progress: bool | None) -> tuple[StudyResult, dict[str, Any], dict[str, str]]:
        lens, options = self._lens(self.model, final_norm=False), self.relation_options
        n_blocks = len(lens.anatomy.blocks)
        starts = tuple(start for start in options.starts if start < n_blocks)
        said = [] if starts == options.starts else [f"starting layers {starts}: the model has {n_blocks} blocks"]
        options = msgspec.structs.replace(options, starts=starts or (0,))
        result = relations(lens, self.data, self.out, options=options, progress=progress)
        usual = msgspec.structs.replace(Protocol().relations, starts=options.starts, seed=options.seed)
        about = self._about([*said, *differences(options, usual)], _open_of_relations(options))
        about["line"] = f"{result['n_survived']} of {result['n_relations']} relations of {self.data}; {self.model}."
        why = layout.write_figures(self.out / "figures", result.summary, ())
        about["deviations"] += [] if why is None else [f"no figures: {why}"]
        return result, about, layout.relation_texts(about, result.summary)

    # What is said -----------------------------------------------------------------------------------------------------

    def _about(self, said: Sequence[str], left_open: Sequence[str]) -> dict[str, Any]:
        table = self.table
        elsewhere = [] if self.model == table.model else [f"model: {self.model} instead of {table.model}"]
        if str(self.data) != table.data:
            elsewhere.append(f"data: {self.data}; the paper: {SAID[table.kind].split(' (')[0]}")
        return {
            "title": table.title,
            "table": self.name,
            "paper": table.paper,
            "deviations": [*elsewhere, *self.deviations, *said],
            "open": [*table.notes, *left_open],
        }

    def _said(self, options: PerturbationOptions, settings: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
        usual = with_changes(Protocol().perturbation, self.table.options)
        same = {name: getattr(options, name) for name in ("limit", "seed", "methods", "column", "label")}
        said = differences(options, msgspec.structs.replace(usual, **same))
        said += [] if self.protocol.stratify else ["samples were drawn without regard to labels"]
        said += ["the watched state is made of logits"] if settings["watched"].startswith("logits") else []
        if settings["data"].get("n_tokens", options.n_tokens) < options.n_tokens:
            said.append(f"{settings['data']['n_tokens']} tokens: the model takes no more")
        if not any("accuracy" in one.get("most", {}) for one in summary["conditions"].values()):
            said.append("no accuracy: the model has no classes at the watched output, or labels are not among them")
        return said

    def _open(self, options: PerturbationOptions, settings: Mapping[str, Any]) -> list[str]:
        token = settings["data"].get("replacement_token")
        norms = "as they are" if options.raw_norms else "with rows divided by their sums"
        kept = options.keep_first
        by = "articles" if options.cut == "windows" else "labels" if self.protocol.stratify else "nothing"
        return [
            f"number of samples: {options.limit}, drawn at random with seed {options.seed}, in turn by {by}"
            if options.draw == "random"
            else f"number of samples: the first {options.limit} in the order of the file",
            f"grid of masked shares: {', '.join(f'{100 * share:g} %' for share in options.grid)}",
            f"replacement: {', '.join(settings['replacements'])}{f' ({token})' if token else ''}",
            f"which tokens may go: all but special ones{f' and the first {kept}' if kept else ''}; the last one of a "
            "decoder under paper-like",
            f"norms in rollouts and means: {norms}",
            f"norm of T: {'exact' if options.norm_probes is None else f'sketched by {options.norm_probes} probes'}",
            "scale of the AUC: both are given, the mean height and the area over the range of shares",
        ]


def _open_of_relations(options: RelationOptions) -> list[str]:
    return [
        f"examples in a test prompt: {'m' if options.test_examples == 'm' else 'm − 1'}, m = {options.n_train}",
        f"test facts per split: at most {options.max_test}",
        "which facts align: those of the most common lengths of subject, query and line",
        "random baseline: a guess drawn from the answers themselves",
    ]


def located(data: str | Path | None, table: TableSettings, name: str) -> str:
    """Where the data of a table are: what was given, a folder within it, or the hub's id."""
    if data is None:
        if not table.data:
            raise InputError(f"The table {name} needs {SAID[table.kind]}; pass it with --data.")
        return table.data
    root = Path(data).expanduser()
    inner = next((root / one for one in FOLDERS[table.kind] if root.is_dir() and (root / one).exists()), None)
    if inner is not None:
        return str(inner)
    holds_others = root.is_dir() and any((root / one).exists() for some in FOLDERS.values() for one in some)
    is_path = root.suffix.lower() in SUFFIXES or str(data).startswith((".", "/", "~")) or str(data).count("/") > 1
    if holds_others or is_path and not root.exists():
        raise InputError(f"The table {name} needs {SAID[table.kind]}; there is none at {str(data)!r}.")
    return str(data)


def _tokenizer(model: str, revision: str | None, *, trust: bool) -> Any | None:
    """The tokenizer alone; None where only loading the model can say what is wrong with it."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(local_folder(model, revision, weights=False), trust_remote_code=trust)
    except (TensorLensError, OSError, ValueError, KeyError, ImportError):
        return None


def every_table(data: str | Path, out: str | Path, models: str | Path | None, **options: Any) -> list[PaperTable]:
    """All tables, each checked, before the first one runs."""
    made = []
    for name in TABLES:
        folder = None if models is None else Path(models).expanduser() / ("pythia" if name == "relations" else name)
        if folder is not None and not folder.is_dir():
            raise LoadError(f"`--model` must be a folder with one subfolder per table; there is no {str(folder)!r}.")
        made.append(PaperTable(name, data, Path(out) / name, model=folder and str(folder), **options))
    for one in made:
        one.check()
    return made
