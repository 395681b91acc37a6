"""Maps on a Ray cluster on this machine: the same numbers, also when a process is killed. Needs the extra `ray`."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from tiny_language import save_tiny

import tensorlens as tl

DOCS = Path(__file__).parents[1] / "docs"
sys.path.insert(0, str(DOCS / "_code"))
from execute import blocks  # noqa: E402  # pyright: ignore[reportMissingImports]

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.filterwarnings("ignore"), pytest.mark.large]
TEXTS = [f"{'the cat sat on it '[: 3 + 5 * (i % 4)]}{i}" for i in range(12)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), "neox")


@pytest.fixture(scope="module")
def cluster():
    """Three CPUs in name: two actors, and one for what Ray does besides."""
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_in_ray_data(cluster, model):
    rows = ray.data.from_items([{"text": text} for text in TEXTS])
    made = {row["text"]: row for row in rows.map_batches(tl.Mapper(model), batch_size=4, concurrency=1).take_all()}
    alone = tl.Mapper(model, batch_size=1)({"text": TEXTS})
    for i, text in enumerate(TEXTS):
        assert list(made[text]["tokens"]) == alone["tokens"][i] and made[text]["target"] == alone["target"][i]
        assert list(made[text]["scores"]) == pytest.approx(alone["scores"][i], rel=1e-3, abs=1e-5)


def test_the_block_of_the_page(cluster, model, tmp_path):
    """On CPUs, with folders in place of buckets."""
    from pyarrow import Table, parquet

    (tmp_path / "reviews").mkdir()
    parquet.write_table(
        Table.from_pylist([{"text": text} for text in [*TEXTS, ""]]), tmp_path / "reviews" / "a.parquet"
    )
    (block,) = [
        one for one in blocks((DOCS / "how-to" / "data-sets.md").read_text("utf-8")) if one.title == "needs Ray"
    ]
    source = block.source.replace("smollm2-135m", model).replace("num_gpus=1", "concurrency=1")
    exec(source.replace("s3://bucket", str(tmp_path)), {"tl": tl})
    made = parquet.read_table(tmp_path / "maps").to_pylist()
    assert ["".join(row["tokens"]) for row in made if row["tokens"]] == TEXTS


def test_a_killed_process_loses_nothing(cluster, model, tmp_path):
    from pyarrow import parquet

    from tensorlens.studies import map_table

    class Killed(tl.Mapper):
        """Ends its process at the first part that it sees."""

        def part(self, values, first=0, *, progress=False):
            mark = tmp_path / "killed"
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().part(values, first, progress=progress)

    waiting = [(number, TEXTS[3 * number : 3 * number + 3], 3 * number) for number in range(4)]
    found = {n: part for n, _, part in map_table.parts_on_ray("local", Killed(model), waiting, n_actors=2)}
    assert (tmp_path / "killed").exists() and sorted(found) == [0, 1, 2, 3]
    tables = [parquet.read_table(io.BytesIO(found[n][0])).to_pylist() for n in range(4)]
    assert ["".join(row["tokens"]) for rows in tables for row in rows] == TEXTS


def test_the_command(cluster, model, tmp_path):
    from test_mapper import run, table

    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["", *TEXTS]), "utf-8")
    options = ["--data", data, "--part-rows", 4, "--batch-size", 2, "--on-error", "skip"]
    run(model, *options, "--out", tmp_path / "here")
    said = run(model, *options, "--out", tmp_path / "there", "--ray", "local")
    assert said["maps"] == 12 and said["skipped"][0]["row"] == 0
    assert [row["tokens"] for row in table(tmp_path / "there")] == [row["tokens"] for row in table(tmp_path / "here")]
