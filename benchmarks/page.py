"""`python -m benchmarks.page`: docs/performance.md and its picture from the JSON in benchmarks/results.

Every number comes from the files; where two hold the same part, the one written by `benchmarks.tune` wins. Files named
after a device hold parts; answers.json, data_sets.json, perturbation.json and inside.json are what the scripts of those
names wrote.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.data_set_rows import data_set_rows
from benchmarks.perturbation_rows import HEADS, PERTURBATION, perturbation_rows
from benchmarks.scaling import PICTURE, draw

FOLDER = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"

INTRODUCTION = """\
# Performance

Ratios of medians measured in one run (works of seconds are timed once to three times), on real Hugging Face classes
with the named configuration, random weights unless it says otherwise. A ratio above 1 means that this library is
faster. "The Jacobian way" is the paper's: the model patched by hand, differentiated at the best chunk size found
(`torch.func.jacrev` and batched backward passes are both tried; for Pythia the latter alone), at the same precision.
Shares of the peak are counted operations over time, over the measured matrix-product peak; errors are relative, by the
Frobenius norm. `T.estimate("norm")` and its like say the cost of a computation before it is paid.

    python -m benchmarks.tune                                # a GPU: checks, chooses the constants, measures
    python -m benchmarks.real_weights --data FOLDER          # small models with real weights, on the CPU
    python -m benchmarks scaling                             # exponents over tokens, channels and blocks
    python -m benchmarks.answers --out FILE                  # a GPU: whole answers, in passes of the model
    python -m benchmarks.data_sets --out FILE                # a GPU: maps of a data set, long inputs
    python -m benchmarks.perturbation --model FOLDER         # a GPU: the perturbation study
    python -m benchmarks.inside                              # a GPU: components, pair maps, graphs; prints a table
    python -m benchmarks.page                                # this page
"""

FLOOR = """\
## What bounds it

A slice pulls D cotangents (rows of T[i] on their way from the output to the input) through every block. Folded, a
block's feed-forward, norms and residual are one D × D matrix P for each token. A block costs, for each token and
cotangent, 2·D² operations for P, 2·D² each for the output and the value projection and 2·L·D for attention; forming P
takes 2·D²·inner for each token, once for a slice and once for all outputs of a norm map. That is about 14·D³ for each
token and block of a slice (inner = 4·D), where a backward pass takes about 20·D³ and reads and writes every
intermediate besides. Queries and keys never appear, and in the last block only the asked output is carried. The floor
is the larger of operations over the measured matrix-product peak and bytes over the measured copy peak, each block's
cotangents read and written once and its weights read (counted for slices only). Peaks are the highest of all runs: a
product right after seconds of work is slower by a tenth or more, as the device gets warm.
"""

REMAINING = """\
## What remains

- A slice spends a third of its time on scaling W_up for each token (8.3 of 25 ms for BERT in bfloat16, by the profile
  in the JSON): torch's kernel for a product with a broadcast factor is bound by its index arithmetic and reaches a
  fifth of the copy peak in bfloat16, over a third in tf32. A kernel that scales at the speed of a copy would take 6 to
  7 of the 25 ms away. The matrix products themselves run at 69–89 % of the peak.
- A first sketch is bound by launching its many small kernels. Those of all blocks but the last are captured when a
  shape comes for the second time, and replayed as one graph for every output from then on. Of 1.6 ms in bfloat16 the
  kernels then take about 0.9; the rest is launching the last block, which depends on the output asked for, and the
  norms. How long that takes is up to the host: on other days machines of the same kind gave 15.9× to 19.7× in tf32 and
  13.4× to 18.2× in bfloat16, the exact slices being as fast as here. An earlier version and this one, one after the
  other on one machine: 17.7× and 17.3× in tf32, 13.8× and 16.8× in bfloat16; In+Out of all outputs 11.3 and 11.2 ms,
  6.8 and 6.8 ms.
- Attention is mixed by one strided product for each head, at 26–71 % of the copy peak; copying heads side by side
  first is two to eight times slower.
- GPT-2's norm map counts 49 % of BERT's operations and takes 57 % of its time: outputs go in groups of 16, each of
  which sees tokens up to its last, and P of all tokens is formed in any case.
"""


def main() -> None:
    """Write the page and the picture."""
    parts: dict[str, Any] = {}
    settings: dict[str, dict[str, Any]] = {}
    peaks: dict[str, float] = {}
    for path in sorted(FOLDER.glob("*-*.json"), key=lambda path: ("tune" in path.name, path.name)):
        content = json.loads(path.read_text())
        parts |= {name: rows for name, rows in content["parts"].items() if rows}
        settings[path.name.split("-")[0]] = content["setting"]
        for row in content["parts"].get("peaks", []):
            peaks |= {k: max(v, peaks.get(k, 0)) for k, v in row.items() if isinstance(v, float)}
    parts["slices"] = [*parts.get("slices", []), *parts.get("slices-large", [])]
    parts["long"] = [*parts.get("long", []), *parts.get("longest", [])]
    sections = [
        INTRODUCTION,
        _setting(settings, peaks),
        _slices(parts, peaks),
        _norms(parts, peaks),
        _sketches(parts),
        _long(parts),
        _answers(_read("answers")),
        _table("Maps of a data set", *data_set_rows(_read("data_sets"))),
        _long_maps(_read("data_sets")),
        _table("The perturbation study", HEADS, perturbation_rows(_read("perturbation")), PERTURBATION),
        _inside(_read("inside")),
        _in_class(parts),
        _errors(parts),
        FLOOR,
        _floors(parts, peaks),
        _steps(parts, peaks),
        _constants(parts),
        _scaling(parts),
        REMAINING,
    ]
    PAGE.write_text("\n".join(section for section in sections if section))


def _read(name: str) -> dict[str, Any]:
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _setting(settings: dict[str, dict[str, Any]], peaks: dict[str, float]) -> str:
    names = [name for name in ("float32", "tf32", "bfloat16") if name in peaks]
    rates = ", ".join(f"{name} {peaks[name] / 1e12:.0f} TFLOP/s" for name in names)
    lines = []
    for kind, setting in sorted(settings.items(), reverse=True):
        where = f"{setting['device']}, torch {setting['torch']}, transformers {setting['transformers']}"
        peak = (
            f". Measured peaks: {rates}, copies {peaks['copy'] / 1e12:.1f} TB/s" if kind == "cuda" else ", one thread"
        )
        lines.append(f"- {'GPU' if kind == 'cuda' else 'CPU'}: {where}{peak}.")
    return "\n".join(lines) + "\n"


def _table(title: str, heads: list[str], rows: list[list[str]], before: str = "") -> str:
    if not rows:
        return ""
    top = [
        f"## {title}",
        "",
        *([before, ""] if before else []),
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
    ]
    return "\n".join([*top, *("| " + " | ".join(row) + " |" for row in rows), ""])


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _spread(timing: dict[str, float]) -> str:
    return f"{_time(timing['seconds'])} ({_time(timing['fastest'])}–{_time(timing['slowest'])})"


def _slices(parts: dict[str, Any], peaks: dict[str, float]) -> str:
    rows = []
    for row in [*parts["slices"], *parts.get("minilm", [])]:
        once = row.get("first_call", {})
        first = [_time(once[step]) if step in once else "" for step in ("slice", "recording")]
        peak = f"{row['rate'] / peaks[row['precision']]:.0%}" if "rate" in row and row["precision"] in peaks else ""
        rows.append(
            [
                row["model"] + (", CPU" if "real" in row["model"] else ""),
                row["precision"],
                _spread(row["ours"]),
                *first,
                _time(row["jacobian"]["seconds"]),
                f"**{row['ratio']:.2f}×**",
                peak,
                f"{row['error']:.0e}" if "error" in row else "",
            ]
        )
    heads = [
        "model",
        "precision",
        "T[i] (fastest–slowest)",
        "first T[i]",
        "recording",
        "Jacobian way",
        "ratio",
        "share of peak",
        "error to float32",
    ]
    before = (
        "T[i] is of an input that is recorded and folded, as every slice after the first; the first one also folds the "
        "blocks. The recording comes before both, once for each input; the Jacobian way has its forward pass inside. "
        "Recording and first slice are by a new lens, which finds the model's parts first and takes twice as long: by "
        "one that knows BERT, a whole In+Out map takes 38 to 66 ms with its recording, by the machine of the day (see "
        "*What trust costs*)."
    )
    return _table("One slice T[i], 128 tokens", heads, rows, before)


def _norms(parts: dict[str, Any], peaks: dict[str, float]) -> str:
    rows = [
        [
            row["model"],
            row["precision"],
            _spread(row["ours"]),
            _time(row["jacobian"]["seconds"] * row["L"]),
            f"**{row['ratio']:.1f}×**",
            f"{row['rate'] / peaks[row['precision']]:.0%}",
            f"{row['error']:.0e}",
        ]
        for row in parts.get("norms", [])
    ]
    heads = [
        "model",
        "precision",
        "norm map",
        "Jacobian way (one slice × 128)",
        "ratio",
        "share of peak",
        "error to float32",
    ]
    seconds = {(row["model"], row["precision"]): row["ours"]["seconds"] for row in parts.get("norms", [])}
    faster = [
        f"{seconds['bert-base', precision] / seconds['gpt2-small', precision]:.2f}× in {precision}"
        for model, precision in seconds
        if model == "bert-base" and ("gpt2-small", precision) in seconds
    ]
    table = _table("The exact 128 × 128 norm map", heads, rows)
    note = "GPT-2 does little work above the diagonal: against BERT, which has the same shape, it is faster by "
    return f"{table}\n{note}{', '.join(faster)}.\n" if faster else table


def _sketches(parts: dict[str, Any]) -> str:
    rows = [
        [
            row["model"],
            row["precision"],
            _spread(row["ours"]),
            f"**{row['ratio']:.1f}×**",
            f"{row['spearman']:.3f}",
            _time(row["in_out_all"]["seconds"]),
            f"{row['in_out_share']:.4f}×" if "in_out_share" in row else "",
        ]
        for row in parts.get("sketches", [])
    ]
    heads = [
        "model",
        "precision",
        "16 probes, one output",
        "faster than the exact slice",
        "rank correlation",
        "In+Out, all outputs",
        "part of the Jacobian way's time",
    ]
    first = _table("The sketched norm, and In+Out of all outputs", heads, rows)
    real = [
        [
            row["model"],
            str(row["L"]),
            str(row["texts"]),
            f"{row['spearman'][0]:.3f}",
            f"{row['spearman'][len(row['spearman']) // 2]:.3f}",
            f"{row['relative_error']:.1%}",
            f"{row['within_two_standard_errors']:.0%}",
        ]
        for row in parts.get("sketches-real", [])
    ]
    heads = ["model", "tokens", "reviews", "lowest rank correlation", "median", "error", "within two standard errors"]
    return first + "\n" + _table("Sketches on real text: 16 probes against the exact norms", heads, real)


def _long(parts: dict[str, Any]) -> str:
    rows = []
    for row in parts.get("long", []):
        if "failed" in row:
            rows.append([f"{row['L']:,}", "does not fit", "", "", ""])
            continue
        against = (f"{row['ratio_time']:.2f}×", f"{row['ratio_memory']:.2f}×") if "ratio_time" in row else ("", "")
        memory = f"{row['ours']['extra_bytes'] / 2**30:.1f} GiB" if row["ours"].get("extra_bytes") else ""
        rows.append([f"{row['L']:,}", _time(row["ours"]["seconds"]), memory, *against])
    heads = [
        "tokens",
        "In+Out, one output",
        "memory beside the weights",
        "time, of a forward and backward pass",
        "memory, of the same",
    ]
    before = "From token ids to scores. Graphs of blocks are kept while memory lasts: a long input takes what is there."
    return _table("Long inputs: Llama-8B configuration, bfloat16", heads, rows, before)


def _answers(found: dict[str, Any]) -> str:
    if not found:
        return ""
    rows = [
        [
            name,
            row["engine"],
            _spread(row),
            f"**{row['passes']:.1f}**",
            f"{row['bar']:.0f}",
            f"{row['extra_bytes'] / 2**30:.1f} GiB",
            f"{row['error']:.0e}",
        ]
        for name, row in found["rows"].items()
    ]
    plain = found["plain"]
    before = (
        f"{found['device']}, Llama-8B's shape, random weights, bfloat16: {found['prompt']:,} tokens of prompt in 20 "
        f"passages and {found['answer']} of an answer in 10 sentences, from token ids to the map. A forward pass of "
        f"the model left to itself takes {_spread(plain['forward'])}, forward and backward "
        f"{_spread(plain['forward and backward'])}, the recording {_spread(found['recording'])}. The first row is "
        "counted in forward and backward passes, the second in forward passes; the bar was set before. One run, each "
        "work timed three times. The error is of a row's sum against its target, of the largest target."
    )
    heads = ["map", "by", "time", "plain passes", "bar", "memory beside the weights", "error of sums"]
    return _table("Whole answers", heads, rows, before)


def _long_maps(found: dict[str, Any]) -> str:
    runs = [run["long"] for run in found.get("runs", []) if "long" in run]
    names = list(dict.fromkeys(name for run in runs[::-1] for name in run))
    rows = [
        [name, ", ".join(_time(run[name]) if "seconds" in name else f"{run[name]:.2f}×" for run in runs if name in run)]
        for name in names
    ]
    before = (
        "Llama-8B's shape, bfloat16, 8,192 tokens, over plain passes of the same run; where there are two numbers they "
        "are of two runs. The first push of an input is dearer than those after it; a further output is one backward "
        "pass."
    )
    return _table("In+Class and pushes of a long input", ["work", "measured"], rows, before)


def _inside(found: dict[str, Any]) -> str:
    if not found:
        return ""
    seconds = found["seconds"]
    rows = [[name, _time(one)] for name, one in seconds.items()]
    ids, recorded = (
        seconds[f"components, 128 tokens, {when}"] / seconds[f"map, 128 tokens, {when}"]
        for when in ("from ids", "recorded")
    )
    before = (
        f"{found['device']}, SmolLM2's shape, random weights, float32; medians of one run, whose spread was "
        "not kept. A recorded input has its recording behind it. All components of a target take "
        f"{ids:.1f} times a map of it from ids, and {recorded:.1f} times once it is recorded."
    )
    return _table("Components, pair maps, graphs", ["work", "time"], rows, before)


def _in_class(parts: dict[str, Any]) -> str:
    rows = []
    for row in parts.get("in-class", []):
        times = {name: _spread(timing) for name, timing in row["times"].items()}
        rows += [
            ["this library, from token ids to scores", times["ours"], ""],
            ["this library, another map of the same input", times["ours, map alone"], ""],
            ["`lxt` (CP-LRP)", times["lxt"], f"{row['difference_to_lxt']:.0e}"],
            ["captum, input × gradient", times["captum"], "another quantity"],
        ]
    before = (
        "One target, 64 tokens of a review, one thread of a CPU. A first map pays for the recording and a backward "
        "pass through its graph; a further one for a backward pass through the graph that was kept."
    )
    heads = ["In+Class, SmolLM2-135M with its real weights", "time", "difference to ours"]
    return _table("In+Class", heads, rows, before)


def _errors(parts: dict[str, Any]) -> str:
    rows = [
        [row["model"], row["precision"], f"{row['slice']:.0e}", f"{row['norms']:.0e}"]
        for row in [*parts.get("precisions-real", []), *parts.get("errors", [])]
    ]
    return _table("Errors against float64", ["model", "precision", "slice", "norms of a row"], rows)


def _floors(parts: dict[str, Any], peaks: dict[str, float]) -> str:
    rows = []
    for row in [*parts["slices"], *parts.get("norms", [])]:
        if row["precision"] not in peaks:
            continue
        arithmetic, moved = row["flops"] / peaks[row["precision"]], row.get("bytes", 0) / peaks["copy"]
        rows.append(
            [
                f"{row['work']}, {row['model']}",
                row["precision"],
                f"{row['flops'] / 1e12:.3g} TFLOP = {_time(arithmetic)}",
                f"{row['bytes'] / 1e9:.3g} GB = {_time(moved)}" if moved else "",
                _time(row["ours"]["seconds"]),
                f"{row['ours']['seconds'] / max(arithmetic, moved):.2f}×",
            ]
        )
    heads = ["work", "precision", "operations", "bytes", "measured", "over the floor"]
    return _table("Floors", heads, rows).removeprefix("## Floors\n\n")


NOT_TAKEN = ("side by side", "channels first")
"""Ways that were tried and are slower; their times stay in the JSON."""


def _steps(parts: dict[str, Any], peaks: dict[str, float]) -> str:
    rows, then = [], parts["peaks"][0]  # shares were taken of the peaks of the same run
    taken = [row for row in parts.get("steps", []) if "error" not in row and not row["piece"].endswith(NOT_TAKEN)]
    for row in taken:
        kinds = {"share_of_peak": row["precision"], "share_of_copy": "copy"}
        shares = [f"{row[share] * then[k] / peaks[k]:.0%}" if row[share] else "" for share, k in kinds.items()]
        n = f"{row['shape']['n_cotangents']:,}"
        rows.append([row["piece"], row["precision"], n, _time(row["seconds"]), *shares])
    heads = ["step of a block of BERT's shape", "precision", "cotangents", "time", "share of peak", "share of copies"]
    return _table("Where the time goes", heads, rows)


def _constants(parts: dict[str, Any]) -> str:
    rows = []
    for row in parts.get("constants", []):
        for value, times in row["tried"].items():
            chosen = " (fastest)" if value == str(row["chosen"]) else ""
            rows.append([f"`{row['name']}`", value + chosen, ", ".join(f"{k} {_time(v)}" for k, v in times.items())])
    before = (
        "What the code ships is the fastest of most runs; `BYTES_OF_SCALED` stays at half a gigabyte, where the time has "
        "levelled off. See `program/folding.py` and `operators/operator.py` for what each of them does."
    )
    return _table("Constants, by measurement", ["constant", "value", "time"], rows, before)


def _scaling(parts: dict[str, Any]) -> str:
    found = parts.get("scaling", [])
    if not found:
        return ""
    draw(found)
    rows = [
        [
            row["work"].split()[-1],
            row["axis"].replace("N", "N - 1"),
            f"**{row['exponent']:.2f}**",
            ", ".join(f"{x}: {_time(seconds)}" for x, seconds in row["points"]),
        ]
        for row in found
    ]
    base = found[0]["base"]
    before = (
        f"BERT's block with inner width 4·D on one thread of a CPU; the sizes not varied are L = {base['L']}, "
        f"D = {base['D']} and {base['N'] + 1} blocks. Expected of a slice: 1 in L (attention's share is small), 3 in "
        "D for large D, 1 in the blocks before the last.\n\n"
        f"![Seconds over tokens, channels and blocks](assets/{PICTURE.name})"
    )
    return _table("Scaling", ["work", "over", "exponent", "times"], rows, before)


if __name__ == "__main__":
    main()
