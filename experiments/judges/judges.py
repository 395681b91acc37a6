"""The judges on real weights, from `judges.json` (docs/leaderboard.md), every run in processes of its own.

    python experiments/judges/judges.py --data DATA --out FOLDER --model smollm2-135m=PATH --model gemma3-270m=PATH

DATA holds evidence/, needles/, pairs/, tracr/ and wikitext-2/. PATH is a folder or a file; without it the name is
loaded. A run's options hold for every model, but for what stands under `of` and the model's name. Runs that were
stopped go on when the same command is given again; what is not finished after --seconds is stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
BEFORE_PEERS = 90.0
"""Seconds of --seconds that are kept for our own methods, so that peers are ended before the run is."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", action="append", required=True, help="NAME or NAME=PATH; repeatable")
    parser.add_argument("--config", type=Path, default=HERE / "judges.json")
    parser.add_argument("--only", action="append", help="a run of the config, or ways; repeatable")
    parser.add_argument("--leave-out", action="append", default=[], help="a run that is not wanted; repeatable")
    parser.add_argument("--peer-python", help="interpreter of the peers' environment, for the runs of peers")
    parser.add_argument("--seconds", type=float, default=10**6)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
    else:
        share_out(arguments)


def share_out(arguments: argparse.Namespace) -> None:
    """Start every run of every model, wait, and say how each ended."""
    config = json.loads(arguments.config.read_text("utf-8"))
    processes = {name: run["processes"] for name, run in config["runs"].items()} | {"ways": 1}
    wanted = [name for name in arguments.only or processes if name not in arguments.leave_out]
    arguments.out.mkdir(parents=True, exist_ok=True)
    began, started = time.monotonic(), []
    for model in arguments.model:
        for name in wanted:
            if config["runs"].get(name, {}).get("once") and model != arguments.model[0]:
                continue  # the programs bring their own models
            for rank in range(processes[name]):
                log = arguments.out / f"{model.partition('=')[0]}-{name}-{rank}.log"
                started.append((log.stem, log, start(arguments, model, name, rank, processes[name], log)))
    while time.monotonic() - began < arguments.seconds and any(one.poll() is None for _, _, one in started):
        time.sleep(0.5)
    for name, log, process in started:
        code = process.poll()
        if code is None:
            process.terminate()
            process.wait()
        said = log.read_text("utf-8", "replace").strip()
        print(f"== {name}: {'stopped; goes on when started again' if code is None else f'exit code {code}'}")
        print(said[-1500:] if code else said[-4000:], flush=True)
    print(f"{time.monotonic() - began:.0f} s")


def start(arguments: argparse.Namespace, model: str, name: str, rank: int, count: int, log: Path) -> subprocess.Popen:
    command = [
        sys.executable,
        __file__,
        "--data",
        str(arguments.data),
        "--out",
        str(arguments.out),
        "--model",
        model,
        "--config",
        str(arguments.config),
        "--worker",
        name,
        "--seconds",
        str(arguments.seconds),
        *(["--peer-python", arguments.peer_python] if arguments.peer_python else []),
    ]
    environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as said:
        return subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT)


def work(arguments: argparse.Namespace) -> None:
    """One run of one model in this process."""
    import tensorlens as tl
    from tensorlens import studies
    from tensorlens.studies.judge_study.report import counts_line, judge_table, set_table
    from tensorlens.studies.processes import Processes

    config = json.loads(arguments.config.read_text("utf-8"))
    name, _, path = arguments.model[0].partition("=")
    loaded = tl.load(path or name, dtype=config["dtype"], attention=config["attention"])
    lens = tl.Lens(loaded.model, loaded.processor, name=name)
    is_own = config["runs"].get(arguments.worker, {}).get("once")
    out = arguments.out / ("compiled" if is_own else name) / arguments.worker
    if arguments.worker == "ways":
        from ways import search

        print(json.dumps(search(lens, arguments.data, out, config["ways"]), indent=1))
        return
    run = config["runs"][arguments.worker]
    options = run["options"] | run.get("of", {}).get(name, {}) | {"peer_python": arguments.peer_python}
    options["peer_total_seconds"] = max(30.0, arguments.seconds - BEFORE_PEERS)
    result = studies.judge(lens, arguments.data, out, progress=False, **options)
    if Processes.from_environment().is_first:
        for judge, found in result.summary["judges"].items():
            print(f"{name}, {judge}: {counts_line(found)}")
            if found["measures"]:
                print(f"{judge_table(found)}\n\n{set_table(found)}\n{found['missing']}")


if __name__ == "__main__":
    main()
