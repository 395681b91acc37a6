"""Every published number, computed again from the raw records by code that shares nothing with the project."""

from __future__ import annotations

import gzip
import json
import math
import re
from pathlib import Path

import pytest

import tensorlens as tl

ROOT = Path(__file__).parents[2]
PAGES = {name: (ROOT / "docs" / name).read_text("utf-8") for name in ("leaderboard.md", "what-to-use.md")}
FILES = sorted((ROOT / "bench" / "records").glob("*.jsonl.gz"))
PACKAGES = ("lxt.", "captum.", "inseq.", "flashtrace", "context_cite", "transformer_lens")


def lines_of(path):
    about, *lines = map(json.loads, gzip.decompress(path.read_bytes()).splitlines())
    return about, lines


def expected(judge, scores, truth):
    """Top 1, reciprocal rank or correlation, by enumeration of ties where there are few, else by formula."""
    scores = [float("-inf") if one is None else one for one in scores]
    n = len(scores)
    if judge == "patching":
        a, b = [x - sum(scores) / n for x in scores], [y - sum(truth) / n for y in truth]
        size = (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5
        return sum(x * y for x, y in zip(a, b, strict=True)) / size if size else 0.0
    if judge in ("context", "reactions"):
        pairs = [
            (a, b) for a, x in zip(scores, truth, strict=True) for b, y in zip(scores, truth, strict=True) if x > y
        ]
        return sum((a > b) + (a == b) / 2 for a, b in pairs) / len(pairs)
    if judge == "injections":
        n, level = math.ceil(0.2 * len(scores)), sorted(scores)[-math.ceil(0.2 * len(scores))]
        high = sum(t for x, t in zip(scores, truth, strict=True) if x > level)
        tied = [t for x, t in zip(scores, truth, strict=True) if x == level]
        return (high + (n - sum(x > level for x in scores)) * sum(tied) / len(tied)) / sum(truth)
    if judge in ("documents", "needles"):
        best = [k for k in range(n) if scores[k] == max(scores)]
        return sum(truth[k] > 0 for k in best) / len(best)
    top = max(scores[k] for k in range(n) if truth[k] > 0)
    before = sum(one > top for one in scores)
    tied = [truth[k] > 0 for k in range(n) if scores[k] == top]
    return mean_over_orders(tied, before)


def mean_over_orders(tied, before):
    """Mean of 1/rank of the first right one, over all orders of those on a level, one place after the other."""
    right, total, place, alive, value = sum(tied), len(tied), before + 1, 1.0, 0.0
    while alive > 1e-15:
        value += alive * right / total / place
        alive *= 1 - right / total
        total, place = total - 1, place + 1
        if total < right or total == 0:
            break
    return value


def halves(judge, lines):
    names = [
        "anaphor_gender",
        "anaphor_number",
        "animate",
        "determiner_noun_agreement_1",
        "determiner_noun_agreement_irr",
        "determiner_noun_agreement_with_adj_irr",
        "determiner_noun_agreement_with_adjective",
        "distractor_agreement_relational",
        "distractor_agreement_relative",
        "ioi",
        "irregular",
        "npi",
        "regular",
    ]
    found = ({}, {})
    for line in lines:
        numbers = [part for part in line["item"].split(":")[1:] if part]
        number = [line["set"].startswith(name) for name in names].index(True) if judge == "evidence" else numbers[0]
        half = int(number) % 2
        for method, scores in line["scores"].items():
            value = expected(judge, scores, line["truth"])
            found[half].setdefault(method, {}).setdefault(line["set"], []).append(value)
    return found


def mean_of_means(sets):
    return sum(sum(some) / len(some) for some in sets.values()) / len(sets)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.partition(".")[0])
def test_every_cell_of_the_leaderboard(path):
    about, lines = lines_of(path)
    judge = lines[0]["judge"]
    page = PAGES["leaderboard.md"]
    start = page.index(f"**{judge}, {about['model']}**")
    table = page[start : page.find("<!-- /records -->", start)]
    following = table.find("\n**", 3)
    table = table[:following] if following > 0 else table
    named = re.findall(r"^\| \*{0,2}(.+?)\*{0,2}(?: \((\d+) items\))? \| (.* \| .*) \|$", table, re.MULTILINE)
    cells, sizes = {name: some for name, _, some in named}, {name: int(size) for name, size, _ in named if size}
    chosen, reported = halves(judge, lines)
    n_all = max(sum(map(len, sets.values())) for sets in reported.values())
    for method in chosen:
        n = sum(map(len, reported[method].values()))
        assert n == sizes.get(method, n_all) and (n == n_all or method.startswith(PACKAGES))
        first, second = cells[method].split(" | ")
        value, *bounds = map(float, re.findall(r"-?\d\.\d+", second))
        assert float(first) == pytest.approx(mean_of_means(chosen[method]), abs=6e-4)
        assert value == pytest.approx(mean_of_means(reported[method]), abs=6e-4)
        # The interval of a mean of means of sets, by the normal approximation; none of few items that are all the same.
        sets = list(reported[method].values())
        few = min(map(len, sets))
        error = sum(_variance(some) / len(some) for some in sets) ** 0.5 / len(sets)
        if len(sets) > 1 and few < 5:  # sets are drawn too
            error = (error**2 + _variance([sum(some) / len(some) for some in sets]) / len(sets)) ** 0.5
        low, high = bounds or (value, value)
        assert bounds or (sum(map(len, sets)) < 5 and error == 0)
        assert low <= value <= high and high - low == pytest.approx(
            2 * 1.96 * error, rel=0.25, abs=0.03 if few > 4 else 0.15
        )
    assert len(chosen) == len(cells) - len([name for name in cells if name in ("method", "---", "chance")])


def _variance(some):
    mean = sum(some) / len(some)
    return sum((one - mean) ** 2 for one in some) / len(some)


def test_packages_are_compared_on_the_items_that_they_were_asked_about():
    page, n = PAGES["what-to-use.md"], 0
    for path in FILES:
        about, lines = lines_of(path)
        judge, names = (
            lines[0]["judge"],
            {name for line in lines for name in line["scores"] if name.startswith(PACKAGES)},
        )
        row = re.search(rf"^\| {judge}, {re.escape(about['model'])} \| (.*) \|$", page, re.MULTILINE)
        if not names or row is None:
            continue
        ours = re.findall(r"^Chosen: \*\*(.+?)\*\*", page[: row.start()], re.MULTILINE)[-1]
        gaps, is_same = {}, re.search(rf"Chosen: \*\*{re.escape(ours)}\*\*, .*; (.*) computes? the same map\.", page)
        for name in names:
            pairs = [(line["scores"][ours], line["scores"][name]) for line in lines if name in line["scores"]]
            apart = max(abs(x - y) / max(map(abs, a)) for a, b in pairs for x, y in zip(a, b, strict=True))
            assert (is_same is not None and name in is_same[1].split(", ")) == (apart < 1e-3)
            if apart < 1e-3:
                continue
            _, reported = halves(judge, [line for line in lines if name in line["scores"]])
            if name in reported:
                gaps[name] = mean_of_means(reported[ours]) - mean_of_means(reported[name])
        if not gaps:  # every package computes the same map
            assert len(row[1].split(" | ")) == 3
            continue
        said = re.match(r"(\S+)(?: \(\d+ items\))? \d\.\d+: ([+-]\d\.\d+)", row[1].split(" | ")[2])
        assert said is not None and gaps[said[1]] == min(gaps.values())
        assert float(said[2]) == pytest.approx(gaps[said[1]], abs=6e-4)
        n += 1
    assert n >= 2


def test_whether_a_choice_is_confirmed_is_what_its_rows_say():
    tables = re.findall(
        r"^Chosen: \*\*.*?\*\*, (.*?)\.\n\n(.*?)\n\n", PAGES["what-to-use.md"], re.MULTILINE | re.DOTALL
    )
    assert len(tables) == 8
    for said, table in tables:
        n_rivals = 2 if "best package" in table.splitlines()[0] else 1
        above = behind = n = 0
        for row in table.splitlines()[2:]:
            if "[" not in row.split(" | ")[1]:
                continue  # too few items for an interval
            rivals = [one for one in row.split(" | ")[2 : 2 + n_rivals] if one != "–"]
            ends = [tuple(map(float, re.findall(r"[+-]\d\.\d+", one)[-2:])) for one in rivals]
            above += bool(ends) and all(low > 0 for low, _ in ends)
            behind += any(high < 0 for _, high in ends)
            n += bool(ends)
        expected = f"clearly above its best rivals in {above} of {n} runs, clearly behind any in {behind}"
        assert said.partition("; ")[0] == (expected if n else "no baseline is known")


CIRCUITS = sorted((ROOT / "bench" / "records" / "circuits").glob("*.jsonl.gz"))


def areas(lines, order, way):
    """CPR and CMD of each pair, by the rule of trapezoids."""
    for line in lines:
        if way in line["f"].get(order, {}):
            f, shares = line["f"][order][way], line["shares"]
            steps = [(b - a, k) for k, (a, b) in enumerate(zip(shares, shares[1:], strict=False))]
            rest = [abs(1 - one) for one in f]
            yield tuple(sum(width * (some[k] + some[k + 1]) / 2 for width, k in steps) for some in (f, rest))


@pytest.mark.parametrize("path", CIRCUITS, ids=lambda path: path.name.partition(".")[0])
def test_every_area_of_circuits(path):
    about, lines = lines_of(path)
    page, n_cells = (ROOT / "docs" / "how-to" / "circuits.md").read_text("utf-8"), 0
    for order in ("magnitude", "signed"):
        block = page.partition(f"<!-- records: circuits {order} -->")[2].partition("<!-- /records -->")[0]
        table = block.partition(f"**{about['model']}**")[2].partition("\n**")[0]
        head, *rows = [
            [cell.strip("` ") for cell in row.strip("|").split("|")] for row in table.split("\n") if row[:1] == "|"
        ] or [[]]
        known = {way for line in lines for way in line["f"].get(order, {})}
        assert {row[0] for row in rows[1:]} == known
        for row in rows[1:]:
            for name, cell in zip(head[1:], row[1:], strict=True):
                some = [line for line in lines if line["set"].replace("_", "-") in name]
                found = [pair["CMD" in name] for pair in areas(some, order, row[0])]
                value, *ends = map(float, re.findall(r"-?\d\.\d+", cell))
                assert value == pytest.approx(sum(found) / len(found), abs=6e-4) and f"({len(found)} pair" in name
                assert len(ends) == (0 if len(found) == 1 else 2)
                assert all(min(found) - 6e-4 <= end <= max(found) + 6e-4 for end in ends)
                n_cells += 1
    assert n_cells >= 7 * 2


def test_no_rule_set_is_clearly_better_for_circuits_than_the_recommended_one():
    page, ours = (ROOT / "docs" / "how-to" / "circuits.md").read_text("utf-8"), tl.recommended("component").rules.name
    found = {}
    for path in CIRCUITS:
        _, lines = lines_of(path)
        for way in lines[0]["f"]["magnitude"]:
            found.setdefault(way, []).extend(cmd for _, cmd in areas(lines, "magnitude", way))
    n_pairs = len(found[ours])
    assert f"CMD, all {n_pairs} pairs" in page and n_pairs >= 10
    for way, values in found.items():
        row = re.search(rf"^\| `?{way}`? \| (\d\.\d+) \| (.+?) \|$", page, re.MULTILINE)
        assert row is not None and float(row[1]) == pytest.approx(sum(values) / n_pairs, abs=6e-4)
        if way != ours:
            apart = [a - b for a, b in zip(values, found[ours], strict=True)]
            value, low, high = map(float, re.findall(r"[-+]\d\.\d+", row[2]))
            assert value == pytest.approx(sum(apart) / n_pairs, abs=6e-4) and low <= value <= high
            error = (_variance(apart) / n_pairs) ** 0.5
            assert high - low == pytest.approx(2 * 1.96 * error, rel=0.25, abs=0.01)
            assert high >= 0 or way == "integrated gradients", "a clearly better rule set would be recommended"


def test_nothing_is_published_without_records():
    known = {(lines_of(path)[1][0]["judge"], lines_of(path)[0]["model"]) for path in FILES}
    for page in PAGES.values():
        assert {tuple(one.split(", ")) for one in re.findall(r"^\*\*(\w+, [\w.-]+)\*\*", page, re.MULTILINE)} <= known
    used = re.findall(r"^\| (\w+), ([\w.-]+) \|", PAGES["what-to-use.md"], re.MULTILINE)
    assert set(used) == known
    outside = re.sub(r"<!-- records: .*?<!-- /records -->", "", PAGES["leaderboard.md"], flags=re.DOTALL)
    assert not re.search(r"(?<!\d)\d\.\d\d", outside)


def test_pages_hold_what_the_command_prints():
    from bench.published import block

    for page in PAGES.values():
        for key, there in re.findall(r"<!-- records: (.+?) -->\n(.*?)<!-- /records -->", page, re.DOTALL):
            made = block(key)
            assert there.strip() == (made or "").strip(), f"run python -m bench tables --write ({key})"


def test_reasons_say_what_the_records_say():
    import tensorlens as tl

    by_name = {path.name.removesuffix(".jsonl.gz"): halves(*_judged(path))[1] for path in FILES}

    def value(name, method):
        return mean_of_means(by_name[name][method])

    word, passage, component = (tl.recommended(one).because for one in ("word", "passage", "component"))
    gains = []
    for name in (one for one in by_name if one.startswith("evidence-")):
        baselines = [value(name, one) for one in by_name[name] if not one.startswith(("tensor.", *PACKAGES))]
        gains.append(value(name, "tensor.in_class@attn_lrp") - max(baselines))
    assert len(gains) == 4 and f"by {min(gains):.2f} to {max(gains):.2f} in reciprocal rank" in word
    assert value("evidence-gemma3-270m", "tensor.in_class@half_gate") > value(
        "evidence-gemma3-270m", "tensor.in_class@attn_lrp"
    )
    documents = by_name["documents-smollm2-135m"]
    right = {name: sum(map(sum, documents[f"paper, {name}"].values())) for name in ("runner_up", "centred")}
    assert f"{right['runner_up']:.0f} of {sum(map(len, documents['paper, centred'].values()))}" in passage
    assert f"finds {right['centred']:.0f} of them" in passage
    of = [value("patching-smollm2-135m", f"patching@{name}") for name in ("jacobian", "paper")]
    assert f"{of[0]:.2f} on held-out" in component and f"rules have {of[1]:.2f}" in component


@pytest.mark.parametrize("question", ["word", "passage", "component"])
def test_what_is_recommended_is_what_the_first_halves_choose(question):
    """For each question the best of the first halves, by the same judges in all models, with nothing from bench."""
    import tensorlens as tl

    judges = {
        "word": ("evidence", "edits"),
        "passage": ("documents", "needles", "injections"),
        "component": ("patching",),
    }
    runs = [halves(*_judged(path))[0] for path in FILES if path.name.startswith(judges[question])]
    runs = [{name: mean_of_means(sets) for name, sets in run.items() if _of_T(name)} for run in runs]
    common = {name: sum(run[name] for run in runs) / len(runs) for name in set.intersection(*map(set, runs))}
    best = max(common, key=lambda name: (round(common[name], 6), _of_rules(name, common)))
    found = tl.recommended(question)
    rules = best.partition("@")[2] or best.partition(", ")[0]
    assert found.rules == tl.Rules.of("paper" if rules == "tensor.in_class" else rules)
    assert question != "passage" or found.target == best.partition(", ")[2]


def _of_T(name):
    return name.startswith(("tensor.", "patching@")) or ", " in name


def _of_rules(name, common):
    """On a level: the mean over all targets of the same rules."""
    same = [value for other, value in common.items() if other.partition(", ")[0] == name.partition(", ")[0]]
    return sum(same) / len(same)


def _judged(path):
    _, lines = lines_of(path)
    return lines[0]["judge"], lines
