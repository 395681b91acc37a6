"""`Recorder`: one pass under way. It knows where the model's parts are, where live values begin and where the pass ends."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tensorlens import cancel
from tensorlens.errors import AnatomyError
from tensorlens.models.anatomy import Anatomy
from tensorlens.models.evidence import main_tensor, tensors_in
from tensorlens.models.module_tree import named_modules
from tensorlens.recording.layouts import AxisLayout, axis_layout, find_state, put_state, state_of
from tensorlens.recording.live import Live, found_in, is_live, tape, value_of
from tensorlens.recording.prologue import Prologue
from tensorlens.recording.rules.modules import find_adapter
from tensorlens.recording.rules.recurrences import with_kernels
from tensorlens.recording.tape import Tape, spec_of

Forward = Callable[..., Any]


class Reached(BaseException):
    """Ends a pass early. Not an `Exception`, so that no model catches it."""

    def __init__(self, state: Tensor) -> None:
        self.state = state


class StartEarly(BaseException):
    """Asks for a new pass that is live from the embeddings on."""


class OtherParts(BaseException):
    """Asks for a new anatomy: on this input other blocks ran, or the same another number of times."""


class Recorder:
    """One pass: what it does at the modules it meets, and what it has learnt so far.

    Args:
        anatomy: The model and where its parts are.
        inputs: Keyword arguments of its forward.
        run: The tape.
    """

    def __init__(self, anatomy: Anatomy, inputs: dict[str, Any], run: Tape) -> None:
        self.anatomy, self.inputs, self.run = anatomy, inputs, run
        self.states: list[tuple[int, ...]] = []
        self.values: list[Tensor] = []
        self.inputs_of_program: list[int] = []
        self.input_values: list[Tensor] = []
        self.modules: list[tuple[str, int | None, float]] = []
        self.memory: int | None = None
        self.n_encoder_blocks: int | None = None
        self.starts_at_embedding = self._has_embedded = False
        self.end: int | None = None
        self.readout: Any = None
        self.prologue = Prologue()
        self.n_calls = len(anatomy.channels) - 1 if anatomy.channels else len(anatomy.blocks)
        self.n_entered, self.n_alike = 0, 0
        self._n_most = self.n_calls if anatomy.runs_again else float("inf")
        self._kinds = {type(block) for block in anatomy.blocks}
        self._blocks = {id(block) for block in anatomy.blocks}
        self._encoder = {id(block) for block in anatomy.encoder_blocks}
        named = named_modules(anatomy.model)
        self._names = {id(module): name for name, module in named.items()}
        self._parents = {
            id(child): f"{type(parent).__module__}.{type(parent).__qualname__}.{name}"
            for parent in named.values()
            for name, child in parent._modules.items()
        }

    # Modules ----------------------------------------------------------------------------------------------------------

    def call(self, module: nn.Module, call: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module was called: blocks, the encoder, the body, the embeddings and the unembedding teach something."""
        name = self._names.get(id(module))
        if name is None:
            return call(module, *args, **kwargs)
        cancel.check()
        run = self.run
        run.path.append(name)
        try:
            output = self._at(module, name, call, args, kwargs)
            if self.n_entered:
                self._note_output(name, args, kwargs, output)
            return output
        finally:
            run.path.pop()

    def _at(self, module: nn.Module, name: str, call: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run, anatomy = self.run, self.anatomy
        self.n_alike += run.block is None and type(module) in self._kinds
        if id(module) in self._blocks and run.block is None and self.n_entered < self._n_most:
            return self._run_block(module, call, args, kwargs)
        if module is anatomy.unembedding and self.n_entered and run.block is None:
            if self.end is None and anatomy.body_end == "":
                self._leave_body(args[0])
            self.readout = args[0]
            raise Reached(args[0])
        output = self._forward(module, call, args, kwargs)
        if module is anatomy.embedding and not self.n_entered and isinstance(output, Tensor):
            return self._embed(output)
        if self._encoder and name == anatomy.encoder and run.block is None:
            self._leave_encoder(output)
        if self.n_entered >= self.n_calls and run.block is None:
            if self.end is None and anatomy.body_end and name == anatomy.body_end:
                self._leave_body(state_of(output))
            if anatomy.readout is not None and name == anatomy.readout:
                self.readout = state_of(output)
                raise Reached(self.readout)
        return output

    def _forward(self, module: nn.Module, call: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module: by its adapter if it has one and something live comes in."""
        own = module.__dict__.get("forward", module.forward)
        forward = with_kernels(self.run, own)
        if found_in(args, kwargs):
            adapter = find_adapter(module, self._parents.get(id(module)))
            if adapter is not None:
                forward = functools.partial(adapter, self.run, module, forward)
        if forward is own:
            return call(module, *args, **kwargs)
        with _forward_of(module, forward):
            return call(module, *args, **kwargs)

    def _note_output(self, name: str, args: Any, kwargs: Any, output: Any) -> None:
        state = main_tensor(output)
        if state is None or not (is_live(state) or found_in(args, kwargs)):
            return
        self.modules.append((name, self.run.slot_of(state) if is_live(state) else None, 0.0))

    def _run_block(self, module: nn.Module, call: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run, n = self.run, self.n_entered
        self.n_entered += 1
        self.prologue.pause()
        found = find_state(args, kwargs, run.module, self.anatomy.entry_place)
        state = self._enter(n, found, module, (*args, *kwargs.values()))
        if state is not found:
            args, kwargs = put_state(args, kwargs, state, self.anatomy.entry_place)
        run.block = n
        try:
            output = self._forward(module, call, args, kwargs)
        finally:
            run.block = None
        self.last_output = output
        if self.n_entered == self.n_calls and self.anatomy.body_end is None:
            self._leave_body(state_of(output, self.anatomy.state_place))
        return output

    def rules_include_final_norm(self) -> bool:
        """Whether X^N is taken after the final norm."""
        return self.run.rules.include_final_norm

    # States -----------------------------------------------------------------------------------------------------------

    def _enter(self, n: int, state: Tensor, module: nn.Module, beside: tuple[Any, ...]) -> Tensor:
        """The state that enters block n, live: made so where a stream of the input begins."""
        run, in_encoder = self.run, id(module) in self._encoder
        begins_decoder = not in_encoder and self.n_encoder_blocks is None
        if begins_decoder:
            self.n_encoder_blocks = n
        if not is_live(state) and (n == 0 or begins_decoder):
            layout = self._layout(state, n)
            if n == 0 and len(layout.channels) > 1 and self._has_embedded:
                raise StartEarly  # several streams are made of one
            alike = [x for x in beside if type(x) is Tensor and x is not state and x.shape == state.shape]
            alike = [x for x in alike if torch.equal(x, value_of(state))]
            state = self._begin(state, layout)
            for twin in alike:  # two residual streams may begin alike
                run.writes.borrow(twin, run.slot_of(state))  # type: ignore[arg-type]
            self.prologue.repeat(run)
        tokens = self._mark(state, self._layout(state, n))
        if begins_decoder and n:
            self._join_streams(tokens)
        slots = (tokens.slot,) if self.memory is None else (self.memory, tokens.slot)
        value = value_of(tokens)
        if self.memory is not None:
            value = torch.cat([self.memory_value, value], 1)
        self.states.append(slots)
        self.values.append(value)
        return state

    def _begin(self, state: Tensor, layout: AxisLayout) -> Tensor:
        """Make a state live: from here on every reference to it is."""
        run = self.run
        tokens = layout.to_tokens(value_of(state))
        slot = run.new_slot(spec_of(tokens))
        self.inputs_of_program.append(slot)
        self.input_values.append(tokens)
        live = run.live(tokens.view_as(tokens), slot)
        native = layout.to_native(live)
        if type(state) is not Tensor:
            return run.live(value_of(state), run.slot_of(native))
        return run.writes.borrow(state, run.slot_of(native))

    def _mark(self, state: Tensor, layout: AxisLayout) -> Live:
        """A state as (sample, token, channel); where that is another layout, the model goes on from there."""
        tokens = layout.to_tokens(state)
        if tokens is not state and is_live(state):
            state.slot = self.run.slot_of(layout.to_native(tokens))  # type: ignore[attr-defined]
        if not is_live(tokens):
            raise AnatomyError(
                f"What enters block {len(self.states)} in `{self.anatomy.stack}` does not depend on what entered the "
                "first of them, by anything a rule carries. Pass the path of the right list as `blocks=`."
            )
        return tokens  # type: ignore[return-value]

    def _layout(self, state: Tensor, n: int) -> AxisLayout:
        """How the state entering block n is laid out, or the last one."""
        channels = self.anatomy.channels
        channel = channels[n] if channels and n < len(channels) else None
        return axis_layout(state, channel, self._n_text_tokens, self.run.n_samples)

    @functools.cached_property
    def _n_text_tokens(self) -> int | None:
        """Number of tokens of a text, as far as the inputs say."""
        for name, axis in (("input_ids", -1), ("inputs_embeds", 1), ("decoder_input_ids", -1)):
            if isinstance(self.inputs.get(name), Tensor):
                return self.inputs[name].shape[axis]
        ids = [v for v in self.inputs.values() if isinstance(v, Tensor) and v.dtype in (torch.int32, torch.int64)]
        return next((tensor.shape[-1] for tensor in ids if tensor.dim() == 2), None)  # by whatever name

    def _embed(self, output: Tensor) -> Tensor:
        """Token embeddings: where the program begins if the first block takes only a part of them."""
        self._has_embedded = self._has_embedded or output.dim() == 3
        if self.starts_at_embedding or not self.anatomy.starts_early:
            return output
        self.starts_at_embedding = True
        self.prologue.pause()
        return self._begin(output, axis_layout(output, None, None, self.run.n_samples))

    def _leave_encoder(self, output: Any) -> None:
        memory = state_of(output)
        if memory.dim() != 3:
            raise AnatomyError(
                f"The encoder gave a state of shape {tuple(memory.shape)}; expected (batch, token, channel)."
            )
        self.memory, self.memory_value = self.run.slot_of(memory), value_of(memory)  # type: ignore[arg-type]

    def _join_streams(self, decoder: Live) -> None:
        """What entered the encoder's blocks, with what waits at the decoder."""
        name = type(self.anatomy.model).__name__
        if self.memory is None:
            raise AnatomyError(
                f"The encoder of `{name}` gave no state to the decoder. Pass inputs for both, and no `encoder_outputs`."
            )
        for n, value in enumerate(self.values):
            if value.shape[-1] != decoder.shape[-1]:
                raise AnatomyError(
                    f"The encoder of `{name}` has {value.shape[-1]} channels, its decoder {decoder.shape[-1]}; one "
                    "operator from both needs equal numbers."
                )
            self.states[n] = (*self.states[n], decoder.slot)  # type: ignore[arg-type]
            self.values[n] = torch.cat([value, value_of(decoder).to(value)], 1)

    def _leave_body(self, state: Tensor) -> None:
        tokens = self._layout(state, -1).to_tokens(state)
        self.end = self.run.slot_of(tokens) if is_live(tokens) else -1  # type: ignore[arg-type]
        self.end_value = value_of(tokens)


# Module calls of this thread -----------------------------------------------------------------------------------------

_lock = threading.Lock()
_original = nn.Module.__call__
_n_inside = 0


def _reporting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    run = tape()
    recorder = None if run is None else run.recorder
    return _original(module, *args, **kwargs) if recorder is None else recorder.call(module, _original, args, kwargs)


@contextmanager
def module_calls_seen() -> Iterator[None]:
    """Let module calls report to the recording of their thread, by one patch of `nn.Module`; no instance is touched."""
    global _n_inside
    with _lock:
        _n_inside += 1
        nn.Module.__call__ = _reporting  # type: ignore[method-assign]
    try:
        yield
    finally:
        with _lock:
            _n_inside -= 1
            if _n_inside == 0:
                nn.Module.__call__ = _original  # type: ignore[method-assign]


@contextmanager
def methods_seen(modules: tuple[nn.Module, ...]) -> Iterator[None]:
    """Let some modules report calls of their methods, for code that does not call the modules themselves."""
    placed = [(module, name) for module in modules for name in _own_methods(module) if name not in module.__dict__]
    try:
        for module, name in placed:
            module.__dict__[name] = _reporting_method(module, getattr(module, name))
        yield
    finally:
        for module, name in placed:
            module.__dict__.pop(name, None)


def _own_methods(module: nn.Module) -> list[str]:
    kinds = [kind for kind in type(module).__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module]
    methods = {name: value for kind in reversed(kinds) for name, value in vars(kind).items()}
    return [name for name, value in methods.items() if callable(value) and not name.startswith("_")]


def _reporting_method(module: nn.Module, method: Forward) -> Forward:
    @functools.wraps(method)
    def report(*args: Any, **kwargs: Any) -> Any:
        run = tape()
        is_state = any(isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1 for x in (*args, *kwargs.values()))
        if run is None or run.recorder is None or run.block is not None or not is_state:
            return method(*args, **kwargs)
        return run.recorder.call(module, lambda _, *a, **k: method(*a, **k), args, kwargs)

    return report


@contextmanager
def _forward_of(module: nn.Module, forward: Forward) -> Iterator[None]:
    """Another forward for one call, so that the module's hooks stay around it; other threads go by its own."""
    own, run = module.__dict__.get("forward"), tape()
    first = module.forward

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return (forward if tape() is run else first)(*args, **kwargs)

    module.__dict__["forward"] = replaced
    try:
        yield
    finally:
        if own is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = own


__all__ = ["OtherParts", "Reached", "Recorder", "module_calls_seen", "tensors_in"]
