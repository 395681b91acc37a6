"""The measurements, one function each: sizes in, rows of a table out. All times of a row come from one run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

import tensorlens as tl
from bench.speed.models import body_function, build, device, half, lens_of_numbers, token_ids
from bench.speed.paper_way import WAYS, patched
from bench.speed.timing import Timing, clear, timed
from tensorlens.models.runner import matmul_mode
from tensorlens.operators.spectrum import frobenius_norms, sketched_norms
from tensorlens.recording.live import Followed
from tensorlens.studies import perturbation

Rows = list[dict[str, Any]]


# T itself, beside the paper's way -------------------------------------------------------------------------------------


def slices(names: Sequence[str], n_tokens: int, precisions: Sequence[str]) -> Rows:
    """T[i], the map of norms of all outputs, and 16 probes of one: beside the Jacobian of a patched model."""
    rows = []
    for name in names:
        model = build(name)
        T = tl.Lens(model)(token_ids(n_tokens))
        exact = T.with_precision("float32").rows(n_tokens - 1)
        for precision in precisions:
            fast = T.with_precision(precision)
            slice_ = timed(lambda fast=fast: fast.rows(n_tokens - 1), n=7, warm=2)
            norms = timed(lambda fast=fast: frobenius_norms(fast.operator, range(n_tokens)), n=3, most_seconds=12)
            sketch = timed(lambda fast=fast: sketched_norms(fast.operator, (n_tokens - 1,), 16), n=10, warm=3)
            way, jacobian, error = best_jacobian(model, T.input, precision, n_tokens - 1, exact)
            rows.append(
                {
                    "model": name,
                    "tokens": n_tokens,
                    "precision": precision,
                    "a slice": slice_,
                    "Jacobian": f"{jacobian} [{way}]",
                    "ratio": f"{jacobian.seconds / slice_.seconds:.1f}",
                    "all norms": norms,
                    "ratio to Jacobians": f"{jacobian.seconds * n_tokens / norms.seconds:.1f}",
                    "16 probes": sketch,
                    "error": f"{relative(fast.rows(n_tokens - 1), exact):.0e}",
                    "error of the Jacobian": f"{error:.0e}",
                }
            )
        del model, T
        clear()
    return rows


def best_jacobian(
    model: Any, x: torch.Tensor, precision: str, out_token: int, expected: torch.Tensor
) -> tuple[str, Timing, float]:
    """The fastest way and chunk size for one slice of the patched model, with its error."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    before, tried = next(model.parameters()).dtype, {}
    with patched(model.to(dtype)), matmul_mode(precision):
        function, start, error = body_function(model), x[None].to(dtype), float("nan")
        for way, slice_ in WAYS.items():
            for chunk in sorted({min(64, x.shape[-1]), min(256, x.shape[-1])}):
                try:
                    error = relative(slice_(function, start, out_token, chunk), expected)
                    work = lambda slice_=slice_, chunk=chunk: slice_(function, start, out_token, chunk)  # noqa: E731
                    tried[f"{way}, {chunk}"] = timed(work, n=3, warm=0, most_seconds=6)
                except torch.OutOfMemoryError:
                    clear()
    model.to(before)
    best = min(tried, key=lambda name: tried[name].seconds)
    return best, tried[best], error


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the Frobenius norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def scaling(tokens: int, channels: int, blocks: int) -> Rows:
    """Exponents of a slice and of a sketch over tokens, channels and blocks, one at a time."""
    base, rows = {"tokens": tokens, "channels": channels, "blocks": blocks}, []
    for axis in base:
        points: dict[str, list[tuple[int, float]]] = {"slice": [], "sketch": []}
        for factor in (0.5, 1, 2, 4):
            size = base | {axis: int(base[axis] * factor)}
            d = size["channels"]
            widths: dict[str, Any] = {"hidden_size": d, "num_attention_heads": d // 32, "intermediate_size": 4 * d}
            # Of the last block only one token is live, so that the others are counted.
            model = build("bert-base", num_hidden_layers=size["blocks"] + 1, max_position_embeddings=2048, **widths)
            T, last = tl.Lens(model)(token_ids(size["tokens"])).operator, size["tokens"] - 1
            points["slice"].append((size[axis], timed(lambda T=T, i=last: T.rows(i), n=3).seconds))
            points["sketch"].append((size[axis], timed(lambda T=T, i=last: sketched_norms(T, (i,), 16), n=3).seconds))
            del model, T
            clear()
        rows += [
            {"of a": name, "over": axis, "exponent": f"{slope(found):.2f}"}
            | {
                f"at {factor:g} of {base}": f"{1e3 * s:.3g} ms"
                for factor, (_, s) in zip((0.5, 1, 2, 4), found, strict=True)
            }
            for name, found in points.items()
        ]
    return rows


def slope(points: list[tuple[int, float]]) -> float:
    """The exponent of the power law that fits best."""
    xs, ys = (torch.tensor(v, dtype=torch.float64).log() for v in zip(*points, strict=True))
    return float(((xs - xs.mean()) * (ys - ys.mean())).sum() / (xs - xs.mean()).square().sum())


# Questions, beside the model's own passes -----------------------------------------------------------------------------


def passes(model: Any, ids: Sequence[int], keep: int = 1, n: int = 7) -> tuple[Timing, Timing]:
    """A forward pass, and a forward and backward pass from the last logits to the embeddings, of the model itself.

    Args:
        model: The model.
        ids: Its input.
        keep: Outputs whose logits it computes; all of them, as a plain call does, if 0.
        n: How often each is timed.
    """
    x = model.get_input_embeddings()(torch.tensor([list(ids)], device=device())).detach()

    def forward() -> None:
        with torch.no_grad():
            model(inputs_embeds=x, use_cache=False, logits_to_keep=keep)

    def both() -> None:
        leaf = x.clone().requires_grad_()
        logits = model(inputs_embeds=leaf, use_cache=False, logits_to_keep=keep).logits[0]
        torch.autograd.grad(logits[-keep:].amax(-1).sum() if keep else logits[-1].amax(), leaf)

    return timed(forward, n=n, warm=2), timed(both, n=n, warm=2)


def clock(names: Sequence[str], n_tokens: int, n_blocks: int) -> Rows:
    """What recording costs in Python per torch function that it sees, and in passes; the same at twice the length."""
    rows, ids, longer = [], token_ids(n_tokens), token_ids(2 * n_tokens)
    for name in names:
        model = build(name, half(), num_hidden_layers=n_blocks)
        lens, lrp = tl.Lens(model), tl.Lens(model, rules=tl.Rules.attn_lrp())
        (forward, both), (twice, _) = passes(model, ids, keep=0), passes(model, longer, keep=0)
        T = lens(ids)
        T.map("tensor.in_class", -1)
        works: dict[str, tuple[Callable[[], Any], Timing]] = {
            "map": (lambda lens=lens: lens(ids).map("tensor.in_class", -1), both),
            "map, AttnLRP": (lambda lrp=lrp: lrp(ids).map("tensor.in_class", -1), both),
            "recording": (lambda lens=lens: lens(ids), forward),
            f"recording, {2 * n_tokens}": (lambda lens=lens: lens(longer), twice),
            "a further output": (lambda T=T: T.map("tensor.in_class", -2), forward),
            "push": (lambda T=T: T.apply(T.input), forward),
        }
        times = {label: timed(work, n=7) for label, (work, _) in works.items()}
        n_calls = functions_seen(lambda lens=lens: lens(ids))
        over = (times["recording"].fastest - forward.fastest) / n_calls
        row: dict[str, Any] = {"model": name, "tokens": n_tokens, "forward": forward, "calls": n_calls}
        row |= {"µs per call": f"{1e6 * over:.1f}"}
        rows.append(row | {label: f"{times[label].seconds / per.seconds:.2f}" for label, (_, per) in works.items()})
        del model, lens, lrp, T, works
        clear()
    return rows


def functions_seen(work: Callable[[], Any]) -> int:
    """How many torch functions a recording sees."""
    own, n_seen = vars(Followed)["__torch_function__"], [0]

    def call(*args: Any) -> Any:
        n_seen[0] += 1
        return own.__func__(*args)

    Followed.__torch_function__ = classmethod(call)  # type: ignore[method-assign]
    try:
        work()
    finally:
        Followed.__torch_function__ = own  # type: ignore[method-assign]
    return n_seen[0]


def certified(lens: tl.Lens, ids: Sequence[int], forward: Timing) -> dict[str, Any]:
    """What a certificate says, how often it runs the model, and what its laws cost in forward passes."""
    T, runs = lens(list(ids)), list[None]()
    handle = lens.model.register_forward_pre_hook(lambda *_: runs.append(None))
    try:
        found = T.certificate()
    finally:
        handle.remove()
    warm = [lens(list(ids)).certificate().seconds for _ in range(3)]
    costs = {law: f"{median(one[law] for one in warm) / forward.seconds:.1f}" for law in found.seconds}
    return {"certified": found.passed, "value": f"{found.errors['value']:.0e}", "runs": len(runs)} | costs


def certificates(names: Sequence[str], n_tokens: int, n_blocks: int) -> Rows:
    """What certificates cost, in forward passes of the model."""
    rows, ids = [], token_ids(n_tokens)
    for name in names:
        model = build(name, half(), num_hidden_layers=n_blocks)
        lens = tl.Lens(model)
        forward, _ = passes(model, ids, keep=0)
        row = {"model": name, "tokens": n_tokens, "blocks": n_blocks, "forward": forward}
        rows.append(row | certified(lens, ids, forward))
        del model, lens
        clear()
    return rows


def long_input(name: str, n_tokens: int, n_blocks: int) -> Rows:
    """A map, a push, components and a graph of a long input, in passes of the model."""
    model, ids = build(name, half(), num_hidden_layers=n_blocks), token_ids(n_tokens)
    lens = tl.Lens(model)
    forward, both = passes(model, ids)
    T = lens(ids)
    T.map("tensor.in_class", -1)
    works: dict[str, tuple[Callable[[], Any], Timing]] = {
        "map, from ids": (lambda: lens(ids).map("tensor.in_class", -1), both),
        "a further output": (lambda: T.map("tensor.in_class", -2), forward),
        "push": (lambda: T.apply(T.input), forward),
        "components, from ids": (lambda: lens(ids).components(-1, 7), both),
        "graph of 10 nodes": (lambda: T.graph(-1, 7, max_nodes=10, share=0.99), forward),
        "graph of 30 nodes": (lambda: T.graph(-1, 7, max_nodes=30, share=0.99), forward),
    }
    times = {label: timed(work, n=3) for label, (work, _) in works.items()}
    common = {"model": name, "tokens": n_tokens, "forward": forward}
    return [
        common | {"what": label, "passes": f"{times[label].seconds / per.seconds:.2f}", "memory, GiB": times[label].gib}
        for label, (_, per) in works.items()
    ]


def answers(name: str, n_prompt: int, n_answer: int) -> Rows:
    """20 passages by the sentences of an answer (pulls), and by its tokens (pushes), from ids, in passes."""
    model = build(name, half())
    ids = token_ids(n_prompt + n_answer)
    prompt, answer, lens = ids[:n_prompt], ids[n_prompt:], tl.Lens(model)
    forward, both = passes(model, ids, n_answer + 1)
    size = -(-n_prompt // 20)
    passages = [(f"passage {k}", size * k, min(n_prompt, size * (k + 1))) for k in range(20)]

    def by_sentence() -> Any:
        made = lens.answer(prompt, answer)
        bounds = [made.offsets[k : k + 20] for k in range(0, n_answer, 20)]
        rows = [(f"sentence {k}", some[0][0], some[-1][1]) for k, some in enumerate(bounds)]  # type: ignore[index]
        return made.map(passages, rows)

    def by_token() -> Any:
        return lens.answer(prompt, answer).map(passages, "tokens")

    rows = []
    for label, work, per in (("answer sentences", by_sentence, both), ("answer tokens", by_token, forward)):
        took = timed(work, n=3, most_seconds=60)
        rows.append(
            {"model": name, "prompt": n_prompt, "answer": n_answer, "20 passages ×": label, "time": took}
            | {"passes": f"{took.seconds / per.seconds:.1f}", "memory, GiB": took.gib}
        )
    return rows


def batches(name: str, n_samples: int, n_tokens: int, batch_size: int) -> Rows:
    """Samples per second of `lens.maps`, over those of plain gradients of the same samples in batches.

    The gradients are input times gradient, and CP-LRP and AttnLRP as gradients of the model with its rules put in.
    """
    model = build(name)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    ids = [token_ids(n_tokens + k % 3) for k in range(n_samples)]

    def plain() -> None:
        for at in range(0, n_samples, batch_size):
            some = torch.tensor([one[:n_tokens] for one in ids[at : at + batch_size]], device=device())
            x = model.get_input_embeddings()(some).detach().requires_grad_()
            logits = model(inputs_embeds=x, use_cache=False, logits_to_keep=1).logits[:, -1]
            (torch.autograd.grad(logits.max(-1).values.sum(), x)[0] * x).sum(-1).tolist()

    rates = {"input × gradient": n_samples / timed(plain, n=2).seconds}
    for label, is_live in (("CP-LRP by gradients", False), ("AttnLRP by gradients", True)):
        with lrp_gradients(model, is_live):
            rates[label] = n_samples / timed(plain, n=2).seconds
        clear()
    lens, lrp, rows = tl.Lens(model), tl.Lens(model, rules=tl.Rules.attn_lrp()), []
    asked: list[tuple[tl.Lens, str, dict[str, Any], int]] = [
        (lens, "tensor.in_class", {}, n_samples),
        (lens, "tensor.in_out", {}, n_samples),
        (lrp, "tensor.in_class", {}, n_samples),
        (lens, "tensor.norm", {"probes": 16}, -(-n_samples // 8)),
        (lens, "tensor.contribution", {}, -(-n_samples // 8)),
    ]
    for its, method, options, n in asked:
        took = timed(lambda: list(its.maps(ids[:n], method, progress=False, **options)), n=3)  # noqa: B023
        rate = n / took.seconds
        row = {"model": name, "tokens": n_tokens, "samples": n, "rules": its.rules.name, "method": method}
        row |= {"per second": f"{rate:.0f}"}
        rows.append(row | {f"over {label} ({other:.0f})": f"{rate / other:.3f}" for label, other in rates.items()})
        clear()
    return rows


@contextmanager
def lrp_gradients(model: Any, is_live: bool) -> Iterator[None]:
    """Inside, a Llama has gradients of AttnLRP, or with queries, keys and gates held of CP-LRP; norms are held."""

    def norm(module: Any, x: Tensor) -> Tensor:
        size = x.float().square().mean(-1, keepdim=True)
        return module.weight * (x.float() * torch.rsqrt(size + module.variance_epsilon).detach()).to(x)

    def halved(y: Tensor) -> Tensor:
        return 0.5 * y + (0.5 * y).detach()

    def changed(name: str, x: Tensor, y: Tensor) -> Tensor:
        if not is_live:
            return y.detach()
        if name.endswith("act_fn"):
            y = (y / x).detach() * x
        return halved(halved(y) if name.endswith(("q_proj", "k_proj")) else y)  # two products lie behind scores

    named = dict(model.named_modules())
    ends = ("q_proj", "k_proj", "act_fn", *(("v_proj", "up_proj") if is_live else ()))
    hooks = [
        one.register_forward_hook(lambda _, given, y, name=name: changed(name, given[0], y))
        for name, one in named.items()
        if name.endswith(ends)
    ]
    norms = [one for one in named.values() if hasattr(one, "variance_epsilon")]
    for one in norms:
        one.forward = partial(norm, one)
    try:
        yield
    finally:
        for one in norms:
            del one.forward
        for hook in hooks:
            hook.remove()


def perturbed(name: str, n_samples: int, n_tokens: int) -> Rows:
    """Samples per second of the perturbation study with all methods, in groups of 16 and one by one."""
    lens = lens_of_numbers(name)
    texts = [" ".join(map(str, token_ids(n_tokens + k)[:n_tokens])) for k in range(n_samples)]
    rows = []
    for size in (16, 1):
        with tempfile.TemporaryDirectory() as folder:
            options = {"n_tokens": n_tokens, "replacements": ("token",), "group_size": size, "progress": False}
            took = timed(lambda f=folder, o=options: perturbation(lens, texts, f, **o), n=1, warm=0)
        rows.append(
            {"model": name, "samples": n_samples, "group": size, "per second": f"{n_samples / took.seconds:.2f}"}
        )
    return rows


def inside(name: str, n_tokens: int) -> Rows:
    """Components, pair maps and graphs, beside a map of the same target."""
    lens, ids = tl.Lens(build(name)), token_ids(n_tokens)
    T = lens(ids)
    works: dict[str, Callable[[], Any]] = {
        "map, from ids": lambda: lens(ids).map("tensor.in_class", -1, 5),
        "components, from ids": lambda: lens(ids).components(-1, 5),
        "map, recorded": lambda: T.map("tensor.in_class", -1, 5),
        "components, recorded": lambda: T.components(-1, 5),
        "direct effects, recorded": lambda: T.components(-1, 5, "direct"),
        "pair map of a head, recorded": lambda: T.score(1, 1, -1, 3),
        "graph of 50 nodes, from ids": lambda: lens(ids).graph(-1, 5, max_nodes=50),
    }
    times = {label: timed(work) for label, work in works.items()}
    return [{"what": label, "tokens": n_tokens, "time": one, "memory, GiB": one.gib} for label, one in times.items()]
