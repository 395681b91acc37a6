"""`TokenMap`: a matrix of scores with its labels, its method and its origin.

A record. Selecting, ranking, grouping and files for people are here; the other files of this folder
compute maps, and `views` draws them.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import torch
from jaxtyping import Float
from msgspec.structs import force_setattr, replace
from rich.console import Console
from torch import Tensor

from tensorlens.axes import TokenMatrix
from tensorlens.errors import InputError, check_whole
from tensorlens.maps.groups import Groups, find_groups, find_words, group_sums, grouped_meta, with_beside
from tensorlens.maps.methods import METHODS
from tensorlens.operators.operator import check_token
from tensorlens.records import Record, Writer, as_array
from tensorlens.views.captions import caption_lines, is_by_output, row_caption_lines, sink_given, sum_lines, title_of
from tensorlens.views.figures import figure_writers
from tensorlens.views.labels import visible
from tensorlens.views.page import fragment, page
from tensorlens.views.record import MapView, PatchGrid, answer_text
from tensorlens.views.table import Table
from tensorlens.views.terminal import show

_FORMULA = ("=", "+", "-", "−", "@", "＝", "＋", "－", "＠", "\t", "\r")


class Top(NamedTuple):
    """One of the strongest inputs of an output."""

    index: int  # pyright: ignore[reportIncompatibleMethodOverride] -- the position, not tuple.index
    token: str
    score: float


class TokenMap(Record, frozen=True, kw_only=True, tag="tensorlens.token_map/1"):
    """How much each input token contributes to each output token: row i, column j is i ← j.

    Holds one copy of the scores on the CPU and nothing of the model. `meta` is kept in its JSON
    form (tuples as lists, keys as strings), so a saved map comes back equal.

    Attributes:
        scores: one row per output, one column per input.
        out_tokens: a label for each row.
        in_tokens: a label for each column.
        method: name in `METHODS`.
        bias_share: the fraction of each output that comes from the bias B, negative if it works against the output;
            NaN if the method has no bias. Rows of `tensor.in_out` and `tensor.in_class` sum to (1 - bias_share) times
            their targets.
        meta: model, target, blocks, heads, versions, rules, certificate. For pictures also
            `grid` ({"rows", "columns", "first"}) and `image`, a base64 data URI. `target`, `logit`,
            `standard_error`, `out_positions` and `sink_gives` may be lists with one entry for each output. For texts
            `text` and `offsets`, the place of each input token in it. `causal`: whether no output sees a later input.
            `set_aside`: the inputs outside the colour scale. `sink`: the groups that are attention sinks.
            `sink_gives`: the part of the bias from a held attention sink (`Rules.sink`), in the unit of the scores.
            `sums_to`: the name of the sum of a row. `why`: the text of `headline`.
    """

    scores: TokenMatrix
    out_tokens: tuple[str, ...]
    in_tokens: tuple[str, ...]
    method: str
    bias_share: Float[Tensor, " out_token"]
    meta: dict[str, Any] = msgspec.field(default_factory=dict)

    loadable: ClassVar[tuple[str, ...]] = (".json", ".safetensors")

    def __post_init__(self) -> None:
        """Check labels, and shapes against labels."""
        super().__post_init__()
        for name in ("out_tokens", "in_tokens"):
            force_setattr(self, name, _labels(name, getattr(self, name)))
        n_out, n_in = len(self.out_tokens), len(self.in_tokens)
        _check_numbers("scores", self.scores, (n_out, n_in))
        _check_numbers("bias_share", self.bias_share, (n_out,))

    def __repr__(self) -> str:
        """One line: method, size and target."""
        target = self.meta.get("target")
        target = f", target={target!r}" if isinstance(target, str) else ""
        return f"TokenMap({visible(self.method)}, {self.shape[0]} × {self.shape[1]}{target})"

    def _repr_html_(self) -> str:
        return fragment(self.view())

    @property
    def shape(self) -> tuple[int, int]:
        """Number of outputs, number of inputs."""
        return len(self.out_tokens), len(self.in_tokens)

    @property
    def is_signed(self) -> bool:
        """Whether scores of this method may be negative; for an unknown method, whether any score is."""
        known = METHODS.get(self.method)
        return (known is not None and known.signed) or bool((self.scores < 0).any())

    @property
    def headline(self) -> str:
        """The question that the map answers, such as ``Why “ Paris” (70 %)?``; its method where it has no target."""
        is_answer = answer_text(self.meta, *self.shape, _array(self.bias_share)) is not None
        return title_of(self.method, self.meta, is_answer=is_answer, n_out=self.shape[0])

    def _table(self) -> Table:
        return Table(as_array(self.scores), self.out_tokens, self.in_tokens)

    def row(self, out_token: int) -> TokenMap:
        """The map of one output only; negative positions count from the end.

        Raises:
            InputError: there is no such output.
        """
        i = check_token(out_token, self.shape[0])
        n_out = self.shape[0]
        meta = {k: [v[i]] if is_by_output(k, v, n_out) else v for k, v in self.meta.items()}
        return replace(
            self,
            scores=self.scores[i : i + 1],
            out_tokens=self.out_tokens[i : i + 1],
            bias_share=self.bias_share[i : i + 1],
            meta=meta,
        )

    def normalised(self) -> TokenMap:
        """The same map with each row divided by the sum of its absolute scores; empty rows stay zero."""
        total = self.scores.abs().nansum(dim=1, keepdim=True)
        return replace(self, scores=self.scores / torch.where(total > 0, total, torch.ones_like(total)))

    def set_aside(self, *in_tokens: int) -> TokenMap:
        """The same map with these inputs outside the colour scale but still in the sum; each has its own bar.

        A decoder's first token is often an attention sink whose score dominates; if it exceeds every other input,
        it is set aside by default. `set_aside()` sets nothing aside. Negative positions count from the end.

        Raises:
            InputError: there is no such input.
        """
        chosen = sorted({check_token(position, self.shape[1], "in_token") for position in in_tokens})
        return replace(self, meta=self.meta | {"set_aside": chosen})

    def words(self) -> TokenMap:
        """The same map with the tokens of each word as one input; `group("words")`."""
        return self.group("words")

    def group(self, groups: Groups) -> TokenMap:
        r"""The same map with the tokens of each group as one input: columns summed.

        $S'_{i←G} = Σ_{j ∈ G} S_{i←j}$: a group contributes the sum of its tokens' contributions, so rows of
        `tensor.in_out` and `tensor.in_class` sum to the same. (A sum of norms bounds the norm of the group's blocks.)
        Outputs stay tokens, since each token has its own prediction. Pieces of one character stay together. A
        decoder's first token that exceeds every other input, an attention sink, is counted beside its group; call
        `set_aside()` first to count it in the group.

        Args:
            groups: ``"words"``, ``"sentences"``, ``"lines"`` or ``"tokens"``; or a list of (label, start, stop) in
                characters of the text, in tokens where the input was ids; or of passages to find in the text. A token
                belongs to the group it overlaps most, the first on ties; tokens of no group form one named ``rest``.

        Raises:
            InputError: the inputs are patches of a picture; groups overlap, are empty or were not found.
        """
        if self.meta.get("grid") is not None:
            raise InputError("Expected a map of a text, got one of a picture. Its patches have no words.")
        found = find_groups(groups, self.in_tokens, self.meta)
        name = groups if isinstance(groups, str) else "by the user"
        aside = sink_columns(self.scores, self.meta)
        sinks = () if "set_aside" in self.meta else aside
        found = with_beside(found, sinks, self.in_tokens)
        meta = grouped_meta(self.meta, found, name, aside)
        return replace(
            self,
            scores=group_sums(self.scores, found),
            in_tokens=tuple(group.label for group in found),
            meta=meta | {"sink": list(range(len(sinks)))} if sinks else meta,
        )

    def top(self, k: int = 10, out_token: int = -1) -> list[Top]:
        """The `k` inputs with the largest absolute score for one output, strongest first; NaN comes last.

        Raises:
            InputError: `k` is below 1, or there is no such output.
        """
        k = check_whole(k, "k", 1)
        row = self.scores[check_token(out_token, self.shape[0])]
        strength = row.abs().nan_to_num(nan=-1.0, posinf=torch.inf)
        order = strength.argsort(descending=True, stable=True)[:k].tolist()
        return [Top(j, self.in_tokens[j], float(row[j])) for j in order]

    def show(  # pyright: ignore[reportIncompatibleMethodOverride] -- it is asked about one output
        self, out_token: int | None = None, console: Console | None = None
    ) -> None:
        """Print the map to the terminal; `out_token` prints that row only."""
        chosen = self if out_token is None else self.row(out_token)
        show(chosen.view(), console)

    def view(self) -> MapView:
        """The plain data that `views` draw.

        Raises:
            InputError: `meta` has an invalid grid, image or positions; files may come from anywhere.
        """
        is_whole = self.meta.get("grid") is not None or "grouped" in self.meta
        groups = () if is_whole else find_words(self.in_tokens, self.meta)
        answer = answer_text(self.meta, *self.shape, _array(self.bias_share))
        aside = sink_columns(self.scores, self.meta)
        given = [(self.in_tokens[j], _array(self.scores[:, j])) for j in aside]
        return MapView(
            scores=_array(self.scores),
            out_tokens=self.out_tokens,
            in_tokens=self.in_tokens,
            title=title_of(self.method, self.meta, is_answer=answer is not None, n_out=self.shape[0]),
            bias_share=_array(self.bias_share),
            caption=caption_lines(self.method, self.meta, self.shape[0]),
            row_caption=row_caption_lines(self.meta, self.shape[0]),
            grid=self._grid(),
            image=self._image(),
            out_positions=self._out_positions(),
            signed=self.is_signed,
            set_aside=aside,
            words=groups if len(groups) < self.shape[1] else (),
            sums=sum_lines(_array(self.scores.double().sum(1)), _array(self.bias_share), self.meta, given),
            answer=answer,
            sink=sink_given(self.meta, self.shape[0]),
        )

    def save(self, path: str | Path) -> Path:
        """Write the map in the format of the suffix; the file appears whole or not at all.

        Args:
            path: .html (a page that works offline), .png .svg .pdf (a figure), .json .safetensors
                (come back with `load`), .csv (one line per pair of output and input).

        Returns:
            The path written.

        Raises:
            InputError: unknown suffix, or the folder does not exist.
            MissingExtraError: a figure without matplotlib.
        """
        return super().save(path)

    def _writers(self) -> Mapping[str, Writer]:
        def as_page(path: Path) -> None:
            path.write_text(page([self.view()], title=f"{self.method} token map"), encoding="utf-8")

        return {".html": as_page, **figure_writers(self.view), ".csv": self._write_csv, **super()._writers()}

    def _write_csv(self, path: Path) -> None:
        """One line per pair of output and input, for spreadsheets and data frames.

        A spreadsheet would run a label that begins like a formula, so such a label gets an apostrophe in front.
        """
        outs, ins = (
            [f"'{label}" if label.startswith(_FORMULA) else label for label in labels]
            for labels in (self.out_tokens, self.in_tokens)
        )
        with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["out_token", "out_text", "in_token", "in_text", "score"])
            for i, row in enumerate(self.scores.tolist()):
                writer.writerows((i, outs[i], j, ins[j], score) for j, score in enumerate(row))

    def _out_positions(self) -> tuple[int, ...] | None:
        positions: Any = self.meta.get("out_positions")
        is_known = is_by_output("out_positions", positions, self.shape[0]) and all(type(k) is int for k in positions)
        return tuple(positions) if is_known else None

    def _grid(self) -> PatchGrid | None:
        grid = self.meta.get("grid")
        names = ("rows", "columns", "first")
        if grid is None:
            return None
        if not isinstance(grid, dict) or grid.keys() != {*names} or not all(type(grid[name]) is int for name in names):
            raise InputError(f"Expected a grid of whole numbers {names}, got {grid!r:.80}. Save the map again.")
        return PatchGrid(**grid)

    def _image(self) -> str | None:
        image = self.meta.get("image")
        if image is not None and not isinstance(image, str):
            raise InputError(f"Expected an image as text, got {type(image).__name__}. Pass a base64 data URI.")
        return image


def _labels(name: str, labels: Any) -> tuple[str, ...]:
    are_plain = not isinstance(labels, str) and {*map(type, labels)} <= {str}
    if not are_plain and (isinstance(labels, str) or not all(isinstance(label, str) for label in labels)):
        raise InputError(f"Expected {name} to be a sequence of strings, got {labels!r:.80}. Pass one label per token.")
    return tuple(labels)


def _check_numbers(name: str, tensor: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        kind = getattr(tensor, "dtype", type(tensor).__name__)
        raise InputError(f"Expected {name} as a tensor of floats, got {kind}. Convert it with .float().")
    if tuple(tensor.shape) != shape:
        raise InputError(
            f"Expected {name} of shape {shape} to match out_tokens and in_tokens, got {tuple(tensor.shape)}. "
            "Pass one label for each row and each column."
        )


def _array(tensor: Tensor) -> Any:
    return tensor.to(torch.float64).numpy()


# What pictures set aside ----------------------------------------------------------------------------------------------


def sink_columns(scores: Tensor, meta: Mapping[str, Any]) -> tuple[int, ...]:
    """The inputs outside the colour scale: the requested ones, or a decoder's first token if it exceeds all others.

    The first token is an attention sink: its score says little, and hides the others.

    Args:
        scores: (out_token, in_token).
        meta: The map's `meta`: `set_aside` if it was chosen, `causal` if it is known.
    """
    n_out, n_in = scores.shape
    chosen = meta.get("set_aside")
    if isinstance(chosen, list):
        return tuple(j for j in chosen if type(j) is int and 0 <= j < n_in)
    if isinstance(meta.get("sink"), list):
        return tuple(k for k in meta["sink"] if type(k) is int and 0 <= k < n_in)
    is_by_token = meta.get("grid") is None and not meta.keys() & {"grouped", "sink_gives"}
    if n_out == 0 or n_in < 3 or not is_by_token or not _is_causal(scores, meta):
        return ()
    rows = (scores if n_out == 1 else scores[1:]).abs().nan_to_num(nan=0.0)
    drowned = rows[:, 0] > rows[:, 1:].amax(1)
    return (0,) if int(drowned.sum()) * 2 > len(rows) else ()


def _is_causal(scores: Tensor, meta: Mapping[str, Any]) -> bool:
    """Whether the map is causal: from `meta`, otherwise whether a square map is zero above its diagonal."""
    if isinstance(meta.get("causal"), bool):
        return meta["causal"]
    is_square = scores.shape[0] == scores.shape[1] > 1
    return is_square and not bool(torch.triu(scores, 1).nan_to_num(nan=1.0).any())
