r"""`CorpusTensor`: the mean operator of a corpus from every block to the end.

    M_n = mean over inputs and positions i of T.blocks(n, N)[i, :, i, :],   b_n = mean of F(X)_i − T_ii x_i

is a linear reading of block n for any input: what a state there will become. Read through the unembedding, it names
words. With `outputs="later"` it is Σ_{i' ≥ i} T[i', :, i, :] instead, averaged over i, without a constant; by
`Rules.jacobian(include_final_norm=False)` that is the J-lens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

from tensorlens import cancel
from tensorlens.batches import Batch
from tensorlens.errors import InputError, TensorLensError
from tensorlens.inside.depths import at_depths, check_one_stream, logits_from, unembedded
from tensorlens.maps.files import replace_file
from tensorlens.models.modes import own_modes
from tensorlens.models.samples import check_several
from tensorlens.recording.recording import Recording
from tensorlens.specimen import Specimen
from tensorlens.strict_json import from_json, to_json
from tensorlens.tensor import AttentionTensor
from tensorlens.versions import package_versions

if TYPE_CHECKING:
    from rich.console import Console

FORMAT = "tensorlens.corpus_tensor/1"
Outputs = Literal["own", "later"]
EXACT_UP_TO = 4096
"""How many cotangents a text may take before probes are used instead."""
DEFAULT_PROBES = 64
CHUNK = 32


class Word(NamedTuple):
    """A word that a state reads as, and its probability."""

    name: str
    probability: float


@dataclass(frozen=True, kw_only=True, eq=False)
class CorpusReading:
    """What each state will become, in words: by the mean operator of a corpus, and by the plain logit lens.

    Attributes:
        tokens: A label for each token.
        corpus: For each block and token, the words that the mean operator reads in the state entering the block.
        plain: The same with nothing between: the model's own head on the state.
    """

    tokens: tuple[str, ...]
    corpus: tuple[tuple[tuple[Word, ...], ...], ...]
    plain: tuple[tuple[tuple[Word, ...], ...], ...]

    def show(self, token: int = -1, console: Console | None = None) -> None:
        """Print the first word of each block at one token; without a console, to standard output."""
        from rich.console import Console as RichConsole
        from rich.table import Table
        from rich.text import Text

        table = Table("block", "corpus", "logit lens", box=None, pad_edge=False)
        for n, (ours, plain) in enumerate(zip(self.corpus, self.plain, strict=True)):
            table.add_row(str(n), *(Text(", ".join(repr(word.name) for word in one[token])) for one in (ours, plain)))
        console = console or RichConsole(highlight=False)
        console.print(Text(f"at token {self.tokens[token]!r}", style="bold"))
        console.print(table)


@dataclass(frozen=True, kw_only=True, eq=False)
class CorpusTensor:
    """The mean operator of a corpus from every block to the end.

    Attributes:
        matrices: $M_n$ for each block.
        bias: $b_n$ for each block.
        outputs: ``"own"``: from a token to itself. ``"later"``: from a token to itself and all later ones, summed.
        n_texts: How many texts it is the mean of.
        meta: Model, versions, rules, positions left out, probes.
    """

    matrices: Float[Tensor, "block out_channel in_channel"]
    bias: Float[Tensor, "block out_channel"]
    outputs: str
    n_texts: int
    meta: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """One line: sizes."""
        n, n_out, n_in = self.matrices.shape
        return f"CorpusTensor({self.meta.get('model')}, {n} blocks, {n_out} × {n_in}, {self.n_texts} texts)"

    @classmethod
    @own_modes
    def fit(
        cls,
        lens: Any,
        texts: Iterable[Any],
        *,
        outputs: Outputs = "own",
        probes: int | None = None,
        batch_size: int = 4,
        skip_first: int = 0,
        skip_last: int = 0,
        seed: int = 0,
        progress: bool | None = None,
    ) -> CorpusTensor:
        """The mean over texts; each counts as much as any other, however long it is.

        Args:
            lens: A lens on the model.
            texts: What the lens takes.
            outputs: From a token to itself (``"own"``), or to itself and all later ones (``"later"``).
            probes: Random cotangents for each text; None is exact where at most 4,096 cotangents are needed, and 64
                probes otherwise. The record says which.
            batch_size: How many texts share one recording.
            skip_first: Positions at the start of each text that do not count, neither as source nor as output.
            skip_last: The same at the end.
            seed: Of the probes.
            progress: Whether to show a progress bar; on a terminal if None.
        """
        if outputs not in ("own", "later"):
            raise InputError(f"`outputs` must be 'own' or 'later'; got {outputs!r}.")
        check_several(texts)
        sums = _Sums(outputs, probes, skip_first, skip_last, torch.Generator().manual_seed(seed))
        bar = tqdm(unit=" texts", disable=None if progress is None else not progress)
        with bar:
            for some in _in_batches(texts, batch_size):
                cancel.check()
                sums.add(lens.specimen, some)
                bar.update(len(some))
        if sums.n_texts == 0 or sums.matrices is None or sums.bias is None:
            raise InputError(
                f"Expected texts with more than {skip_first + skip_last} tokens; got {sums.n_short} shorter ones."
            )
        notes = {"rules": lens.rules.as_dict(), "skip_first": skip_first, "skip_last": skip_last}
        return cls(
            matrices=(sums.matrices / sums.n_texts).cpu(),
            bias=(sums.bias / sums.n_texts).cpu(),
            outputs=outputs,
            n_texts=sums.n_texts,
            meta={
                "model": getattr(lens, "name", None),
                "versions": package_versions(),
                **notes,
                "probes": sums.n_probes,
                "texts_left_out": sums.n_short,
            },
        )

    @own_modes
    def read(self, T: AttentionTensor, k: int = 5) -> CorpusReading:
        """The words that each state of an input will become, by block and position, beside the plain logit lens."""
        recording, classes = T.operator.recording, T.context.classes
        states = [state[0] for state in recording.states[: recording.n_blocks]]
        expected = (len(states), states[0].shape[1])
        if (len(self.matrices), self.matrices.shape[2]) != expected or classes is None:
            raise InputError(
                f"Expected a tensor of {len(self.matrices)} blocks with {self.matrices.shape[2]} channels and a head; "
                f"got {expected[0]} blocks with {expected[1]} channels."
            )
        read = unembedded if self.meta.get("rules", {}).get("include_final_norm", True) else logits_from
        corpus, plain = [], []
        for n, state in enumerate(states):
            y = state @ self.matrices[n].to(state).T + self.bias[n].to(state)
            corpus.append(_words(read(recording, y), classes, k))
            plain.append(_words(logits_from(recording, state), classes, k))
        return CorpusReading(tokens=T.tokens, corpus=tuple(corpus), plain=tuple(plain))

    def save(self, path: str | Path) -> Path:
        """Write a .safetensors file, whole or not at all."""
        path = Path(path)
        if path.suffix != ".safetensors":
            raise InputError(f"Expected a name ending in .safetensors; got {path.name!r}.")
        tensors = {name: getattr(self, name).contiguous() for name in ("matrices", "bias")}
        record = to_json({"outputs": self.outputs, "n_texts": self.n_texts, "meta": self.meta})
        content = save(tensors, metadata={"format": FORMAT, "record": record})
        replace_file(path, lambda temporary: _put(temporary, content))
        return path

    @classmethod
    def load(cls, path: str | Path) -> CorpusTensor:
        """Read a file of `save`; `InputError` for a foreign or damaged one."""
        path = Path(path)
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                if header["format"] != FORMAT:
                    raise ValueError("another format")
                tensors = {name: file.get_tensor(name) for name in ("matrices", "bias")}
            return cls(**tensors, **from_json(header["record"]))
        except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
            raise InputError(
                f"Expected a file that CorpusTensor.save wrote ({FORMAT!r}) in {path.name!r}; got one that cannot be "
                f"read ({type(error).__name__}: {error})."
            ) from error


def _put(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _words(logits: Tensor, classes: Any, k: int) -> tuple[tuple[Word, ...], ...]:
    best = logits.float().softmax(-1).topk(min(k, logits.shape[-1]))
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(tuple(Word(classes.name(index), share) for index, share in zip(*row, strict=True)) for row in rows)


def _in_batches(texts: Iterable[Any], size: int) -> Iterator[list[Any]]:
    if size < 1:
        raise InputError(f"`batch_size` must be at least 1; got {size}.")
    rest = iter(texts)
    while some := list(islice(rest, size)):
        yield some


@dataclass
class _Sums:
    """Sums over texts."""

    outputs: Outputs
    probes: int | None
    skip_first: int
    skip_last: int
    generator: torch.Generator
    n_texts: int = 0
    n_short: int = 0
    n_probes: int | None = None
    matrices: Tensor | None = None
    bias: Tensor | None = None

    def add(self, specimen: Specimen, texts: list[Any]) -> None:
        """Add some texts that share one recording."""
        prepared = []
        for one in specimen.prepare_all(texts):
            if isinstance(one, TensorLensError):
                raise one
            prepared.append(one)
        batch = Batch(specimen, prepared)
        batch.check()
        recording = batch.recording
        check_one_stream(recording)
        counted = self._counted(batch.lengths, recording.states[0])
        n_of = counted.sum(1)
        self.n_texts += int((n_of > 0).sum())
        self.n_short += int((n_of == 0).sum())
        share = counted / n_of.clamp(min=1)[:, None]
        end = recording.states[-1]
        for cotangents in self._cotangents(counted, end):
            self._pull(recording, cotangents, share)
        if self.outputs == "own" and self.bias is not None:
            self.bias += (share[..., None] * end).sum((0, 1))

    def _counted(self, lengths: tuple[int, ...], state: Tensor) -> Tensor:
        """(sample, token): 1 where a position counts."""
        places = torch.arange(state.shape[1])[None]
        ends = torch.tensor([(length or state.shape[1]) - self.skip_last for length in lengths])[:, None]
        return ((places >= self.skip_first) & (places < ends)).to(state)

    def _cotangents(self, counted: Tensor, end: Tensor) -> Iterator[Tensor]:
        """Cotangents (cotangent, sample, token, channel), some at a time; their outer products sum to one."""
        n_tokens, width = end.shape[1:]
        n_exact = width * (n_tokens if self.outputs == "own" else 1)
        self.n_probes = self.probes if self.probes is not None or n_exact <= EXACT_UP_TO else DEFAULT_PROBES
        n = n_exact if self.n_probes is None else self.n_probes
        for start in range(0, n, CHUNK):
            size = min(CHUNK, n - start)
            if self.n_probes is None:
                units = torch.zeros(size, n_exact // width, width, dtype=end.dtype, device=end.device)
                units.flatten(1)[torch.arange(size), torch.arange(start, start + size)] = 1
            else:
                shape = (size, *((len(end), n_tokens) if self.outputs == "own" else (len(end), 1)), width)
                draws = torch.randint(0, 2, shape, generator=self.generator) * 2 - 1
                units = draws.to(end) / self.n_probes**0.5
            units = units if units.dim() == 4 else units[:, None]
            yield units.expand(size, *end.shape) * counted[..., None]

    def _pull(self, recording: Recording, cotangents: Tensor, share: Tensor) -> None:
        states, end = recording.states[:-1], recording.states[-1]
        if self.matrices is None or self.bias is None:
            self.matrices = end.new_zeros(len(states), end.shape[-1], states[0].shape[-1])
            self.bias = end.new_zeros(len(states), end.shape[-1])
        for n, pulled in at_depths(recording, cotangents):
            weighted = pulled * share[..., None]
            self.matrices[n] += torch.einsum("rsto,rsti->oi", cotangents, weighted)
            if self.outputs == "own":
                self.bias[n] -= torch.einsum("rsto,rst->o", cotangents, (weighted * states[n]).sum(-1))
