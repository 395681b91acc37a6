"""Large shapes: long answers and inputs, models beyond the memory of a GPU, many experts, and where the time goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers as hf
from torch.profiler import ProfilerActivity, profile

import tensorlens as tl
from bench.speed.models import LLAMA, build, device, half, token_ids
from bench.speed.parts import Rows, passes
from bench.speed.timing import clear, timed
from tensorlens.operators.spectrum import frobenius_norms

LLAMA_70B = LLAMA | dict(hidden_size=8192, num_attention_heads=64, intermediate_size=28672, vocab_size=128256)
SMALL = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128, vocab_size=1000)
GRID = ((10, 2000), (10, 5000), (10, 10000), (2000, 10), (5000, 10), (10000, 10), (6000, 200))


def grid(name: str, sizes: Sequence[tuple[int, int]]) -> Rows:
    """The row of a whole answer, from ids: tokens of prompt and answer, in forward passes of the model."""
    model, rows = build(name, half()), []
    lens = tl.Lens(model)
    for n_prompt, n_answer in sizes:
        ids = token_ids(n_prompt + n_answer)
        prompt, answer = ids[:n_prompt], ids[n_prompt:]
        forward, both = passes(model, ids, n_answer + 1, n=3)
        made = timed(lambda p=prompt, a=answer: lens.answer(p, a), n=3)
        found = lens.answer(prompt, answer)
        row = timed(lambda found=found: found.map(), n=3)
        del found
        whole = timed(lambda p=prompt, a=answer: lens.answer(p, a).map(), n=3)
        rows.append(
            {"prompt": n_prompt, "answer": n_answer, "forward": forward, "with backward": both, "from ids": whole}
            | {"forwards": f"{whole.seconds / forward.seconds:.2f}", "recording": made, "row": row}
            | {"memory, GiB": whole.gib}
        )
    return rows


def longest(name: str, n_tokens: int, **options: Any) -> Rows:
    """A map from a new lens, a map from ids, and components from ids, of an input that fills the memory."""
    model, ids = build(name, half(), **options), token_ids(n_tokens)
    x = torch.tensor([ids], device=device())

    def forward() -> None:
        with torch.no_grad():
            model(x, use_cache=False, logits_to_keep=1)

    forward()
    lenses: list[tl.Lens] = []

    def from_new() -> None:
        lenses.append(tl.Lens(model))
        lenses[-1](ids).map("tensor.in_class", -1, 7)

    works: dict[str, Callable[[], Any]] = {
        "forward pass": forward,
        "map, from a new lens": from_new,
        "recording": lambda: lenses[0](ids),
        "map, from ids": lambda: lenses[0](ids).map("tensor.in_class", -1, 7),
        "components, from ids": lambda: lenses[0](ids).components(-1, 7),
    }
    times = {label: timed(work, n=1, warm=0) for label, work in works.items()}
    return [
        {"tokens": n_tokens, "what": label, "seconds": f"{one.seconds:.1f}", "memory, GiB": one.gib}
        | {"forward passes": f"{one.seconds / times['forward pass'].seconds:.2f}"}
        for label, one in times.items()
    ]


def offloaded(widths: dict[str, Any], n_blocks: int, n_off: int, n_tokens: int) -> Rows:
    """A map of a model some of whose blocks are kept by the host; accelerate brings their weights when they run."""
    from accelerate import cpu_offload

    ids = token_ids(n_tokens)
    model = on_host(hf.LlamaConfig(num_hidden_layers=n_blocks, max_position_embeddings=8192, **widths), n_off, half())
    for block in model.model.layers[:n_off]:
        cpu_offload(block, execution_device=torch.device(device()))
    x = torch.tensor([ids], device=device())

    def forward() -> None:
        with torch.no_grad():
            model(x, use_cache=False, logits_to_keep=1)

    def both() -> None:
        embedded = model.get_input_embeddings()(x).detach().requires_grad_()
        torch.autograd.grad(model(inputs_embeds=embedded, use_cache=False, logits_to_keep=1).logits.max(), embedded)

    lens = tl.Lens(model)
    forward()
    times = {"forward pass": timed(forward, n=2, warm=0)}
    lens(ids)
    times["recording"] = timed(lambda: lens(ids), n=1, warm=0)
    times["map, from ids"] = timed(lambda: lens(ids).map("tensor.in_class", -1, 7), n=2, warm=0)
    try:
        times["forward and backward"] = timed(both, n=2, warm=0)
    except torch.OutOfMemoryError:  # fetched weights stay in its graph
        clear()
    per = {label: times[label].seconds for label in ("forward pass", "forward and backward") if label in times}
    return [
        {"blocks": n_blocks, "on the host": n_off, "tokens": n_tokens, "what": label, "time": one}
        | {f"over {unit}": f"{one.seconds / s:.2f}" for unit, s in per.items()}
        | {"memory, GiB": one.gib}
        for label, one in times.items()
    ]


def on_host(config: Any, n_off: int, kind: torch.dtype) -> Any:
    """A Llama of this config whose first blocks are in the memory of the host; every weight is random."""
    with torch.device("meta"):
        model = hf.LlamaForCausalLM._from_config(config, dtype=kind)
    blocks, model.model.layers = model.model.layers, torch.nn.ModuleList()
    for n, block in enumerate([*blocks, model]):  # the model has no blocks here
        block.to_empty(device=device())
        for weight in block.parameters():
            if weight.dim() > 1:
                weight.data.normal_(0, 0.02)
            else:
                weight.data.fill_(1)
        if n < n_off:
            block.to("cpu")
    model.model.layers = blocks
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device())
    return model.eval().requires_grad_(False)


def experts(names: Sequence[str], n_tokens: int, n_blocks: int) -> Rows:
    """Maps of models with many experts, in forward and backward passes."""
    rows, ids = [], token_ids(n_tokens)
    for name in names:
        model = build(name, half(), num_hidden_layers=n_blocks)
        lens = tl.Lens(model)
        forward, both = passes(model, ids, n=5)
        T = lens(ids)
        map_ = timed(lambda lens=lens: lens(ids).map("tensor.in_class", -1, 7))
        recording = timed(lambda lens=lens: lens(ids))
        pull = timed(lambda T=T: T.map("tensor.in_class", -2, 7))
        rows.append(
            {"model": name, "tokens": n_tokens, "forward": forward, "with backward": both, "map": map_}
            | {"passes": f"{map_.seconds / both.seconds:.2f}", "recording": recording, "a further output": pull}
        )
        del model, lens, T
        clear()
    return rows


# Where the time goes --------------------------------------------------------------------------------------------------


def kernels(names: Sequence[str], n_tokens: int, n_samples: int) -> Rows:
    """The functions that take most of a slice, of norms, of an answer and of contributions in a data set."""
    bert, text = build(names[0]), build(names[1])
    T = tl.Lens(bert)(token_ids(n_tokens)).with_precision("bfloat16")
    lens, ids = tl.Lens(text), [token_ids(n_tokens) for _ in range(n_samples)]
    lens.answer(ids[0][:-2], ids[0][-2:])
    works: dict[str, Callable[[], Any]] = {
        "slice": lambda: T.rows(n_tokens - 1),
        "norms": lambda: frobenius_norms(T.operator, range(n_tokens)),
        "contribution": lambda: list(lens.maps(ids, "tensor.contribution", progress=False)),
        "sketch": lambda: list(lens.maps(ids, "tensor.norm", probes=16, progress=False)),
    }
    rows = [row for what, work in works.items() for row in busiest(what, work)]
    del bert, text, T, lens
    clear()
    return rows


def of_an_answer(name: str, n_prompt: int, n_answer: int) -> Rows:
    """The functions that take most of the recording of an answer and of its row."""
    lens, ids = tl.Lens(build(name, half())), token_ids(n_prompt + n_answer)
    made = lens.answer(ids[:n_prompt], ids[n_prompt:])
    recording = busiest("recording", lambda: lens.answer(ids[:n_prompt], ids[n_prompt:]))
    return recording + busiest("row", lambda: made.map())


def busiest(what: str, work: Callable[[], Any], most: int = 8) -> Rows:
    """The functions that keep the device, or where there is none the processor, busy for longest."""
    on_gpu = device() == "cuda"
    work()
    whole = timed(work, n=3)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        work()
        if on_gpu:
            torch.cuda.synchronize()
    own = {one.key: one.self_device_time_total if on_gpu else one.self_cpu_time_total for one in seen.key_averages()}
    counts = {one.key: one.count for one in seen.key_averages()}
    top = sorted(own, key=lambda key: -own[key])[:most]
    share = {key: f"{1e-6 * own[key] / whole.seconds:.3f}" for key in top}
    busy = {"what": what, "time": whole, "function": "all of them", "calls": sum(counts.values())}
    return [busy | {"share": f"{1e-6 * sum(own.values()) / whole.seconds:.3f}"}] + [
        {"what": what, "time": whole, "function": key[:60], "calls": counts[key], "share": share[key]} for key in top
    ]
