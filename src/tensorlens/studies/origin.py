"""Where a run began: commit, machine, time. Noted, not compared, since it does not change what a run means."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def origin() -> dict[str, Any]:
    """Commit, Python, platform, device and time of this moment."""
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device_name(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _commit() -> str | None:
    """The commit of this package's sources; None where they are not a checkout."""
    here = Path(__file__)
    try:
        # Tracked there, or the repository is somebody else's, with this package installed inside it.
        tracked = _git(here.parent, "ls-files", "--error-unmatch", here.name)
        return (_git(here.parent, "rev-parse", "HEAD") or None) if tracked else None
    except (OSError, subprocess.TimeoutExpired):
        return None


def _git(folder: Path, *command: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *command], capture_output=True, text=True, timeout=10
    ).stdout.strip()


def device_name() -> str:
    """The name of the GPU, or ``"cpu"``."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
