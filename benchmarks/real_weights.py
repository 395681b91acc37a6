"""`python -m benchmarks.real_weights --data FOLDER`: small models with their real weights on real text, on the CPU.

FOLDER holds imdb/reviews.csv, as for the experiments. Works that are compared take turns, so that other work on the
machine hits them alike; the seconds are medians.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import tensorlens as tl
from benchmarks.__main__ import setting
from benchmarks.models import body_function
from benchmarks.paper_way import WAYS, patched
from benchmarks.parts import Rows, relative, spearman
from benchmarks.timing import interleaved
from tensorlens.operators.norms import frobenius_norms, sketched_norms


def reviews(data: Path, lens: Any, n_tokens: int, n: int) -> list[list[int]]:
    """Token ids of the first reviews that are long enough, cut to one length."""
    with (data / "imdb" / "reviews.csv").open(encoding="utf-8", newline="") as lines:
        texts = (row["review"].replace("<br />", " ") for row in csv.DictReader(lines))
        ids = (lens.processor(text, truncation=True, max_length=n_tokens)["input_ids"] for text in texts)
        long_enough = (one for one in ids if len(one) == n_tokens)
        return [next(long_enough) for _ in range(n)]


def slice_of_minilm(data: Path, rounds: int, n_tokens: int = 128) -> Rows:
    """T[i] against both Jacobian ways at several chunk sizes."""
    lens = tl.load("minilm", device="cpu")
    ids = reviews(data, lens, n_tokens, 1)[0]
    T, i = lens(ids), n_tokens - 1
    x, exact = T.input[None], T.rows(i)
    works: dict[str, Callable[[], Any]] = {"ours": lambda: T.rows(i)}
    with patched(lens.model):
        function = body_function(lens.model)
        for way, slice_ in WAYS.items():
            for chunk in (64, T.n_channels):
                works[f"{way}, {chunk}"] = lambda slice_=slice_, chunk=chunk: slice_(function, x, i, chunk)
        errors = {name: relative(work(), exact) for name, work in works.items()}
        times = interleaved(works, "cpu", rounds=rounds)
    best = min((name for name in times if name != "ours"), key=lambda name: times[name].seconds)
    row = {
        "work": "slice",
        "model": "minilm, real weights",
        "L": n_tokens,
        "precision": "float32",
        "ours": times["ours"].as_dict(),
        "jacobian": {"way": best, "error": errors[best], **times[best].as_dict()},
        "tried": {name: time.as_dict() for name, time in times.items()},
        "ratio": times[best].seconds / times["ours"].seconds,
        "ratio_of_fastest": times[best].fastest / times["ours"].fastest,
    }
    return [row]


# In+Class against other packages -------------------------------------------------------------------------------------


def in_class(data: Path, rounds: int, n_tokens: int = 64) -> Rows:
    """In+Class of one target: from token ids to scores, against `lxt` and captum's input × gradient."""
    lens = tl.load("smollm2-135m", device="cpu")
    ids = reviews(data, lens, n_tokens, 1)[0]
    target = lens(ids).predictions(1)[0].index
    model = lens.model

    def ours() -> Any:
        return lens(ids).map("tensor.in_class", out_token=-1, target=target).scores[0]

    def embedded() -> Any:
        return model.get_input_embeddings()(torch.tensor([ids])).detach().requires_grad_()

    def theirs() -> Any:
        x = embedded()
        with changed_by_lxt():
            model(inputs_embeds=x, use_cache=False).logits[0, -1, target].backward()
        return (x * x.grad).sum(-1)[0].detach()

    def captums() -> Any:
        from captum.attr import InputXGradient

        forward = lambda x: model(inputs_embeds=x, use_cache=False).logits[:, -1]  # noqa: E731
        return InputXGradient(forward).attribute(embedded(), target=target).sum(-1)[0].detach()

    model.requires_grad_(False)
    works: dict[str, Callable[[], Any]] = {"ours": ours, "lxt": theirs, "captum": captums}
    T = lens(ids)
    works["ours, map alone"] = lambda: T.map("tensor.in_class", out_token=-1, target=target).scores[0]
    scores = {name: work() for name, work in works.items()}
    times = interleaved(works, "cpu", rounds=rounds)
    return [
        {
            "work": "in_class",
            "model": "smollm2-135m, real weights",
            "L": n_tokens,
            "precision": "float32",
            "times": {name: time.as_dict() for name, time in times.items()},
            "ratio_to_lxt": times["lxt"].seconds / times["ours"].seconds,
            "ratio_to_captum": times["captum"].seconds / times["ours"].seconds,
            "difference_to_lxt": relative(scores["ours"], scores["lxt"]),
            "difference_to_captum": relative(scores["ours"], scores["captum"]),
        }
    ]


@contextmanager
def changed_by_lxt() -> Iterator[None]:
    """The classes of transformers as `lxt` changes them for CP-LRP, and as they were afterwards."""
    from transformers.models.llama import modeling_llama

    patches = _lxt_patches()
    owners = [modeling_llama, *(owner for owner in patches if isinstance(owner, type))]
    names = ("forward", "eager_attention_forward", "ALL_ATTENTION_FUNCTIONS")
    before = [(owner, name, vars(owner)[name]) for owner in owners for name in names if name in vars(owner)]
    try:
        for owner, patch in patches.items():
            patch(owner)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _lxt_patches() -> dict[Any, Callable[[Any], Any]]:
    """The package looks for a name that is gone, and imports torchvision for models that are not asked for here."""
    import transformers.pytorch_utils

    transformers.pytorch_utils.find_pruneable_heads_and_indices = None  # type: ignore[attr-defined]
    if "torchvision" not in sys.modules:
        models = types.ModuleType("torchvision.models")
        models.vision_transformer = types.ModuleType("vision_transformer")  # type: ignore[attr-defined]
        models.vision_transformer.nn = torch.nn  # type: ignore[attr-defined]
        sys.modules |= {"torchvision": types.ModuleType("torchvision"), "torchvision.models": models}
    from lxt.efficient.models.llama import cp_LRP  # type: ignore[import-not-found]

    return cp_LRP


# Sketches and precisions ---------------------------------------------------------------------------------------------


def sketches(
    data: Path, sizes: tuple[tuple[str, int, int], ...] = (("minilm", 128, 8), ("smollm2-135m", 48, 3))
) -> Rows:
    """Rank correlation of 16 probes with the exact norms, for the last output of some reviews."""
    rows = []
    for name, n_tokens, n in sizes:
        lens = tl.load(name, device="cpu")
        found = []
        for ids in reviews(data, lens, n_tokens, n):
            T = lens(ids).operator
            exact = frobenius_norms(T, (n_tokens - 1,))[0]
            sketch = sketched_norms(T, (n_tokens - 1,), 16)
            within = ((sketch.norms[0] - exact).abs() <= 2 * sketch.standard_error[0]).double().mean()
            found.append((spearman(sketch.norms[0], exact), relative(sketch.norms[0], exact), float(within)))
        ranks, errors, within = zip(*found, strict=True)
        rows.append(
            {
                "work": "sketch",
                "model": f"{name}, real weights",
                "L": n_tokens,
                "texts": n,
                "spearman": sorted(ranks),
                "relative_error": sum(errors) / n,
                "within_two_standard_errors": sum(within) / n,
            }
        )
        print(rows[-1], flush=True)
    return rows


def precisions(data: Path, sizes: tuple[tuple[str, int], ...] = (("minilm", 64), ("smollm2-135m", 16))) -> Rows:
    """Errors of slices and norms against float64, with everything from the recording on in float64."""
    rows = []
    for name, n_tokens in sizes:
        lens = tl.load(name, device="cpu")
        ids = reviews(data, lens, n_tokens, 1)[0]
        wide = tl.load(name, device="cpu", dtype="float64")(ids).operator
        exact, norms = wide.rows(n_tokens - 1), frobenius_norms(wide, (n_tokens - 1,))
        for precision in ("float32", "bfloat16"):
            T = lens(ids).with_precision(precision).operator
            rows.append(
                {
                    "work": "error",
                    "model": f"{name}, real weights",
                    "L": n_tokens,
                    "precision": precision,
                    "slice": relative(T.rows(n_tokens - 1), exact),
                    "norms": relative(frobenius_norms(T, (n_tokens - 1,)), norms),
                    "spearman": spearman(frobenius_norms(T, (n_tokens - 1,))[0], norms[0]),
                }
            )
            print(rows[-1], flush=True)
    return rows


PARTS: dict[str, Callable[[Path, int], Rows]] = {
    "minilm": slice_of_minilm,
    "in-class": in_class,
    "sketches-real": lambda data, _: sketches(data),
    "precisions-real": lambda data, _: precisions(data),
}


def main() -> None:
    """Run the parts named, all if none is."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_weights", description=__doc__)
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--data", type=Path, required=True, help="folder with imdb/reviews.csv")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.parts or PARTS:
        print(f"== {name}", flush=True)
        rows = PARTS[name](options.data, options.rounds)
        content = {"setting": setting("cpu"), "parts": {name: rows}}
        (options.out / f"cpu-{name}.json").write_text(json.dumps(content, indent=1))
        print(json.dumps(rows, indent=1), flush=True)


if __name__ == "__main__":
    main()
