"""What a run of judges is asked to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensorlens.studies.judge_study import JUDGES
from tensorlens.studies.judge_study.methods import check_methods
from tensorlens.studies.judge_study.peers import PEERS
from tensorlens.studies.options import check_positive, checked_names


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """Everything a run of judges depends on besides model and data.

    Attributes:
        judges: Which of `JUDGES`.
        methods: Names of maps, with the member of the family after an @ (``tensor.in_class@attn_lrp``); all if None.
        peers: Which of `PEERS` are judged beside them, each in a process of its own.
        limit: Items of each set, at most.
        lengths: Of needles: about how many tokens a prompt has.
        n_tokens: Of single tokens: length of a window.
        seed: Of what is drawn: replaced tokens, and the bootstrap.
        group_size: Items that share a recording. Numbers depend on it by rounding alone.
        peer_python: Interpreter of the environment in which the peers are installed; this one's if None.
        peer_seconds: How long a peer may take for one item before it is given up.
        peer_total_seconds: How long a peer may take for all items; what it has answered by then counts.
        peer_limit: Items of each set that peers are asked about, at most; as many as `limit` if None.
        peer_workers: Peers that run at once. More than one makes their times say little.
    """

    judges: Sequence[str] = ("evidence",)
    methods: Sequence[str] | None = None
    peers: Sequence[str] = ()
    limit: int | None = None
    lengths: Sequence[int] = (512,)
    n_tokens: int = 32
    seed: int = 0
    group_size: int = 32
    peer_python: str | None = None
    peer_seconds: float = 60.0
    peer_total_seconds: float | None = None
    peer_limit: int | None = None
    peer_workers: int = 1

    def __post_init__(self) -> None:
        check_positive(self, "limit", "n_tokens", "group_size", "peer_limit", "peer_workers")
        object.__setattr__(self, "judges", checked_names(self.judges, JUDGES, "judges"))
        if self.methods is not None:
            given = (self.methods,) if isinstance(self.methods, str) else tuple(self.methods)
            object.__setattr__(self, "methods", check_methods(given))
        if self.peers:
            object.__setattr__(self, "peers", checked_names(self.peers, PEERS, "peers"))
        object.__setattr__(self, "lengths", tuple(self.lengths))
