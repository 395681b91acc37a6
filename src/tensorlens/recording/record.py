"""`record`: run a model once and keep the program it leaves behind."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tensorlens.models.anatomy import Anatomy
from tensorlens.models.plain_pass import evaluating, in_own_precision
from tensorlens.program.program import Program
from tensorlens.recording import rules as _rules  # noqa: F401  (fills the table)
from tensorlens.recording.conventions import Rules
from tensorlens.recording.layouts import state_of
from tensorlens.recording.live import is_live, value_of
from tensorlens.recording.recorder import Reached, Recorder, StartEarly, methods_seen, module_calls_seen
from tensorlens.recording.recording import Recording
from tensorlens.recording.tape import Tape, recording_on


def record(anatomy: Anatomy, inputs: dict[str, Any], rules: Rules | None = None, *, n_samples: int = 1) -> Recording:
    """Run the model once on `inputs`."""
    try:
        return _record(anatomy, inputs, rules or Rules(), n_samples)
    except StartEarly:
        return _record(replace(anatomy, starts_early=True), inputs, rules or Rules(), n_samples)


def _record(anatomy: Anatomy, inputs: dict[str, Any], rules: Rules, n_samples: int) -> Recording:
    run = Tape(rules or Rules(), n_samples=n_samples)
    recorder = run.recorder = Recorder(anatomy, inputs, run)
    given = dict(inputs)
    try:
        with ExitStack() as stack:
            stack.enter_context(in_own_precision())
            stack.enter_context(evaluating(anatomy.model))
            stack.enter_context(module_calls_seen())
            if not anatomy.channels:  # whose blocks were not seen to be called
                stack.enter_context(methods_seen(anatomy.blocks))
            stack.enter_context(recording_on(run))
            try:
                recorder.prologue.start()
                if "inputs_embeds" in given:
                    given["inputs_embeds"] = recorder._embed(given["inputs_embeds"])
                output = anatomy.model(**given)
                recorder.readout = state_of(output)
            except Reached:
                pass
            if recorder.end is None and anatomy.body_end == "":
                recorder._leave_body(recorder.readout)
            readout = recorder.readout
            readout_slot = run.slot_of(readout) if is_live(readout) else None
            if not recorder.rules_include_final_norm():
                recorder.end = None
                last = state_of(recorder.last_output, anatomy.state_place)
                recorder._leave_body(last)
    finally:
        recorder.prologue.stop()
        run.writes.forget()
        run.recorder = None
    if run.refused is not None:
        raise run.refused
    inputs_of = tuple(recorder.inputs_of_program)
    end = recorder.end
    slots = (*recorder.states, (end,))
    if recorder.starts_at_embedding:
        slots = (inputs_of, *slots[1:])
        recorder.values[0] = torch.cat(recorder.input_values, 1)
    program = Program(steps=tuple(run.steps), constants=run.constants, specs=run.specs, inputs=inputs_of, outputs=(end,))
    return Recording(
        anatomy=anatomy, inputs=inputs, rules=run.rules, program=program,
        states=(*recorder.values, recorder.end_value), slots=slots,
        readout=value_of(readout) if anatomy.has_head else None, readout_slot=readout_slot,
        n_encoder_blocks=recorder.n_encoder_blocks or 0, starts_at_embedding=recorder.starts_at_embedding,
        mixtures=tuple(run.mixtures), meetings=tuple(run.meetings), rules_applied=run.rules_applied,
        modules=tuple(recorder.modules), mixes_samples=run.mixes_samples,
    )
