"""Parts of a data set on the machines of a Ray cluster: one actor per GPU, or per CPU where there is none.

An actor that is lost is started again elsewhere and its part computed again; parts come back to the machine that asked
and are written there, so that no file system need be shared.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm import tqdm

from tensorlens.errors import InputError, missing_extra
from tensorlens.mapper import Mapper
from tensorlens.studies.map_table import EncodedPart, encoded

AHEAD = 2
"""Parts that wait for each actor, so that none is idle while a finished one is written."""


QUIET_SECONDS = 60.0
"""After this long without a finished part, we say what the cluster has free."""


class PartActor:
    """Maps parts; lives in a process of the cluster."""

    def __init__(self, mapper: Mapper) -> None:
        self.mapper = mapper

    def part(self, number: int, rows: list[Any], first_row: int) -> tuple[int, int, EncodedPart]:
        """Number, number of rows and content of a part."""
        return number, len(rows), encoded(self.mapper, rows, first_row)


def parts_on_ray(
    address: str, mapper: Mapper, waiting: Iterable[tuple[int, list[Any], int]], n_actors: int | None = None
) -> Iterator[tuple[int, int, EncodedPart]]:
    """Parts as the cluster finishes them.

    Args:
        address: The cluster's: ``auto``, ``host:port`` or ``ray://host:port``; ``local`` starts one on this machine.
        mapper: What to do with the rows.
        waiting: Number, rows and first row of each part.
        n_actors: Processes; one per GPU if None, or one less than there are CPUs, so that other tasks find one.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise missing_extra("`--ray`", "ray", "ray") from None
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InputError(f"Expected a Ray cluster at {address!r}: {error} Start one: ray start --head") from error
    resources = ray.cluster_resources()
    n_gpus, n_cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    count = n_actors or n_gpus or max(1, n_cpus - 1)
    kind = ray.remote(num_cpus=1, num_gpus=1 if n_gpus else 0, max_restarts=-1, max_task_retries=-1)(PartActor)
    actors = [kind.remote(mapper) for _ in range(count)]
    source, running = iter(waiting), {}
    for actor in actors * AHEAD:
        _give(source, actor, running)
    try:
        while running:
            finished, _ = ray.wait(list(running), num_returns=1, timeout=QUIET_SECONDS)
            if not finished:
                _tell_of_quiet(count, n_gpus, ray.available_resources())
                continue
            _give(source, running.pop(finished[0]), running)
            yield ray.get(finished[0])
    finally:
        for actor in actors:  # their CPUs and GPUs are free for whoever comes next, even after an error
            ray.kill(actor)


def _tell_of_quiet(n_actors: int, n_gpus: int, free: dict[str, float]) -> None:
    """Processes that find no place wait for ever, and so do the parts that they were given."""
    kind = "GPU" if n_gpus else "CPU"
    tqdm.write(
        f"tensorlens: no part has come back for {QUIET_SECONDS:.0f} s. Expected room for {n_actors} processes, one "
        f"{kind} each; the cluster has {free.get(kind, 0.0):g} free besides those that found theirs. If parts are "
        f"merely long, wait; otherwise add machines, or give it more (`ray start --num-{kind.lower()}s`).",
        file=sys.stderr,
    )


def _give(source: Iterator[tuple[int, list[Any], int]], actor: Any, running: dict[Any, Any]) -> None:
    """The next part to an actor, if there is one."""
    part = next(source, None)
    if part is not None:
        running[actor.part.remote(*part)] = actor
