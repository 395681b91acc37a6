"""Models in states that users have them in: handled, and the same T as ever; the model as it was found."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from bench.families.run import fingerprint
from bench.families.tiny_models import TinyModel, build
from torch import Tensor

import tensorlens as tl
from tensorlens.program.steps import leaves

IDS = [5, 9, 33, 12, 7]


@pytest.fixture
def tiny() -> TinyModel:
    return build("causal", "llama", "sdpa", torch.float32)


def pulled(model: Any, value: Any = IDS) -> Tensor:
    tensor = tl.Lens(model)(value)
    assert tensor.certificate().passed
    return tensor.adjoint(tensor.output)


def agree(first: Tensor, second: Tensor, tolerance: float = 1e-5) -> bool:
    return bool((first - second).norm() <= tolerance * second.norm())


def test_a_batch_of_none_gives_none(tiny: TinyModel):
    T = tl.Lens(tiny.model)(IDS)
    assert T.apply(torch.zeros(0, *T.shape[2:])).shape == (0, *T.shape[:2])
    assert T.adjoint(torch.zeros(2, 0, *T.shape[:2])).shape == (2, 0, *T.shape[2:])


def test_a_copy_is_itself_and_a_pickle_travels(tiny: TinyModel):
    T = tl.Lens(tiny.model)(IDS)
    assert copy.copy(T) is T and copy.deepcopy([T])[0] is T
    again = pickle.loads(pickle.dumps(T))
    assert torch.equal(again.adjoint(T.output), T.adjoint(T.output))


def test_compiled_models_are_read_below_the_compiler(tiny: TinyModel):
    expected = pulled(tiny.model)
    compiled = torch.compile(tiny.model, backend="eager")
    assert agree(pulled(compiled), expected)
    tiny.model.compile(backend="eager")
    impl = tiny.model._compiled_call_impl
    assert agree(pulled(tiny.model), expected)
    assert tiny.model._compiled_call_impl is impl


def test_train_mode(tiny: TinyModel):
    expected = pulled(tiny.model)
    tiny.model.config.attention_dropout = 0.5
    tiny.model.train()
    assert agree(pulled(tiny.model), expected)
    assert all(module.training for module in tiny.model.modules())


def test_gradient_checkpointing(tiny: TinyModel):
    expected = pulled(tiny.model)
    tiny.model.gradient_checkpointing_enable()
    tiny.model.train()
    assert agree(pulled(tiny.model), expected)


def test_autocast(tiny: TinyModel):
    expected = pulled(tiny.model)
    with torch.autocast("cpu", torch.bfloat16):
        tensor = tl.Lens(tiny.model)(IDS)
    assert agree(tensor.adjoint(tensor.output), expected)
    tensor = tl.Lens(tiny.model)(IDS)
    with torch.autocast("cpu", torch.bfloat16):
        assert agree(tensor.adjoint(tensor.output), expected)


def test_cache(tiny: TinyModel):
    expected = pulled(tiny.model)
    tiny.model.config.use_cache = True
    assert agree(pulled(tiny.model, {"input_ids": torch.tensor([IDS]), "use_cache": True}), expected)
    with pytest.raises(tl.InputError, match="past_key_values"):
        tl.Lens(tiny.model)({"input_ids": torch.tensor([IDS]), "past_key_values": object()})


def test_inference_mode(tiny: TinyModel):
    expected = pulled(tiny.model)
    with torch.inference_mode():
        tensor = tl.Lens(tiny.model)(torch.tensor(IDS))
        inside = tensor.adjoint(tensor.output)
    assert agree(inside, expected)
    assert agree(tensor.adjoint(tensor.output), expected)


def test_two_threads(tiny: TinyModel):
    before, expected = fingerprint(tiny), pulled(tiny.model)
    found: dict[int, Tensor] = {}

    def look(k: int) -> None:
        found[k] = pulled(tiny.model)

    threads = [threading.Thread(target=look, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(agree(found[k], expected) for k in range(2))
    assert fingerprint(tiny) == before


@pytest.mark.parametrize("case", [("causal", "llama"), ("seq2seq", "bart"), ("causal", "mamba"), ("vision", "vit")])
def test_untouched_after_an_exception_in_the_middle(case: tuple[str, str], monkeypatch: pytest.MonkeyPatch):
    tiny = build(*case, "eager")
    before = fingerprint(tiny)

    def explode(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError

    from tensorlens.recording.tape import RULES

    with monkeypatch.context() as patch:
        for name in ("rsqrt", "layer_norm"):
            patch.setitem(RULES, name, explode)
        with pytest.raises(tl.NotLinearError, match="ZeroDivisionError") as raised:
            tl.Lens(tiny.model)(tiny.arguments)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert fingerprint(tiny) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_storage(tiny: TinyModel, dtype: torch.dtype):
    expected = pulled(tiny.model)
    tensor = tl.Lens(tiny.model.to(dtype))(IDS)
    assert tensor.certificate().passed
    assert agree(tensor.adjoint(tensor.output).float(), expected, 0.1)
    steps = tensor.program.steps
    assert any(step.operation == "cast" and torch.float32 in step.args for step in steps)  # norms are taken there


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_off_load(tiny: TinyModel, where: str, tmp_path: Path):
    accelerate = pytest.importorskip("accelerate")
    expected = pulled(tiny.model)
    by_class = tl.Lens(tiny.model)(IDS).map("tensor.in_class", out_token=-1).scores
    if where == "cpu":
        model = accelerate.cpu_offload(tiny.model, execution_device="cpu")
    else:
        model = accelerate.disk_offload(tiny.model, str(tmp_path), execution_device="cpu")
    assert next(model.model.layers[0].parameters()).device.type == "meta"
    assert agree(pulled(model), expected)
    assert agree(tl.Lens(model)(IDS).map("tensor.in_class", out_token=-1).scores, by_class)
    assert next(model.model.layers[0].parameters()).device.type == "meta"


def test_device_map_over_places(tiny: TinyModel, tmp_path: Path):
    accelerate = pytest.importorskip("accelerate")
    expected = pulled(tiny.model)
    places: dict[str, Any] = {f"model.layers.{n}": "disk" if n % 2 else "cpu" for n in range(3)}
    places |= {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = accelerate.dispatch_model(
        tiny.model, places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True
    )
    assert agree(pulled(model), expected)
    T, again = tl.Lens(model)(IDS), list[int]()
    for n, block in enumerate(model.model.layers):
        block.register_forward_pre_hook(lambda *_, n=n: again.append(n))
    T.adjoint(T.output)
    assert again == [1], "only blocks whose weights are elsewhere run again"


@pytest.mark.parametrize(("kind", "nested"), [("fp4", True), ("nf4", False)])
def test_four_bit_weights(kind: str, nested: bool):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    config = hf.LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=60
    )
    model = hf.LlamaForCausalLM(config).eval()
    for block in model.model.layers:
        for parent in (block.self_attn, block.mlp):
            for name, layer in list(parent.named_children()):
                if isinstance(layer, torch.nn.Linear):
                    small = bitsandbytes.nn.Linear4bit(
                        *(layer.in_features, layer.out_features, False, torch.float32), nested, kind
                    )
                    small.load_state_dict(layer.state_dict())
                    setattr(parent, name, small.to("cpu").eval())
    T = tl.Lens(model)(IDS)
    packed = {one for _, one, _ in layers_of(T)}
    assert packed == {torch.uint8}, "nothing is kept unpacked"
    errors = T.certificate().errors
    assert errors["linearity"] < 1e-5 and errors["adjoint"] < 1e-5
    # The package's kernel for CPUs multiplies in bfloat16, so that the model is not its own matrix to more than that.
    assert errors["value"] < 2e-2


def layers_of(T: tl.AttentionTensor) -> list[tuple[str, torch.dtype, bool]]:
    """For each linear layer of a program: its module, and the type of what it keeps of its weight, by reference."""
    constants = T.program.constants
    found = [(step.module, leaves(step.args[1])[0]) for step in T.program.steps if step.operation == "linear"]
    return [(module, constants[one.index].dtype, one.index in constants.names) for module, one in found]


def test_eight_bit_activations_are_refused():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    tiny = build("causal", "llama", "sdpa", torch.float32)
    mlp = tiny.model.model.layers[1].mlp
    small = bitsandbytes.nn.Linear8bitLt(48, 32, bias=False, has_fp16_weights=False)
    small.load_state_dict(mlp.down_proj.state_dict())
    mlp.down_proj = small.to("cpu").eval()
    with pytest.raises(tl.NotLinearError, match="down_proj"):
        pulled(tiny.model)


@pytest.mark.parametrize("how", ["Int8WeightOnly", "IntxWeightOnly", "Float8WeightOnly"])
def test_torchao_weights(how: str, tmp_path: Path):
    quantization = pytest.importorskip("torchao.quantization")
    model, plain = (build("causal", "llama", "sdpa", torch.float32).model for _ in range(2))
    quantization.quantize_(model, getattr(quantization, f"{how}Config")())
    for layer, other in zip(plain.modules(), model.modules(), strict=True):
        if isinstance(layer, torch.nn.Linear):
            layer.weight = torch.nn.Parameter(other.weight.dequantize())
    T, expected = tl.Lens(model)(IDS), tl.Lens(plain)(IDS)
    assert all(dtype.itemsize == 1 and is_named for _, dtype, is_named in layers_of(T))
    assert T.certificate().passed
    assert agree(T.rows(2), expected.rows(2), 1e-5)
    for weights in ("inside", "reference"):
        T.save(tmp_path / "T.safetensors", weights=weights)
        again = tl.AttentionTensor.load(tmp_path / "T.safetensors", lens=tl.Lens(model))
        assert torch.equal(again.adjoint(T.output), T.adjoint(T.output))


def test_torchao_layers_that_round_their_inputs_are_refused(tiny: TinyModel):
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(tiny.model, quantization.Int8DynamicActivationInt8WeightConfig())
    with pytest.raises(tl.NotLinearError, match="rounds its inputs"):
        pulled(tiny.model)


# Batches -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_is_its_samples_one_at_a_time(tiny: TinyModel, side: str):
    lens = tl.Lens(tiny.model)
    samples = [[5, 9, 33, 12, 7], [8, 21, 40], [6]]
    width = max(map(len, samples))
    ids, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
    for row, sample in enumerate(samples):
        place = slice(width - len(sample), width) if side == "left" else slice(0, len(sample))
        ids[row, place], mask[row, place] = torch.tensor(sample), 1
    batch = lens({"input_ids": ids, "attention_mask": mask})
    lists = lens(samples)
    for together, listed, sample in zip(batch, lists, samples, strict=True):
        alone = lens(sample)
        assert together.n_tokens == len(sample)
        for other in (together, listed):
            assert torch.equal(other.adjoint(other.output), alone.adjoint(alone.output))
            assert torch.equal(other.map().scores, alone.map().scores)


QUESTIONS: dict[str, Callable[[tl.AttentionTensor], Any]] = {
    "nothing": lambda T: None,
    "map": lambda T: T.map("tensor.in_class", -1),
    "components": lambda T: T.components(-1, 7),
    "graph": lambda T: T.graph(-1, 7, max_nodes=5),
    "score": lambda T: T.score(1, 0, -1, 0),
    "rows": lambda T: T.rows(0),
    "certificate": lambda T: T.certificate(),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_memory_is_free_at_once(tiny: TinyModel, name: str):
    """On a GPU constants are gigabytes: what waits for the garbage collector is memory that the next pass lacks."""
    T = tl.Lens(tiny.model)(IDS)
    QUESTIONS[name](T)
    gc.collect()
    gc.disable()
    try:
        T = tl.Lens(tiny.model)(IDS)
        QUESTIONS[name](T)
        program = weakref.ref(T.operator.recording.program)
        del T
        assert program() is None
    finally:
        gc.enable()
