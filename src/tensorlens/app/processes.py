"""`--processes`: the option of the commands whose run several processes can share."""

from __future__ import annotations

from typing import Annotated

import typer

NumberOfProcesses = Annotated[
    int, typer.Option(help="Processes that share the run on this machine; it takes several to fill a GPU.", min=1)
]
