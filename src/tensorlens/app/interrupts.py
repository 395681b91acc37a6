"""Ctrl-C, said in one line."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import typer

STOPPED = 130
"""What a shell expects of a program that was stopped by Ctrl-C."""


def interruptible(command: Callable[..., None], *, continues: bool) -> Callable[..., None]:
    """The command, ending in one line when it is interrupted.

    Args:
        command: What to run.
        continues: Whether what it has done is on the disk, so that the same command goes on from there.
    """

    @wraps(command)
    def called(*given: Any, **values: Any) -> None:
        try:
            command(*given, **values)
        except KeyboardInterrupt:
            if "RANK" not in os.environ:  # of several processes the one that started them speaks for all
                more = " What is done is kept: the same command continues." if continues else ""
                typer.echo(f"\ntensorlens: stopped.{more}", err=True)
            raise typer.Exit(STOPPED) from None

    return called
