"""Maps on a Ray cluster of two nodes: one that dies loses nothing, and processes without a place are spoken of."""

from __future__ import annotations

import io

import pytest
from tiny_language import save_tiny

import tensorlens as tl
from tensorlens.studies import ray_parts

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.filterwarnings("ignore"), pytest.mark.large]
TEXTS = [f"{'the cat sat on it '[: 3 + 5 * (i % 4)]}{i}" for i in range(12)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), "neox")


@pytest.fixture
def nodes():
    """A head and a second node, each a process of its own on loopback."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    made.second = made.add_node(num_cpus=1)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


class Slow(tl.Mapper):
    """Takes its time over a part, so that a node can be lost in the middle of one."""

    def part(self, values, first=0, *, progress=False):
        import time

        time.sleep(0.5)
        return super().part(values, first, progress=progress)


def test_a_node_that_is_lost_in_the_middle_loses_nothing(nodes, model):
    from pyarrow import parquet

    waiting = [(number, TEXTS[number : number + 1], number) for number in range(12)]
    found = {}
    for number, n_rows, part in ray_parts.parts_on_ray(nodes.address, Slow(model), waiting, n_actors=2):
        assert number not in found and n_rows == 1
        found[number] = part
        if len(found) == 3:
            nodes.remove_node(nodes.second, allow_graceful=False)
            nodes.add_node(num_cpus=1)  # without room somewhere, its processes would wait for ever
    tables = [parquet.read_table(io.BytesIO(found[n][0])).to_pylist() for n in range(12)]
    assert ["".join(row["tokens"]) for rows in tables for row in rows] == TEXTS


class Quiet(Exception):
    """Raised instead of waiting on."""


def test_processes_that_find_no_place_are_spoken_of(nodes, model, monkeypatch, capsys):
    """Four where there is room for three: what the fourth was given never comes back."""

    def quiet(*known):
        raise Quiet(*known)

    tell = ray_parts._tell_of_quiet
    monkeypatch.setattr(ray_parts, "QUIET_SECONDS", 20.0)
    monkeypatch.setattr(ray_parts, "_tell_of_quiet", quiet)
    waiting = [(number, TEXTS[number : number + 1], number) for number in range(8)]
    found = []
    with pytest.raises(Quiet) as told:
        found.extend(ray_parts.parts_on_ray(nodes.address, tl.Mapper(model), waiting, n_actors=4))
    assert told.value.args[:2] == (4, 0)
    tell(*told.value.args)
    text = capsys.readouterr().err
    assert "no part has come back" in text and "4 processes" in text and "ray start --num-cpus" in text
