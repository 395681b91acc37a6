"""Maps on a Ray cluster of two nodes: one that dies loses nothing, and processes without a place are spoken of."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from test_mapper import run, table
from tiny_language import save_tiny

import tensorlens as tl
from tensorlens.studies import map_table

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.filterwarnings("ignore"), pytest.mark.large]
TEXTS = [f"{'the cat sat on it '[: 3 + 5 * (i % 4)]}{i}" for i in range(12)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), "neox")


@pytest.fixture
def nodes():
    """A head and a second node, each a process with an object store of its own, which holds the results of parts."""
    from ray.cluster_utils import Cluster

    stores = {"_system_config": {"max_direct_call_object_size": 3000}}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False} | stores)
    made.second = made.add_node(num_cpus=1)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name.startswith(("part-", "_skipped-"))}


def test_a_node_that_is_lost_in_the_middle_changes_no_byte(nodes, model, tmp_path, monkeypatch):
    """What the lost node had finished, and what it was at, is made again: every row once, as on one machine."""
    given, written = map_table.parts_on_ray, []

    def losing(*arguments):
        for part in given(*arguments, n_actors=2):
            yield part
            written.append(part[0])
            if len(written) == 4:
                time.sleep(1)  # processes finish some of what waits for them: results in their own node's store
                nodes.remove_node(nodes.second, allow_graceful=False)
                nodes.add_node(num_cpus=1)  # without room somewhere, its processes would wait for ever

    monkeypatch.setattr(map_table, "parts_on_ray", losing)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["", *TEXTS * 8]), "utf-8")
    options = ["--data", data, "--part-rows", 8, "--batch-size", 8, "--on-error", "skip"]
    run(model, *options, "--out", tmp_path / "here")
    said = run(model, *options, "--out", tmp_path / "there", "--ray", nodes.address)
    assert said["maps"] == 96 and sorted(written) == list(range(0, 97, 8))
    assert files_of(tmp_path / "there") == files_of(tmp_path / "here")
    assert [row["id"] for row in table(tmp_path / "there")] == list(range(1, 97))


class Quiet(Exception):
    """Raised instead of waiting on."""


def test_processes_that_find_no_place_are_spoken_of(nodes, model, monkeypatch, capsys):
    """Four where there is room for three: what the fourth was given never comes back."""

    def quiet(*known):
        raise Quiet(*known)

    tell = map_table._tell_of_quiet
    monkeypatch.setattr(map_table, "QUIET_SECONDS", 20.0)
    monkeypatch.setattr(map_table, "_tell_of_quiet", quiet)
    waiting = [(number, TEXTS[number : number + 1], number) for number in range(8)]
    found = []
    with pytest.raises(Quiet) as told:
        found.extend(map_table.parts_on_ray(nodes.address, tl.Mapper(model), waiting, n_actors=4))
    assert told.value.args[:2] == (4, 0)
    tell(*told.value.args)
    text = capsys.readouterr().err
    assert "no part has come back" in text and "4 processes" in text and "ray start --num-cpus" in text
