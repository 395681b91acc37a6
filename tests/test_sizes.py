"""What `tensorlens size` says of a config, against the whole model."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from typer.testing import CliRunner

import tensorlens as tl
from tensorlens.app.cli import app
from tensorlens.sizes import costs_of, size

TINY = dict(hidden_size=16, intermediate_size=24, num_attention_heads=4, vocab_size=60, max_position_embeddings=40)


def llama(n_blocks: int) -> hf.LlamaConfig:
    return hf.LlamaConfig(**TINY, num_hidden_layers=n_blocks, architectures=["LlamaForCausalLM"])


def test_memory_of_all_blocks_follows_from_a_few():
    found = size(llama(7), n_tokens=9, device="cpu")
    whole = costs_of(llama(7), torch.float32, torch.device("cpu"), 9)
    predicted = {cost.work: cost.n_bytes for cost in found.costs}
    for cost in whole:
        assert (predicted[cost.work] is None) == (cost.n_bytes is None), cost.work
        assert cost.n_bytes is None or predicted[cost.work] == pytest.approx(cost.n_bytes, rel=0.02), cost.work
    assert predicted["map, from token ids"] > 0
    model = hf.LlamaForCausalLM(llama(7))
    assert found.n_parameters == sum(one.numel() for one in model.parameters())
    assert found.weight_bytes == 4 * found.n_parameters


def test_kinds_of_blocks_are_tried_in_their_proportions():
    kinds = (["sliding_attention"] * 2 + ["full_attention"]) * 3
    config = hf.Gemma3TextConfig(
        **TINY,
        num_hidden_layers=9,
        num_key_value_heads=2,
        head_dim=4,
        layer_types=kinds,
        architectures=["Gemma3ForCausalLM"],
    )
    found = size(config, n_tokens=9, device="cpu", dtype="float64")
    whole = {c.work: c.n_bytes for c in costs_of(config, torch.float64, torch.device("cpu"), 9)}
    assert found.costs[1].n_bytes == pytest.approx(whole[found.costs[1].work], rel=0.05)


def test_the_command_prints_every_work(tmp_path):
    hf.LlamaForCausalLM(llama(4)).config.save_pretrained(tmp_path)  # a config and nothing else
    done = CliRunner().invoke(app, ["size", str(tmp_path), "--tokens", "9", "--device", "cpu", "--quiet"])
    assert done.exit_code == 0, done.output
    for word in ("million parameters", "forward pass", "map, from token ids", "norms", "data set"):
        assert word in done.output


def test_a_config_without_tokens_is_refused():
    with pytest.raises(tl.InputError, match="config of a text model"):
        size(hf.ViTConfig())
