"""The compatibility table as a page and as JSON."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.families.run import FamilyRecord
from tensorlens.__about__ import package_versions
from tensorlens.errors import InputError
from tensorlens.files import from_json, write_json, write_whole
from tensorlens.recording.rules.modules import ADAPTERS, KERNELS

_NOTES = """
Each row is a tiny model of that type with every parameter drawn at random, including biases and gains. It is recorded
at one input and certified; its weights stay bit-identical.

- *error*: the largest error of value, linearity away from the input, adjoint identity, completeness and composition:
  about 1e-7 if the model's own code computes parts in float32, otherwise 1e-15.
- *capture*: the operator under the Jacobian's rules, compared with finite differences of the model. A path missing
  from the operator shows as a difference of its size; up to 2e-2 is accepted.
- *B unexplained*: what remains of the bias when every additive parameter that a step reads is zero. It comes from
  constants in the model's code: running means of batch norms, clamps, the 1 in (u + 1) ⊙ φ(g), fixed positions,
  parameters that the model joins or interpolates before it adds them (`wavlm`, `yolos`), and values that it passes
  around its blocks (`swin2sr`).
- *conventions*: products of two live tensors that rest on a choice. If blank, the rules alone determine T.
- *not built*: with SDPA, usually an attention that transformers does not offer for this type.

Gated feed-forwards follow `Rules(gate=...)`. In recurrences these arguments are kept fixed, and the carried
values stay linear:

{roles}

Gates with φ(0) ≠ 0 (sigmoid, softplus, exp), routers and top-k choices are kept fixed. Expert outputs stay linear.
"""


STRANGERS = "## Models of other packages"
"""Heading of the last part of the page, which another script writes and which stays as it is."""


def write_table(records: Iterable[FamilyRecord], path: Path) -> None:
    """Write the records as JSON to `path` and as a page beside it, with the suffix ``.md``."""
    ordered = sorted(records, key=lambda record: (record.task, record.model_type, record.attention))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"versions": versions(), "records": [asdict(record) for record in ordered]})
    whole = path.with_suffix(".md")
    _, heading, strangers = whole.read_text("utf-8").partition(STRANGERS) if whole.exists() else ("", "", "")
    write_whole(whole, page(ordered) + (f"\n{heading}{strangers}" if heading else ""))


def read_table(path: Path) -> list[FamilyRecord]:
    """The records of a table written before; none if there is no file."""
    if not path.exists():
        return []
    try:
        records = from_json(path.read_bytes())["records"]
        return [FamilyRecord(**record | {"shape": tuple(record["shape"])}) for record in records]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"Expected a compatibility table in {str(path)!r}; got {type(error).__name__}: {error}. "
            "Name another file, or make the whole table anew."
        ) from error


def versions() -> dict[str, str]:
    """Versions of the packages that the table is about."""
    return {name: version for name, version in package_versions().items() if name != "tensorlens"}


def page(records: list[FamilyRecord]) -> str:
    """The table as Markdown."""
    by_task: dict[str, list[FamilyRecord]] = defaultdict(list)
    for record in records:
        by_task[record.task].append(record)
    named = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines = ["# Compatibility", "", f"Made by `python -m bench families` with {named}.", "", *_summary(by_task)]
    lines += [_NOTES.format(roles=_roles()), "## Adapters", "", *_adapters()]
    for task, of_task in by_task.items():
        lines += ["", f"## {task}", "", *_certified(of_task), "", *_others(of_task)]
    return "\n".join(lines) + "\n"


def _summary(by_task: dict[str, list[FamilyRecord]]) -> Iterator[str]:
    yield "| task | attention | certified | refused | not built |"
    yield "|---|---|---|---|---|"
    for task, records in by_task.items():
        for attention in sorted({record.attention for record in records}):
            counts = Counter(record.status for record in records if record.attention == attention)
            numbers = " | ".join(str(counts[status]) for status in ("certified", "refused", "not_built"))
            yield f"| {task} | {attention} | {numbers} |"


def _roles() -> str:
    held: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, arguments in KERNELS.items():
        held[arguments].append(name)
    return "\n".join(f"- `{'`, `'.join(names)}`: {', '.join(arguments)}." for arguments, names in held.items())


def _adapters() -> Iterator[str]:
    """How many lines each adapter has: adding a family needs nothing else."""
    names: dict[Callable[..., Any], list[str]] = defaultdict(list)
    for class_name, function in ADAPTERS.items():
        names[function].append(class_name.rsplit(".", 1)[-1])
    yield "| adapter for | lines |"
    yield "|---|---|"
    for function, classes in names.items():
        yield f"| {', '.join(classes)} | {len(inspect.getsourcelines(function)[0])} |"
    yield f"| {', '.join(KERNELS)} | 1 each |"


def _certified(records: list[FamilyRecord]) -> Iterator[str]:
    lines: dict[str, dict[str, FamilyRecord]] = defaultdict(dict)
    for record in records:
        if record.status == "certified":
            lines[record.model_type][record.attention] = record
    if not lines:
        return
    yield "| model type | attention | error | capture | B unexplained | shape of T | conventions |"
    yield "|---|---|---|---|---|---|---|"
    for model_type, found in lines.items():
        first = next(iter(found.values()))
        laws = [(law, error) for record in found.values() for law, error in record.errors.items()]
        error = max(error for law, error in laws if law != "capture")
        capture = max((f"{error:.0e}" for law, error in laws if law == "capture"), key=float, default="")
        conventions = "; ".join(f"{name}: {len(modules)} modules" for name, modules in first.conventions.items())
        shape = "×".join(map(str, first.shape))
        unexplained = f"{first.unexplained:.0e}" if first.unexplained is not None else ""
        numbers = f"{error:.0e} | {capture} | {unexplained} | {shape}"
        yield f"| {model_type} | {', '.join(found)} | {numbers} | {conventions} |"


def _others(records: list[FamilyRecord]) -> Iterator[str]:
    others = [record for record in records if record.status != "certified"]
    if not others:
        return
    yield "| model type | attention | status | reason |"
    yield "|---|---|---|---|"
    for record in others:
        reason = " ".join(record.reason.split()).replace("|", "\\|")[:220]
        yield f"| {record.model_type} | {record.attention} | {record.status.replace('_', ' ')} | {reason} |"
