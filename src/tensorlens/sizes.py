r"""The cost of a model before its weights are there: memory and time from its config alone.

Cost is affine in the number of blocks: $c(N) = c_0 + N c_1$. A model with the config's shape, random weights and few
blocks is built on the device, and each task is run on it for two numbers of blocks, which gives $c_0$ and $c_1$. So
kernels, waiting times and types are those of the device at hand, for any architecture.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch

from tensorlens.errors import InputError, check_whole
from tensorlens.lens import Lens
from tensorlens.memory import chosen_device
from tensorlens.models.loading import chosen_dtype, model_class_of, read_config
from tensorlens.recording.recording import Recording
from tensorlens.views.printing import text_as_html

REPEATS = 3
"""Minimum number of timings of a task; the median counts."""

ENOUGH = 0.5
"""Seconds after which a short task is not timed again: passes of milliseconds wait for Python, and vary."""

LONG = 2.0
"""Seconds after which a task is not repeated."""


class Cost(NamedTuple):
    """A task, its approximate seconds, and the memory it needs beside the weights.

    Memory is None for slices, norms and data sets: they are cut into pieces that fit the free memory.
    """

    work: str
    seconds: float
    n_bytes: int | None


class Sizes(NamedTuple):
    """The cost of a model on a device.

    Attributes:
        model: Its name.
        device: The device of the test.
        dtype: Type of the weights.
        n_tokens: Tokens of the input.
        n_parameters: Number of parameters of the whole model.
        weight_bytes: Size of its weights.
        costs: By task.
    """

    model: str
    device: str
    dtype: str
    n_tokens: int
    n_parameters: int
    weight_bytes: int
    costs: tuple[Cost, ...]

    def __str__(self) -> str:
        first = f"{self.model}: {self.n_parameters / 1e6:,.0f} million parameters"
        lines = [f"{first}, {_gib(self.weight_bytes)} of {self.dtype}; {self.n_tokens} tokens on {self.device}"]
        width = max(len(cost.work) for cost in self.costs)
        lines += [f"  {c.work:<{width}}  {_seconds(c.seconds):>8}  {_gib(c.n_bytes):>12}" for c in self.costs]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return text_as_html(str(self))


def size(
    model: Any,
    *,
    n_tokens: int = 128,
    device: str | None = None,
    dtype: str | None = None,
    slices: bool = True,
    **reading: Any,
) -> Sizes:
    """Memory and time of the usual tasks, from a model's config alone.

    Args:
        model: A folder or hub id whose config can be read, a bundled model, or a config of transformers.
        n_tokens: Tokens of the input.
        device: The device to test on; the accelerator if there is one.
        dtype: Type of the weights; float32 if None.
        slices: Whether to test slices and norms, which take as many pulls as there are channels.
        **reading: `trust_remote_code` and `revision`, as for `load`.

    Raises:
        InputError: The model does not take token ids, or has no number of blocks.
    """
    config = read_config(model, **reading) if isinstance(model, str) else model
    name = model if isinstance(model, str) else type(model).__name__
    n_tokens = check_whole(n_tokens, "n_tokens", 2)
    kind, where = chosen_dtype(dtype), chosen_device(device)
    if not isinstance(kind, torch.dtype):  # "auto"
        kind = getattr(config, "dtype", None) or torch.float32
    n_blocks = getattr(config, "num_hidden_layers", None)
    if not isinstance(n_blocks, int) or not hasattr(config, "vocab_size"):
        raise InputError(f"`size` needs a config of a text model with a number of blocks; {name} has none.")
    with torch.device("meta"):
        whole = model_class_of(config)._from_config(config, dtype=kind)
    n_parameters = sum(one.numel() for one in whole.parameters())
    few = _few(config, n_blocks)
    tried = [costs_of(_with_blocks(config, k), kind, where, n_tokens, slices=slices) for k in few]

    def line(a: float, b: float) -> float:
        """By the line through two numbers of blocks."""
        return max(b, a + (b - a) / max(1, few[1] - few[0]) * (n_blocks - few[0]))

    costs = tuple(
        Cost(a.work, line(a.seconds, b.seconds), None if a.n_bytes is None else int(line(a.n_bytes, b.n_bytes)))
        for a, b in zip(*tried, strict=True)
    )
    label = torch.cuda.get_device_name(where) if where.type == "cuda" else str(where)
    return Sizes(
        name, label, str(kind).removeprefix("torch."), n_tokens, n_parameters, n_parameters * kind.itemsize, costs
    )


def _few(config: Any, n_blocks: int) -> tuple[int, int]:
    """Two numbers of blocks with every kind of block in the same proportions."""
    kinds = list(getattr(config, "layer_types", None) or [])
    period = next((p for p in range(1, 9) if len(kinds) > p and kinds[: 2 * p] == kinds[:p] * 2), 1)
    return min(2 * period, n_blocks), min(6 * period, n_blocks)


def _with_blocks(config: Any, n_blocks: int) -> Any:
    small = copy.deepcopy(config)
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:n_blocks]
    small.num_hidden_layers = n_blocks
    return small


def costs_of(
    config: Any, dtype: torch.dtype, device: torch.device, n_tokens: int, *, slices: bool = True
) -> list[Cost]:
    """The measured cost of each task on a model of a config with random weights: one warm-up, then timings.

    Args:
        config: The config, with its number of blocks.
        dtype: Type of the weights.
        device: Where it runs.
        n_tokens: Tokens of the input.
        slices: Whether to test slices and norms.
    """
    with torch.device(device):
        model = model_class_of(config)._from_config(config, dtype=dtype).eval()
    lens, ids = Lens(model), torch.arange(n_tokens).remainder(config.vocab_size - 1).add(1).tolist()
    T = lens(ids)
    method = "tensor.in_out" if T.context.classes is None else "tensor.in_class"
    out_token = None if T.operator.recording.pools else -1

    def forward() -> None:
        with torch.no_grad():
            model(torch.tensor([ids], device=device))

    def one_map() -> Recording:
        made = lens(ids)
        made.map(method, out_token)
        return made.operator.recording

    works: dict[str, Callable[[], Any]] = {"forward pass": forward, "map, from token ids": one_map}
    if slices:
        works["one slice of T, all channels of one output"] = lambda: T.rows(-1)
        works["norms of one output"] = lambda: T.map("tensor.norm", -1)
    works["data set, per sample"] = lambda: list(lens.maps([ids] * 8, method, batch_size=8, progress=False))
    *costs, of_eight = [_cost(name, work, device) for name, work in works.items()]
    cut_to_fit = [*costs[2:], of_eight._replace(seconds=of_eight.seconds / 8)]
    return costs[:2] + [cost._replace(n_bytes=None) for cost in cut_to_fit]


def _cost(name: str, work: Callable[[], Any], device: torch.device) -> Cost:
    """The median time, and the peak of memory; without an accelerator, the size of a recording."""
    on_gpu, times, result = device.type == "cuda", list[float](), None
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    while not times or (times[0] < LONG and (len(times) <= REPEATS or sum(times[1:]) < ENOUGH)):  # one warms up
        start = time.perf_counter()
        result = work()
        if on_gpu:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    used = torch.cuda.max_memory_allocated(device) - before if on_gpu else 0
    if isinstance(result, Recording) and not on_gpu:
        used = result.program.held_bytes + sum(state.nbytes for state in result.states)
    return Cost(name, median(times[1:] or times), used)


def _gib(n_bytes: int | None) -> str:
    if n_bytes is None:
        return "what is free"
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**27 else f"{n_bytes / 2**20:.1f} MiB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
