"""What a careless tool might change of a model, before and after."""

from __future__ import annotations

import torch
from torch import nn
from zoo import ZOO, sample


def portrait(model: nn.Module) -> dict:
    """Everything of a model that a careless tool might change."""
    return {
        "values": {name: value.clone() for name, value in model.state_dict().items()},
        "versions": {name: parameter._version for name, parameter in model.named_parameters()},
        "identity": {name: id(parameter) for name, parameter in model.named_parameters()},
        "flags": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
        "modules": {name: (module.training, sorted(module.__dict__)) for name, module in model.named_modules()},
        "hooks": {
            name: [len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks)]
            for name, module in model.named_modules()
        },
        "config": model.config.to_dict(),
    }


def assert_same(before: dict, after: dict) -> None:
    for name, value in before.pop("values").items():
        assert torch.equal(value, after["values"][name]), name
    after.pop("values")
    assert before == after


def outputs(model: nn.Module, name: str) -> torch.Tensor:
    value = sample(name)
    argument = {"pixel_values": value[None]} if ZOO[name].vision else {"input_ids": torch.tensor([value])}
    with torch.no_grad():
        found = model(**argument)
    return found[0]
