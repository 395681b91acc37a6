"""`Recording`: what one pass left behind: the program, the states, and where it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tensorlens.errors import AnatomyError
from tensorlens.models.anatomy import Anatomy
from tensorlens.program.marks import Meeting, Mixture, count_heads
from tensorlens.program.program import Program, SideChannelError
from tensorlens.recording.conventions import Rules


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    r"""What one pass left behind.

    Attributes:
        anatomy: Where the model's parts are.
        inputs: What the model was called with.
        rules: The conventions in force.
        program: All steps of the pass, from $X^0$ on.
        states: $X^0 … X^N$, each (sample, token, channel); `states[n]` enters block n, the last is the output. With an
            encoder, the encoder's tokens come first and the decoder's after them; the last is the decoder's alone.
        slots: The slots of each of them: one, or the encoder's and the decoder's.
        readout: What the pass ended with: the input of the unembedding, or the logits of another head; None without a
            head.
        readout_slot: Its slot, if it is live.
        n_encoder_blocks: How many of the blocks are the encoder's.
        mixtures: Where attention met values.
        meetings: Where queries met keys.
        rules_applied: How often each rule was applied, by (rule, module).
    """

    anatomy: Anatomy
    inputs: dict[str, Any] = field(repr=False)
    rules: Rules
    program: Program = field(repr=False)
    states: tuple[Tensor, ...] = field(repr=False)
    slots: tuple[tuple[int, ...], ...] = field(repr=False)
    readout: Tensor | None = field(default=None, repr=False)
    readout_slot: int | None = None
    n_encoder_blocks: int = 0
    starts_at_embedding: bool = False
    mixtures: tuple[Mixture, ...] = field(default=(), repr=False)
    meetings: tuple[Meeting, ...] = field(default=(), repr=False)
    rules_applied: Mapping[tuple[str, str], int] = field(default_factory=dict, repr=False)
    modules: tuple[tuple[str, int | None, float], ...] = field(default=(), repr=False)
    mixes_samples: str | None = None

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self.anatomy.model

    @property
    def n_blocks(self) -> int:
        """Number of blocks, counted by call."""
        return len(self.states) - 1

    @property
    def n_samples(self) -> int:
        """How many samples were recorded together."""
        return len(self.states[0])

    @cached_property
    def n_heads(self) -> dict[int, int]:
        """Number of attention heads by block, where a head axis was recognised."""
        found: dict[int, int] = {}
        for mixture in self.mixtures:
            n_heads = count_heads(self.program, mixture)
            if n_heads is not None:
                found[mixture.block] = n_heads
        return found

    def part(self, start: int, stop: int, heads: Mapping[int, Tensor] | None = None, *, to_logits: bool = False) -> Program:
        """The program from the state entering block `start` to the one entering `stop`, or to what the head reads."""
        outputs = (self.readout_slot,) if to_logits else self.slots[stop]
        assert None not in outputs
        program = self.program if not heads else self.program.scaled(self._factors(heads))
        try:
            return program.part(self.slots[start], outputs)  # type: ignore[arg-type]
        except SideChannelError as error:
            raise AnatomyError(
                f"Block {start} cannot be the first of a range in `{type(self.model).__name__}`: {error} "
                "Take ranges that begin at block 0."
            ) from None

    def _factors(self, heads: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Multipliers of heads at the mixtures of the blocks named."""
        found = {}
        for mixture in self.mixtures:
            if mixture.block in heads and count_heads(self.program, mixture) is not None:
                spec = self.program.specs[mixture.slot]
                found[mixture.slot] = heads[mixture.block].to(dtype=spec.dtype, device=spec.device)[:, None, None]
        return found
