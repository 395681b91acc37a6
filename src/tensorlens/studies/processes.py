"""Several processes that share a run: the rank of this one, as torchrun and `accelerate launch` set it."""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tensorlens.errors import InputError
from tensorlens.files import to_json

RUN_ID = "tensorlens"
"""The variable that tells a process that `hand_over` started it."""


@dataclass(frozen=True, kw_only=True)
class Processes:
    """This process among those that share a run."""

    rank: int = 0
    count: int = 1

    @classmethod
    def from_environment(cls) -> Processes:
        """As the launcher says in RANK and WORLD_SIZE; one process without them."""
        rank, count = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        if not (rank.isdecimal() and count.isdecimal() and int(rank) < int(count)):
            raise InputError(f"Expected RANK from 0 to below WORLD_SIZE; got RANK={rank}, WORLD_SIZE={count}.")
        return cls(rank=int(rank), count=int(count))

    @staticmethod
    def device() -> str | None:
        """The GPU of this process among those of its machine; None without a launcher or a GPU."""
        import torch

        local = os.environ.get("LOCAL_RANK")
        if local is None or not torch.cuda.is_available():
            return None
        return f"cuda:{int(local) % torch.cuda.device_count()}"

    @property
    def is_first(self) -> bool:
        """Whether this is the process that draws the bar and writes the summary."""
        return self.rank == 0


def tell_launcher(message: str) -> bool:
    """Leave an error to the process that waits in `hand_over`, which shows one for all; False if there is none."""
    if os.environ.get("TORCHELASTIC_RUN_ID") != RUN_ID or "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return False
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(to_json({"message": message, "timestamp": int(time.time())}))
    return True


def hand_over(count: int, program: tuple[str, ...] = ("-m", "tensorlens")) -> bool:
    """Run this very command in `count` processes by torch's launcher and wait for them; False if it is to run here.

    When a process fails, all end, one error is shown, and the samples that are finished stay on the disk.
    """
    if count == 1 or "RANK" in os.environ:
        return False
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    logging.disable(logging.CRITICAL)  # this process only waits, and what the others say is enough
    config = LaunchConfig(
        run_id=RUN_ID,
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)(*program, *sys.argv[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        said = f"process {rank} of {count} ended with {failure.exitcode}; run the same command again to resume."
        sys.stderr.write(f"tensorlens: {failure.message if Path(failure.error_file).is_file() else said}\n")
        sys.exit(failure.exitcode if failure.exitcode > 0 else 1)
    except SignalException:
        raise KeyboardInterrupt from None
    return True
