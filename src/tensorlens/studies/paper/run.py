"""One table of the paper, from its model and data to files in its layout.

Everything that can be refused is refused before a model is loaded: data that are not there, labels that are missing,
fewer samples than asked for, a checkpoint that does not exist.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs, to_builtins

from tensorlens.errors import InputError, LoadError
from tensorlens.files import write_json, write_whole
from tensorlens.lens import Lens, load
from tensorlens.models.foreign_files import foreign_reader
from tensorlens.models.loading import TOKENIZER_FILES, chosen_device, read_config
from tensorlens.models.resolving import check_model_name, local_folder
from tensorlens.recording.conventions import Rules
from tensorlens.studies.datasets import Dataset, read_dataset
from tensorlens.studies.options import PerturbationOptions, RelationOptions, checked_names
from tensorlens.studies.paper import layout
from tensorlens.studies.paper.protocol import TABLES, Protocol, TableSettings, differences, with_changes
from tensorlens.studies.paper.training import check_training, trained
from tensorlens.studies.perturbation_samples import Images, Texts, drawn_order, text_pieces
from tensorlens.studies.perturbation_study import perturbation
from tensorlens.studies.processes import Processes
from tensorlens.studies.relation_prompts import load_relations
from tensorlens.studies.relation_study import relations
from tensorlens.studies.runs import Record, StudyResult, check_run_folder, read_run_file


class DataKind(NamedTuple):
    """Data of one kind: what they are, their folder among several, and their hub id if it needs no agreement."""

    says: str
    folders: tuple[str, ...]
    hub_id: str = ""


DATA = {
    "imagenet": DataKind("ImageNet (a folder of pictures by class)", ("imagenet", "ILSVRC2012", "images")),
    "imdb": DataKind(
        "IMDB reviews with labels (a file, the aclImdb folder, or stanfordnlp/imdb)",
        ("imdb", "aclImdb"),
        "stanfordnlp/imdb",
    ),
    "wikitext": DataKind(
        "WikiText-103 (a file, a folder, or Salesforce/wikitext:wikitext-103-raw-v1)",
        ("wikitext-103", "wikitext-103-raw", "wikitext-103-raw-v1", "wikitext", "wikitext-2"),
        "Salesforce/wikitext:wikitext-103-raw-v1",
    ),
    "relations": DataKind("the relations data set (a folder of files by category)", ("relations",)),
}


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
        self.protocol, self.device = protocol or Protocol(), chosen_device(device or Processes.device())
        self.limit, self.changes = limit, {} if seed is None else {"seed": seed}
        check_model_name(self.model, revision)
        check_run_folder(out, "relations" if self.table.kind == "relations" else "perturbation")
        self.data = located(data, self.table, name)
        self.config: Any = None
        self.deviations: list[str] = []

    @property
    def options(self) -> PerturbationOptions:
        """The protocol of this table."""
        given, usual = self.protocol.perturbation, Protocol().perturbation
        own = {
            name: value for name, value in self.table.options.items() if getattr(given, name) == getattr(usual, name)
        }
        settings = with_changes(given, own, self.protocol.tables.get(self.name, {}))
        changes: dict[str, Any] = self.changes | {"limit": self.limit or self.protocol.n_samples}
        if self.table.kind != "wikitext":
            changes["methods"] = tuple(name for name in settings.methods or () if name != "tensor.in_class")
        return structs.replace(settings, **changes)

    @property
    def relation_options(self) -> RelationOptions:
        """The protocol of the relations."""
        return structs.replace(self.protocol.relations, **self.changes | ({"limit": self.limit} if self.limit else {}))

    # Before a model is loaded -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse what cannot be run."""
        self.config = read_config(self.model, trust_remote_code=self.trust, revision=self.revision)
        if self.table.kind == "relations":
            found, problems = load_relations(self.data, self.relation_options.categories)
            if not found:
                first = f" The first problem, in {problems[0].path}: {problems[0].message}." if problems else ""
                raise InputError(f"No relation in {self.data!r} can be used.{first}")
            return
        self._read_data()
        labels = self.samples.labels or ()
        n_without = len(self.samples) - sum(label not in (None, "") for label in labels)
        if self.table.kind != "wikitext" and self.protocol.stratify and n_without:
            raise InputError(
                f"The table {self.name} draws samples by label, and {n_without} of {len(self.samples)} in "
                f"{self.data!r} have none. Add a column called label (pictures: a folder for each class), or set "
                "stratify = false in the protocol."
            )
        if self.table.kind == "imagenet" and not hasattr(self.config, "patch_size"):
            raise InputError(
                f"The table {self.name} needs a model of pictures; {self.model} is a {self.config.model_type}."
            )
        known = (Images if self.table.kind == "imagenet" else Texts).replacements
        checked_names(self.options.replacements or known, known, "replacements")
        if self.table.trains and not self.has_classes:
            check_training(self.model, self.protocol.training, self.training, self.samples)
        self._check_number()

    @property
    def has_classes(self) -> bool:
        """Whether the checkpoint has a head for whole texts, so it was trained before."""
        names = getattr(self.config, "architectures", None) or ()
        return any(name.endswith("ForSequenceClassification") for name in names)

    def _check_number(self) -> None:
        options, n_found, long = self.options, len(self.samples), ""
        if self.samples.kind == "text":
            from transformers import AutoTokenizer

            folder = local_folder(self.model, self.revision, weights=False)
            if not any((folder / file).is_file() for file in TOKENIZER_FILES):
                raise InputError(
                    f"The table {self.name} needs a model of texts; {self.model} has no tokenizer beside it."
                )
            with foreign_reader(lambda said: f"{self.model}: its tokenizer could not be read: {said}"):
                tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=self.trust)
            n_found = len(text_pieces(tokenizer, self.samples, options, options.n_tokens)[0])
            long = f" of at least {options.min_tokens} tokens"
        if n_found < (options.limit or 0):
            raise InputError(
                f"{options.limit} samples{long} were asked for; {self.data!r} has {n_found}. Pass --limit {n_found}."
            )

    def _read_data(self) -> None:
        """The data to measure on, and to train on: the test part and that for training, or two halves of one part."""
        self.samples = self._part(self.options.split)
        expected = "image" if self.table.kind == "imagenet" else "text"
        if self.samples.kind != expected:
            raise InputError(
                f"The table {self.name} needs {DATA[self.table.kind].says}; {self.data!r} has {self.samples.kind}s."
            )
        if self.table.trains:
            whole, self.training = self.samples, self._part("train")
            if self.training.fingerprint == whole.fingerprint:  # there is one part
                order = drawn_order(whole.labels, len(whole), self.options.seed)
                n_held = max(1, round(self.protocol.training.held_out * len(whole)))
                self.samples, self.training = whole.select(sorted(order[:n_held])), whole.select(order[n_held:])

    def _part(self, split: str) -> Dataset:
        return read_dataset(self.data, column=self.options.column, label=self.options.label, split=split)

    # The run ----------------------------------------------------------------------------------------------------------

    def run(self, progress: bool | None = None) -> StudyResult:
        """Measure, or continue, and write the table, as .tex and .md, and the figures."""
        if self.config is None:
            self.check()
        made = self._relations(progress) if self.table.kind == "relations" else self._perturbation(progress)
        if Processes.from_environment().is_first:
            self._write(*made)
        return made[0]

    def _write(self, result: StudyResult, line: str, deviations: list[str], left_open: list[str]) -> None:
        table, said = self.table, [*self.deviations, *deviations]
        if self.data != DATA[table.kind].hub_id:
            said.insert(0, f"data: {self.data}; the paper: {DATA[table.kind].says.split(' (')[0]}")
        if self.model != table.model:
            said.insert(0, f"model: {self.model} instead of {table.model}")
        shown = [name for name in layout.NAMES if name in (self.options.methods or ())]
        no_figures = layout.write_figures(self.out / "figures", result.summary, self.options.methods or ())
        said += [] if no_figures is None else [f"no figures: {no_figures}"]
        about = layout.About(table=table, line=line, deviations=said, left_open=[*table.notes, *left_open])
        texts = layout.relation_texts if table.kind == "relations" else layout.perturbation_texts
        for suffix, text in texts(about, result.summary, shown).items():
            write_whole(self.out / f"table.{suffix}", text)
        write_json(self.out / "protocol.json", to_builtins(self.protocol))

    def _lens(self, model: str, *, final_norm: bool = True) -> Lens:
        rules = Rules(include_final_norm=final_norm)
        revision = self.revision if model == self.model else None
        lens = load(model, device=str(self.device), rules=rules, trust_remote_code=self.trust, revision=revision)
        lens.specimen.name = self.model
        return lens

    def _perturbation(self, progress: bool | None) -> tuple[StudyResult, str, list[str], list[str]]:
        model, options = self._trained() if self.table.trains else self.model, self.options
        drawn = self.samples if self.protocol.stratify else replace(self.samples, labels=None)
        result = perturbation(self._lens(model), drawn, self.out, options=options, progress=progress)
        result.areas()  # says why if nothing could be measured
        settings = read_run_file(self.out / "config.json", "Start the run again.")["settings"]
        line = (
            f"{result['n_measured']} samples of {self.data}, {result['n_skipped']} skipped; {self.model}; "
            f"watched: {settings['watched']}."
        )
        return result, line, self._said(settings, result.summary), self._open(settings)

    def _trained(self) -> str:
        """The folder of the fine-tuned model."""
        if self.has_classes:
            self.deviations.append(f"{self.model} was fine-tuned elsewhere, not by this command")
            return self.model
        folder = self.out / "model"
        start = local_folder(self.model, self.revision)
        options, seed = self.protocol.training, self.options.seed
        found = trained(start, self.training, self.samples, folder, options, seed=seed, device=self.device)
        self.deviations.append(
            f"fine-tuned here on {found['n_training']} reviews: accuracy {found['accuracy']:.3f} on "
            f"{found['n_held_out']} others; the paper does not say how it was done"
        )
        return str(folder)

    def _relations(self, progress: bool | None) -> tuple[StudyResult, str, list[str], list[str]]:
        lens, options = self._lens(self.model, final_norm=False), self.relation_options
        n_blocks = len(lens.anatomy.blocks)
        starts = tuple(start for start in options.starts if start < n_blocks)
        said = [] if starts == options.starts else [f"starting layers {starts}: the model has {n_blocks} blocks"]
        options = structs.replace(options, starts=starts or (0,))
        result = relations(lens, self.data, self.out, options=options, progress=progress)
        usual = structs.replace(Protocol().relations, starts=options.starts, seed=options.seed)
        line = f"{result['n_survived']} of {result['n_relations']} relations of {self.data}; {self.model}."
        left_open = [
            f"examples in a test prompt: {'m' if options.test_examples == 'm' else 'm − 1'}, m = {options.n_train}",
            f"test facts per split: at most {options.max_test}",
            "which facts align: those of the most common lengths of subject, query and line",
            "random baseline: a guess drawn from the answers themselves",
        ]
        return result, line, [*said, *differences(options, usual)], left_open

    # What is said -----------------------------------------------------------------------------------------------------

    def _said(self, settings: Record, summary: Record) -> list[str]:
        """The deviations of a perturbation table from the paper."""
        options, usual = self.options, with_changes(Protocol().perturbation, self.table.options)
        same = {name: getattr(options, name) for name in ("limit", "seed", "methods", "column", "label")}
        said = differences(options, structs.replace(usual, **same))
        said += [] if self.protocol.stratify else ["samples were drawn without regard to labels"]
        said += ["the watched state is made of logits"] if settings["watched"].startswith("logits") else []
        if settings["data"].get("n_tokens", options.n_tokens) < options.n_tokens:
            said.append(f"{settings['data']['n_tokens']} tokens: the model takes no more")
        if not any("accuracy" in one.get("most", {}) for one in summary["conditions"].values()):
            said.append("no accuracy: the model has no classes at the watched output, or labels are not among them")
        return said

    def _open(self, settings: Record) -> list[str]:
        """The points that the paper leaves open in a perturbation table, and our choices."""
        options, training = self.options, self.protocol.training
        token = settings["data"].get("replacement_token")
        kept = options.keep_first
        by = "articles" if options.cut == "windows" else "labels" if self.protocol.stratify else "nothing"
        tuned = (
            f"fine-tuning: {training.epochs} passes, batches of {training.batch_size}, learning rate up to "
            f"{training.learning_rate:g}, texts of at most {training.n_tokens} tokens"
        )
        return [
            *([tuned] if self.table.trains and not self.has_classes else []),
            f"number of samples: {options.limit}, drawn at random with seed {options.seed}, in turn by {by}"
            if options.draw == "random"
            else f"number of samples: the first {options.limit} in the order of the file",
            f"grid of masked shares: {', '.join(f'{100 * share:g} %' for share in options.grid)}",
            f"replacement: {', '.join(settings['replacements'])}{f' ({token})' if token else ''}",
            f"which tokens may go: all but special ones{f' and the first {kept}' if kept else ''}; the last one of a "
            "decoder under paper-like",
            f"norms in rollouts and means: {'as they are' if options.raw_norms else 'with rows divided by their sums'}",
            f"norm of T: {'exact' if options.norm_probes is None else f'sketched by {options.norm_probes} probes'}",
            "scale of the AUC: both are given, the mean height and the area over the range of shares",
        ]


def located(data: str | Path | None, table: TableSettings, name: str) -> str:
    """Where the data of a table are: what was given, a folder within it, or the hub's id."""
    kind = DATA[table.kind]
    if data is None and kind.hub_id:
        return kind.hub_id
    if not data:
        raise InputError(f"The table {name} needs {kind.says}; pass it with --data.")
    root = Path(data).expanduser()
    inner = next((root / one for one in kind.folders if root.is_dir() and (root / one).exists()), None)
    if inner is not None:
        return str(inner)
    holds_others = root.is_dir() and any((root / one).exists() for some in DATA.values() for one in some.folders)
    if holds_others or str(data).startswith((".", "/", "~")) and not root.exists():
        raise InputError(f"The table {name} needs {kind.says}; there is none at {str(data)!r}.")
    return str(data)


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
