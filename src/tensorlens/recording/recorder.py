"""`record` runs a model once and returns its program. A `Recorder` is one pass under way.

It knows where live values begin, where the blocks are and where the pass ends.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tensorlens.errors import AnatomyError, NotLinearError, TensorLensError
from tensorlens.memory import is_out_of_memory
from tensorlens.models.anatomy import Anatomy, never_ran, observe
from tensorlens.models.layouts import (
    AxisLayout,
    axis_layout,
    find_state,
    is_plain,
    n_text_tokens,
    put_state,
    readout_layout,
    state_of,
)
from tensorlens.models.runner import Reached, own_errors, running
from tensorlens.program.program import Constants, Program
from tensorlens.progress import check_cancelled
from tensorlens.recording import rules as _rules  # noqa: F401  (fills the table)
from tensorlens.recording.calls import BlockCall, KeptBlocks, ModuleCalls, ModulePlaces, Weights
from tensorlens.recording.conventions import Rules
from tensorlens.recording.live import SIMPLE, Live, found_in, is_live, raw, spec_of, value_of
from tensorlens.recording.recording import Head, Origin, Recording
from tensorlens.recording.tape import DESCRIBES, Tape, name_of, recording_on
from tensorlens.trees import map_tensors

if TYPE_CHECKING:
    from tensorlens.recording.tape import Tape


Forward = Callable[..., Any]


class StartEarly(BaseException):
    """Requests a new pass that is live from the embeddings on."""


class OtherParts(BaseException):
    """Requests a new anatomy: different blocks ran on this input, or the same blocks a different number of times."""


class Recorder:
    """One pass: its action at each module, and what it has found so far.

    Args:
        anatomy: The model and where its parts are.
        inputs: Keyword arguments of its forward.
        run: The tape.
        places: Where the parts of the model are.
    """

    def __init__(self, anatomy: Anatomy, inputs: dict[str, Any], run: Tape, places: ModulePlaces) -> None:
        self.anatomy, self.inputs, self.run = anatomy, inputs, run
        self.slots: list[tuple[int, ...]] = []
        self.states: list[Tensor] = []
        self.begun: list[tuple[int, Tensor]] = []
        """The inputs of the program: slots, and the states that begin there."""
        self.memory: tuple[int, Tensor] | None = None
        self.n_encoder_blocks: int | None = None
        self.starts_at_embedding = self._has_embedded = False
        self.end: tuple[int, Tensor] | None = None
        self.last_output: Any = None
        self.prologue = Prologue()
        self.n_calls = len(anatomy.channels) - 1 if anatomy.channels else len(anatomy.blocks)
        self.n_entered, self.n_alike = 0, 0
        self._layouts: dict[Any, AxisLayout] = {}
        self._n_text_tokens = n_text_tokens(inputs)
        self._n_most = self.n_calls if anatomy.runs_again else float("inf")
        self._kinds = {type(block) for block in anatomy.blocks}
        ends = (anatomy.encoder if anatomy.encoder_blocks else None, anatomy.body_end, anatomy.readout)
        self._watched = {
            id(module) for path, module in places.tree.items() if type(module) in self._kinds or path in ends
        } | {id(anatomy.embedding), id(anatomy.unembedding)}
        self._blocks = {id(block) for block in anatomy.blocks}
        self._encoder = {id(block) for block in anatomy.encoder_blocks}
        self.places = places
        self.calls = ModuleCalls(places, run, self._at, self._watched)
        self.blocks = KeptBlocks(places.weights)

    def go(self) -> Recording | None:
        """Run the model and return the recording; None if no block ran."""
        run, anatomy = self.run, self.anatomy
        try:
            methods_of = anatomy.blocks if anatomy.by_methods else ()
            tree = self.places.tree
            of_pass = running(anatomy.model, observer=self.calls, methods_of=methods_of, tree=tree)
            with of_pass, recording_on(run):
                readout = self._run_model()
                if self.n_entered and self.end is None and anatomy.body_end == "":
                    self._leave_body(readout)
                if self.n_entered and not run.rules.include_final_norm:
                    self._leave_body(state_of(self.last_output, anatomy.state_place))
                return self._recording(readout) if self.n_entered else None
        finally:
            self.prologue.stop()
            self.calls.at = None  # without this cycle, tensors are freed as soon as nothing uses them
            run.close()
            if run.refused is not None:
                raise run.refused

    def _run_model(self) -> Tensor:
        """Run it to the end of the pass: the input of the unembedding, or the model's output."""
        given = dict(self.inputs)
        try:
            self.prologue.start()
            if isinstance(given.get("inputs_embeds"), Tensor):
                given["inputs_embeds"] = self._embed(given["inputs_embeds"])
            return state_of(self.anatomy.model(**given))
        except Reached as reached:
            return reached.state

    def _recording(self, end: Tensor) -> Recording:
        run, anatomy = self.run, self.anatomy
        if anatomy.n_alike not in (None, self.n_alike) or anatomy.n_alike is not None and self.end is None:
            raise OtherParts
        if self.end is None:
            raise AnatomyError(
                f"`{type(anatomy.model).__name__}` ended without a state after its last block in `{anatomy.stack}`. "
                "Pass the path of the list of blocks that leads to the output as `blocks=`."
            )
        slots, states = [*self.slots, (self.end[0],)], [*self.states, self.end[1]]
        inputs = tuple(slot for slot, _ in self.begun)
        if self.starts_at_embedding:
            slots[0], states[0] = inputs, torch.cat([state for _, state in self.begun], 1)
        readout = None
        if anatomy.has_head:
            n_tokens, is_read = states[-1].shape[1], anatomy.unembedding is not None
            readout = readout_layout(end, run.n_samples, n_tokens, is_read=is_read)
        for n, value in enumerate(run.constants):
            if value is not None and value.is_inference() and n not in run.names:
                run.constants[n] = value.clone()  # an ordinary tensor: others may not be differentiated
        held = Constants(run.constants, run.names)
        program = Program(steps=tuple(run.steps), constants=held, specs=run.specs, inputs=inputs, outputs=slots[-1])
        self.blocks.make_fetchable(held, states, run.rules)
        # A copy, for laws that run the model again: the caller may overwrite theirs.
        given = {name: raw(Tensor.clone, x) if isinstance(x, Tensor) else x for name, x in self.inputs.items()}
        return Recording(
            program=program,
            states=tuple(states),
            slots=tuple(slots),
            rules=run.rules,
            readout=value_of(readout),
            readout_slot=run.slot_of(readout) if is_live(readout) else None,
            head=self._head(end),
            n_encoder_blocks=self.n_encoder_blocks or 0,
            starts_at_embedding=self.starts_at_embedding,
            mixtures=tuple(run.mixtures),
            meetings=tuple(run.meetings),
            choices=tuple(self.calls.choices),
            modules=tuple(self.calls.outputs),
            rules_applied=run.rules_applied,
            gives_raw_logits=anatomy.gives_raw_logits,
            mixes_samples=run.mixes_samples,
            name=type(anatomy.model).__name__,
            origin=Origin(anatomy, given, tuple(self.blocks.calls), Weights(self.places)),
        )

    def _head(self, readout: Tensor) -> Head | None:
        """Weight and bias of the unembedding, fetched if accelerate has off-loaded them."""
        unembedding = self.anatomy.unembedding
        if unembedding is None:
            return None
        weight, bias, name = unembedding.weight, unembedding.bias, self.places.names.get(id(unembedding), "unembedding")
        if not weight.is_meta:
            return Head(weight.detach(), None if bias is None else bias.detach(), name)
        hook: Any = unembedding._hf_hook
        hooks = getattr(hook, "hooks", (hook,))
        stored = next(part.weights_map for part in hooks if getattr(part, "weights_map", None))
        like = value_of(readout)
        return Head(stored["weight"].to(like), None if bias is None else stored["bias"].to(like), name)

    # Modules ----------------------------------------------------------------------------------------------------------

    def _at(self, module: nn.Module, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module; at blocks, encoder, body, embeddings and unembedding also note what the recording needs."""
        run, anatomy = self.run, self.anatomy
        check_cancelled()
        self.n_alike += run.block is None and type(module) in self._kinds
        if id(module) in self._blocks and run.block is None and self.n_entered < self._n_most:
            return self._run_block(module, name, forward, args, kwargs)
        if module is anatomy.unembedding and self.n_entered and run.block is None:
            readout = find_state(args, kwargs, name)
            if self.end is None and anatomy.body_end == "":
                self._leave_body(readout)
            raise Reached(readout)
        output = forward(*args, **kwargs)
        if self.n_entered:
            self.calls.note(name, args, kwargs, output)
        if module is anatomy.embedding and not self.n_entered and isinstance(output, Tensor):
            return self._embed(output)
        if self._encoder and name == anatomy.encoder and run.block is None:
            self._leave_encoder(output)
        if self.n_entered >= self.n_calls and run.block is None:
            if self.end is None and anatomy.body_end and name == anatomy.body_end:
                self._leave_body(state_of(output))
            if anatomy.readout is not None and name == anatomy.readout:
                raise Reached(state_of(output))
        return output

    def _run_block(
        self, module: nn.Module, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        run, n, place = self.run, self.n_entered, self.anatomy.entry_place
        self.n_entered += 1
        self.calls.is_noting = True
        self.prologue.pause()
        found = find_state(args, kwargs, name, place)
        state = self._enter(n, found, module, (*args, *kwargs.values()))
        if state is not found:
            args, kwargs = put_state(args, kwargs, state, place)
        call = self._call(n, module, name, args, kwargs, state)
        run.block = n
        self.blocks.begin(run)
        try:
            output = forward(*args, **kwargs)
        finally:
            run.block = None
        self.last_output = output
        self.calls.note(name, args, kwargs, output)
        self.blocks.end(run, call, state_of(output, self.anatomy.state_place))
        if self.n_entered == self.n_calls and self.anatomy.body_end is None:
            self._leave_body(state_of(output, self.anatomy.state_place))
        return output

    def _call(
        self, n: int, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], state: Tensor
    ) -> BlockCall:
        """The call of a block, with values instead of live tensors."""
        is_repeatable = all(map(is_plain, (*args, *kwargs.values())))
        is_closed = is_repeatable and not self._encoder and not self.starts_at_embedding
        is_closed &= all(x is state or not is_live(x) for x in found_in(args, kwargs))
        stands_in = value_of(state)
        args, kwargs = map_tensors(lambda x: stands_in if x is state else value_of(x), (args, kwargs))
        return BlockCall(
            n=n,
            module=module,
            path=name,
            args=args,
            kwargs=kwargs,
            entry=self.anatomy.entry_place,
            place=self.anatomy.state_place,
            layout=self._layout(state, n),
            is_closed=is_closed,
            is_repeatable=is_repeatable,
        )

    # States -----------------------------------------------------------------------------------------------------------

    def _enter(self, n: int, state: Tensor, module: nn.Module, beside: tuple[Any, ...]) -> Tensor:
        """The live state that enters block n; it is made live where a stream of the input begins."""
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
        slot, value = self._kept(tokens)
        if n == 0 and self.begun and not self.starts_at_embedding:
            slot = self.begun[0][0]  # what was computed from the state before the block begins there too
        if self.memory is None:
            self.slots.append((slot,))
            self.states.append(value)
        else:
            self.slots.append((self.memory[0], slot))
            self.states.append(torch.cat([self.memory[1].to(value.device), value], 1))
        return state

    def _kept(self, tokens: Tensor) -> tuple[int, Tensor]:
        """The slot of a state, and a copy of its value that nothing writes to later."""
        return self.run.slot_of(tokens), raw(Tensor.clone, tokens)  # type: ignore[arg-type]

    def _begin(self, state: Tensor, layout: AxisLayout) -> Tensor:
        """Make a state live: from here on every reference to it is."""
        run = self.run
        tokens = layout.to_tokens(value_of(state))
        slot = run.new_slot(spec_of(tokens))
        self.begun.append((slot, tokens.clone()))
        live = run.live(tokens.view_as(tokens), slot)
        native: Any = layout.to_native(live)
        if type(state) is not Tensor:
            return run.live(value_of(state), run.slot_of(native))
        return run.writes.borrow(state, run.slot_of(native))

    def _mark(self, state: Tensor, layout: AxisLayout) -> Live:
        """A state as (sample, token, channel). A model with a different layout continues from it, converted back."""
        tokens = layout.to_tokens(state)
        if tokens is not state and is_live(state):
            state.slot = self.run.slot_of(layout.to_native(tokens))  # type: ignore[attr-defined]
        if not is_live(tokens):
            raise AnatomyError(
                f"No operation that the rules follow leads from the state that enters the first block in "
                f"`{self.anatomy.stack}` to the input of block {len(self.states)}. Pass the path of the right list as "
                "`blocks=`."
            )
        return tokens  # type: ignore[return-value]

    def _layout(self, state: Tensor, n: int) -> AxisLayout:
        """The layout of the state that enters block n, or of the last state."""
        channels = self.anatomy.channels
        key = state.shape, channels[n] if channels and n < len(channels) else None
        if key not in self._layouts:
            self._layouts[key] = axis_layout(*key, self._n_text_tokens, self.run.n_samples)
        return self._layouts[key]

    def _embed(self, output: Tensor) -> Tensor:
        """Token embeddings: where the program begins if the first block takes only a part of them."""
        self._has_embedded = self._has_embedded or output.dim() == 3
        if self.starts_at_embedding or not self.anatomy.starts_early:
            return output
        self.starts_at_embedding = True
        self.prologue.pause()
        return self._begin(output, axis_layout(output.shape, None, None, self.run.n_samples))

    def _leave_encoder(self, output: Any) -> None:
        memory = state_of(output)
        if memory.dim() != 3:
            raise AnatomyError(
                f"The encoder gave a state of shape {tuple(memory.shape)}; expected (batch, token, channel)."
            )
        self.memory = self._kept(memory)

    def _join_streams(self, decoder: Live) -> None:
        """The state that entered the encoder's blocks, joined with the one that waits at the decoder."""
        name = type(self.anatomy.model).__name__
        if self.memory is None:
            raise AnatomyError(
                f"The encoder of `{name}` gave no state to the decoder. Pass inputs for both, and no `encoder_outputs`."
            )
        for n, value in enumerate(self.states):
            if value.shape[-1] != decoder.shape[-1]:
                raise AnatomyError(
                    f"The encoder of `{name}` has {value.shape[-1]} channels, its decoder {decoder.shape[-1]}; one "
                    "operator from both needs equal numbers."
                )
            self.slots[n] = (*self.slots[n], self.run.slot_of(decoder))
            self.states[n] = torch.cat([value, value_of(decoder).to(value)], 1)

    def _leave_body(self, state: Tensor) -> None:
        tokens = self._layout(state, -1).to_tokens(state)
        if not is_live(tokens):
            raise AnatomyError(
                f"No operation that the rules follow leads from the state that enters the first block in "
                f"`{self.anatomy.stack}` to the output of the last one. Let the blocks take their state first, "
                "or pass the path of the right list as `blocks=`."
            )
        self.end = self._kept(tokens)


# The whole of it ------------------------------------------------------------------------------------------------------


def record(anatomy: Anatomy, inputs: dict[str, Any], rules: Rules | None = None, *, n_samples: int = 1) -> Recording:
    """Run the model once on `inputs`.

    Args:
        anatomy: The model and where its parts are.
        inputs: Keyword arguments for the model's forward.
        rules: The conventions; the defaults of `Rules` if None.
        n_samples: Number of samples in the inputs.
    """
    inputs = {name: x.clone() if isinstance(x, Tensor) and x.is_inference() else x for name, x in inputs.items()}
    try:
        found = _recorded(anatomy, inputs, rules or Rules(), n_samples)
    except OtherParts:
        other, _ = observe(anatomy.model, inputs, blocks=anatomy.asked)
        found = record(replace(other, n_alike=None), inputs, rules, n_samples=n_samples)
        origin = found.from_model("A recording")
        # The next input may take a different path again.
        return replace(found, origin=origin._replace(anatomy=replace(origin.anatomy, n_alike=other.n_alike)))
    except (TensorLensError, MemoryError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        with own_errors(anatomy.model, inputs), running(anatomy.model):
            anatomy.model(**inputs)  # raises if the model itself cannot take the input
        raise NotLinearError(_why_it_stopped(anatomy.model, error)) from error
    if found is None:
        raise never_ran(anatomy.model, anatomy.stack)
    return found


def _recorded(anatomy: Anatomy, inputs: dict[str, Any], rules: Rules, n_samples: int) -> Recording | None:
    """Try one anatomy; None if no block ran."""
    places, copies = ModulePlaces(anatomy.model), False
    while True:
        run = Tape(rules, weights=places.weights, n_samples=n_samples, copies=copies)
        recorder = Recorder(anatomy, inputs, run, places)
        try:
            found = recorder.go()
        except StartEarly:
            anatomy = replace(anatomy, starts_early=True)
            continue
        if not copies and run.changed_constants():
            copies = True  # the model has overwritten a constant: record again, with copies
            continue
        return found


def _why_it_stopped(model: nn.Module, error: Exception) -> str:
    """The message for an error that occurs only while recording, such as torch's about a tensor subclass."""
    ours = Path(__file__).parents[1]
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not Path(one.filename).is_relative_to(ours)]
    own = [one for one in frames if not Path(one.filename).is_relative_to(Path(torch.__file__).parent)]
    place = f" in line {own[-1].lineno} of {Path(own[-1].filename).name}, `{own[-1].line}`" if own else ""
    return (
        f"Under the rules `{type(model).__name__}` stopped{place}, although it runs on its own: "
        f"{type(error).__name__}: {error}. Expected code that accepts tensor subclasses; write that step in plain "
        "torch functions, or register an adapter for its module's class with `tensorlens.adapter`."
    )


# Before the first block -----------------------------------------------------------------------------------------------
#
# A skip from the embedding (`skip = x.clone()`, added back after the last block) is a function of X⁰ like everything
# else, but it is computed before the state enters the first block and becomes live. The torch functions before that
# are therefore noted, and those that took the state are run again once it is live.

NOTED = (Tensor, tuple, list)
"""Types of results that are noted."""

SAME = frozenset(["clone", "contiguous", "detach", "to", "dropout", "alias"])
"""Functions that may return the numbers they take, so that the argument is the state as well as the result."""


class Prologue(TorchFunctionMode):
    """Notes the functions that run before the first block, so that they can be repeated."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self._is_noting = False

    def start(self) -> None:
        """Start noting. Not a `with` block, because it ends in the middle of the model's own code."""
        self.__enter__()
        self._is_noting = True

    def pause(self) -> None:
        """Stop noting, and keep the notes: the code that follows is the library's, not the model's."""
        if self._is_noting:
            self._is_noting = False
            self.__exit__(None, None, None)

    def stop(self) -> None:
        """Stop noting."""
        self.pause()
        self._calls.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(result, NOTED):
            self._calls.append((func, args, kwargs, result))
        return result

    def repeat(self, run: Tape) -> None:
        """Run the noted functions whose arguments are live by now again, and stop noting."""
        calls = list(self._calls)
        self.stop()
        for function, args, _, result in reversed(calls):  # the state may be a copy of what others read
            is_same = type(result) is Live and name_of(function) in SAME and type(args[0]) is Tensor
            if is_same and _equal(result, args[0]):
                run.writes.borrow(args[0], run.slot_of(result))
        for function, args, kwargs, result in calls:
            if not kwargs and SIMPLE.issuperset(map(type, args)):
                continue  # the usual case: made only of positions and masks
            if not found_in(args, kwargs) or found_in(result):
                continue
            if (name := name_of(function)).endswith("_") or name in DESCRIBES:
                continue
            again = function(*args, **kwargs)
            for old, new in zip(_parts(result), _parts(again), strict=False):
                if is_live(new) and type(old) is Tensor and _equal(new, old):
                    run.writes.borrow(old, run.slot_of(new))


def _parts(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers; False if one was written to in between."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(raw(torch.allclose, a, b, equal_nan=True))
