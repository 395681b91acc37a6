"""One peer, alone in its process: reads a model and questions, writes one line per item. Knows nothing of TensorLens.

    python peer_process.py PEER MODEL QUESTIONS.jsonl ANSWERS.jsonl

A question is ``{"index", "ids", "target": [token] or [token, other], "units"}``, with ``"answer": [token, …]`` instead
of a target where a whole answer is explained, and one about components ``{"index", "ids", "corrupted", "weights",
"labels"}``; an answer ``{"index", "scores"}``, one score for each token, or for each component that is named. The first
line, with index 0, is about the peer: its version, and what its own documented example gave, which is tried before
anything is asked. Packages are imported by name, where they are needed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import math
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

Score = Callable[[dict[str, Any]], Sequence[float]]
"""From a question to a score for each token."""


def load(folder: str, **options: Any) -> Any:
    """The model in float32, on the accelerator if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return made.to(device).eval().requires_grad_(False)


def weigh(logits: Tensor, target: Sequence[int]) -> Tensor:
    """The logit of the target, less that of the other one of a pair; (sample, class) to (sample,)."""
    return logits[:, target[0]] - (logits[:, target[1]] if len(target) > 1 else 0.0)


def said(question: dict[str, Any]) -> list[int]:
    """The tokens that are explained: a whole answer, or the good continuation."""
    return question.get("answer") or question["target"][:1]


def ids_of(question: dict[str, Any], model: Any) -> Tensor:
    """The prompt and all but the last token of a whole answer; (1, token)."""
    return torch.tensor([question["ids"] + question.get("answer", [])[:-1]], device=model.device)


def without_opening(ids: Sequence[int], tokenizer: Any) -> Sequence[int]:
    """Without the special tokens in front, which a tokenizer puts there again; others may stand in the text itself."""
    special = set(tokenizer.all_special_ids)
    return ids[next(k for k, token in enumerate(ids) if token not in special) :]


def input_times_gradient(model: Any, question: dict[str, Any]) -> Tensor:
    """Input times gradient of a target, or of the sum of an answer's logits, by the model's own backward pass."""
    x, answer = model.get_input_embeddings()(ids_of(question, model)).detach().requires_grad_(), question.get("answer")
    logits = model(inputs_embeds=x, use_cache=False).logits
    one = logits[0, range(-len(answer), 0), answer] if answer else weigh(logits[:, -1], question["target"])
    one.sum().backward()
    assert x.grad is not None
    return (x * x.grad).sum(-1)[0, : len(question["ids"])].detach()


# lxt -----------------------------------------------------------------------------------------------------------------


def lxt(folder: str, method: str) -> tuple[Score, str]:
    """LRP by the package's patched classes, the recipe of its quickstart: input times the patched gradient."""
    # A name that is gone from transformers, and torchvision for models that are not asked for here.
    importlib.import_module("transformers.pytorch_utils").find_pruneable_heads_and_indices = None  # type: ignore[attr-defined]
    if importlib.util.find_spec("torchvision") is None:
        vision = types.ModuleType("torchvision")
        models = types.ModuleType("torchvision.models")
        inner = types.ModuleType("torchvision.models.vision_transformer")
        inner.nn, models.vision_transformer, vision.models = nn, inner, models  # type: ignore[attr-defined]
        sys.modules |= {"torchvision": vision, "torchvision.models": models, inner.__name__: inner}
    model_type = transformers.AutoConfig.from_pretrained(folder).model_type
    kind = model_type.removesuffix("_text")
    modeling: Any = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    maps = importlib.import_module(f"lxt.efficient.models.{kind}")
    importlib.import_module("lxt.efficient").monkey_patch(modeling, getattr(maps, method))
    if isinstance(modeling.ALL_ATTENTION_FUNCTIONS, dict):  # transformers asks it for an interface by now
        modeling.ALL_ATTENTION_FUNCTIONS = _Functions(modeling.ALL_ATTENTION_FUNCTIONS)
    model = load(folder)
    return lambda question: input_times_gradient(model, question).tolist(), _conserves(model_type)


class _Functions(dict):
    def get_interface(self, name: str, default: Any) -> Any:
        return self.get(name, default)


def _conserves(model_type: str) -> str:
    """LRP's own law on a small model without biases: what is given out is the logit (of CP-LRP exactly)."""
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    found = input_times_gradient(model, {"ids": [3, 1, 4, 1, 5], "target": [9]})
    logit = float(model(torch.tensor([[3, 1, 4, 1, 5]])).logits[0, -1, 9].detach())
    return f"relevance {float(found.sum()):.5f} of a logit {logit:.5f}"


# captum --------------------------------------------------------------------------------------------------------------


class Toy(nn.Module):
    """The model of captum's first example."""

    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(3, 3), nn.Linear(3, 2)
        self.lin1.weight = nn.Parameter(torch.arange(-4.0, 5.0).view(3, 3))
        self.lin1.bias = nn.Parameter(torch.zeros(1, 3))
        self.lin2.weight = nn.Parameter(torch.arange(-3.0, 3.0).view(2, 3))
        self.lin2.bias = nn.Parameter(torch.ones(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Two classes."""
        return self.lin2(torch.relu(self.lin1(x)))


def captum(folder: str, method: str) -> tuple[Score, str]:
    """Integrated gradients of the embeddings from zero, or ablation of one token after the other."""
    package, model = importlib.import_module("captum.attr"), load(folder)

    def integrated(question: dict[str, Any]) -> Sequence[float]:
        def read(x: Tensor) -> Tensor:
            return weigh(model(inputs_embeds=x, use_cache=False).logits[:, -1], question["target"])

        x = model.get_input_embeddings()(ids_of(question, model)).detach()
        found = package.IntegratedGradients(read).attribute(x, torch.zeros_like(x), n_steps=32, internal_batch_size=16)
        return found.sum(-1)[0].tolist()

    def ablated(question: dict[str, Any]) -> Sequence[float]:
        def read(ids: Tensor) -> Tensor:
            return weigh(model(input_ids=ids, use_cache=False).logits[:, -1], question["target"]).detach()

        other = model.config.eos_token_id if model.config.pad_token_id is None else model.config.pad_token_id
        other = other[0] if isinstance(other, list) else other or 0
        return package.FeatureAblation(read).attribute(ids_of(question, model), baselines=other)[0].tolist()

    return (integrated, _captum_example(package)) if method == "integrated_gradients" else (ablated, _linear(package))


def _captum_example(package: Any) -> str:
    """The package's first example, which prints the attributions of class 0."""
    torch.manual_seed(123)
    x = torch.rand(2, 3)
    found = package.IntegratedGradients(Toy()).attribute(x, torch.zeros(2, 3), target=0)
    said = torch.tensor([[-0.5922, -1.5497, -1.0067], [0.0000, -0.2219, -5.1991]])
    gap = float((found - said).abs().max())
    if gap > 2e-4:
        raise RuntimeError(f"its first example is {gap:.1e} from what its documentation prints")
    return f"its first example to {gap:.0e}"


def _linear(package: Any) -> str:
    """Ablation of a linear function gives weight times input."""
    weights = torch.tensor([[1.0, -2.0, 3.0]])
    found = package.FeatureAblation(lambda x: (x * weights).sum(1)).attribute(torch.tensor([[2.0, 3.0, 4.0]]))
    if not torch.allclose(found, torch.tensor([[2.0, -6.0, 12.0]])):
        raise RuntimeError(f"of a linear function it gives {found.tolist()}")
    return "a linear function's weights times inputs"


# Others --------------------------------------------------------------------------------------------------------------


def flashtrace(folder: str, method: str) -> tuple[Score, str]:
    """FlashTrace of the answer or the good continuation; it knows no contrast."""
    package, model = importlib.import_module("flashtrace"), load(folder, attn_implementation="eager")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tracer = package.FlashTrace(model, tokenizer, chunk_tokens=128, sink_chunk_tokens=32)

    def score(question: dict[str, Any]) -> Sequence[float]:
        ids, inner = question["ids"], without_opening(question["ids"], tokenizer)
        n_before = len(ids) - len(inner)
        prompt, target = tokenizer.decode(inner), tokenizer.decode(said(question))
        trace = tracer.trace(prompt=prompt, target=target, output_span=(0, len(said(question)) - 1), hops=1)
        scores = list(trace.scores)
        if len(scores) not in (len(ids), len(ids) - n_before):
            raise RuntimeError(f"it has {len(scores)} prompt tokens where the model is given {len(ids)}")
        return [0.0] * (len(ids) - len(scores)) + scores

    prompt = "Context: Paris is the capital of France.\nQuestion: What is the capital of France?"
    example = tracer.trace(prompt=prompt, target="Paris", output_span=(0, 0), hops=1)
    return score, "its quickstart ranks " + ", ".join(repr(one.token) for one in example.topk_inputs(3))


def context_cite(folder: str, method: str) -> tuple[Score, str]:
    """ContextCite's ablations and regression: our units are the sources, the answer or the target is the response."""
    utils, solvers = (importlib.import_module(f"context_cite.{name}") for name in ("utils", "solver"))
    model, tokenizer = load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def score(question: dict[str, Any]) -> Sequence[float]:
        units = question["units"]

        def prompt_ids(mask: Any = None) -> list[int]:
            gone = (
                {k for unit, keep in zip(units, mask, strict=True) if not keep for k in unit}
                if mask is not None
                else ()
            )
            return [token for k, token in enumerate(question["ids"]) if k not in gone]

        masks, logits = utils.get_masks_and_logit_probs(
            model, tokenizer, 64, len(units), prompt_ids, said(question), 0.5, 8
        )
        weights, _ = solvers.LassoRegression().fit(masks, utils.aggregate_logit_probs(logits), 1)
        found = [0.0] * len(question["ids"])
        for unit, weight in zip(units, weights, strict=True):
            for k in unit:
                found[k] = float(weight) / (1 if question.get("by_token") else len(unit))
        return found

    return score, _planted(solvers)


def _planted(solvers: Any) -> str:
    """Its regression on ablations whose answer is known: one source decides."""
    masks = torch.randint(0, 2, (64, 4), generator=torch.Generator().manual_seed(0)).bool().numpy()
    weights, _ = solvers.LassoRegression().fit(masks, 3.0 * masks[:, 2], 1)
    if int(weights.argmax()) != 2 or abs(weights[2] - 3) > 0.1:
        raise RuntimeError(f"of a planted source its regression gives {weights.tolist()}")
    return f"a planted source of weight 3 as {weights[2]:.2f}"


def inseq(folder: str, method: str) -> tuple[Score, str]:
    """Inseq's input times gradient of the answer or the good continuation."""
    package = importlib.import_module("inseq")
    model = package.load_model(folder, "input_x_gradient", device="cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def score(question: dict[str, Any]) -> Sequence[float]:
        prompt = tokenizer.decode(without_opening(question["ids"], tokenizer))
        whole = prompt + tokenizer.decode(said(question))
        made = model.attribute(prompt, whole, show_progress=False)
        scores = made.sequence_attributions[0].target_attributions.sum(-1)[:, -len(said(question)) :]
        return scores[: len(question["ids"])].nan_to_num(0.0).sum(1).tolist()

    ids = tokenizer("The capital of France is")["input_ids"]
    example = score({"ids": ids, "target": tokenizer(" Paris", add_special_tokens=False)["input_ids"][:1]})
    return score, f"a score for each of {len(example)} tokens"


def transformer_lens(folder: str, method: str) -> tuple[Score, str]:
    """Attribution patching: (corrupted less clean) times the gradient of the target in the clean run."""
    package, model = importlib.import_module("transformer_lens.model_bridge"), load(folder, attn_implementation="eager")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    bridge = package.TransformerBridge.boot_transformers(
        folder, hf_model=model.requires_grad_(True), tokenizer=tokenizer, device=str(model.device)
    )

    def score(question: dict[str, Any]) -> Sequence[float]:
        clean, gradients = _hooked(bridge, question["ids"], question["weights"])
        corrupted, _ = _hooked(bridge, question["corrupted"], [])
        found: dict[str, float] = {}
        for n in range(bridge.cfg.n_layers):
            effects = {
                hook: ((corrupted[place] - clean[place]) * gradients[place])[0]
                for hook in (HEADS, *WHOLE)
                for place in [f"blocks.{n}.{hook}"]
            }
            by_head = effects[HEADS].reshape(len(question["ids"]), bridge.cfg.n_heads, -1).sum((0, 2))
            found |= {f"block {n}, attention head {h}": float(one) for h, one in enumerate(by_head)}
            found |= {f"block {n}, {part}": float(effects[hook].sum()) for hook, part in WHOLE.items()}
        return [found[label] for label in question["labels"]]

    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids.to(model.device)
    with torch.no_grad():
        gap = float((bridge(ids, return_type="logits", prepend_bos=False) - model(ids).logits).abs().max())
    if gap > 1e-2:
        raise RuntimeError(f"its logits are {gap:.1e} from the model's own")
    return score, f"the model's own logits to {gap:.0e}"


HEADS = "attn.o.hook_in"
WHOLE = {"attn.hook_out": "attention", "mlp.hook_out": "feed-forward"}
"""Where TransformerLens keeps what heads, attentions and feed-forwards give: before a norm that some have behind it."""


def _hooked(bridge: Any, ids: Sequence[int], weights: Sequence[tuple[int, float]]) -> tuple[dict[str, Any], ...]:
    """What the components give in one run, and the gradient of the target there, if there is one."""
    values: dict[str, Any] = {}
    gradients: dict[str, Any] = {}

    def is_wanted(name: str) -> bool:
        return name.endswith((f".{HEADS}", *(f".{hook}" for hook in WHOLE)))

    def keep(value: Any, hook: Any) -> None:
        values[hook.name] = value.detach().clone()

    def keep_gradient(value: Any, hook: Any) -> None:
        gradients[hook.name] = (value[0] if isinstance(value, tuple) else value).detach().clone()

    backwards = [(is_wanted, keep_gradient)] if weights else []
    with torch.set_grad_enabled(len(weights) > 0), bridge.hooks(fwd_hooks=[(is_wanted, keep)], bwd_hooks=backwards):
        tokens = torch.tensor([list(ids)], device=next(bridge.parameters()).device)
        logits = bridge(tokens, return_type="logits", prepend_bos=False)[0, -1]
        if weights:
            torch.stack([weight * logits[token] for token, weight in weights]).sum().backward()
    return values, gradients


PEERS: dict[str, tuple[str, Callable[[str, str], tuple[Score, str]]]] = {
    "lxt": ("lxt", lambda folder, method: lxt(folder, "attnLRP" if method == "attn_lrp" else "cp_LRP")),
    "captum": ("captum", captum),
    "flashtrace": ("flashtrace", flashtrace),
    "context_cite": ("context-cite", context_cite),
    "inseq": ("inseq", inseq),
    "transformer_lens": ("transformer-lens", transformer_lens),
}


def main(name: str, folder: str, questions: str, answers: str) -> None:
    """Check the peer on its own example, then ask it."""
    package, _, method = name.partition(".")
    distribution, make = PEERS[package]
    with Path(answers).open("a", encoding="utf-8") as file:

        def write(record: dict[str, Any]) -> None:
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()

        version = importlib.metadata.version(distribution)
        write({"index": 0, "about": {"version": version}})
        score, check = make(folder, method)
        write({"index": 0, "about": {"version": version, "check": check}})
        for line in Path(questions).read_text("utf-8").splitlines():
            question = json.loads(line)
            try:
                found: dict[str, Any] = {"scores": [float(one) for one in score(question)]}
                if not all(map(math.isfinite, found["scores"])):
                    found = {"error": "it gave a number that is not finite"}
            except Exception as error:  # noqa: BLE001  # one item must not end the others
                found = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
            write({"index": question["index"], **found})


if __name__ == "__main__":
    main(*sys.argv[1:])
