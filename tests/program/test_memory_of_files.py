"""Loaded tensors lie in memory as torch lays it out, so that products round as they did before saving."""

import torch
from torch import nn

import tensorlens as tl


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.GELU()) for _ in range(2))

    def forward(self, inputs_embeds):
        for block in self.blocks:
            inputs_embeds = inputs_embeds + block(inputs_embeds)
        return inputs_embeds


def test_memory_is_aligned_and_no_longer_the_files(tmp_path):
    torch.manual_seed(0)
    T = tl.Lens(Tower())(torch.randn(3, 5))
    path = T.save(tmp_path / "t.safetensors")
    loaded = tl.AttentionTensor.load(path)
    path.write_bytes(b"\0" * path.stat().st_size)
    constants = [loaded.program.constants[n] for n in loaded.program.used]
    assert all(value.untyped_storage().data_ptr() % 64 == 0 for value in constants)
    assert torch.equal(loaded.T @ T.output, T.T @ T.output)
