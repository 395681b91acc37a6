"""`tensorlens explore`."""

from __future__ import annotations

import secrets
import socket
import threading
import webbrowser
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tensorlens.app.explorer import Limits
from tensorlens.app.options import FinalNorm, ModelOptions
from tensorlens.errors import InputError, missing_extra

if TYPE_CHECKING:
    from tensorlens.app.explorer.library import Library

FIRST_PORT = 8765


def explore(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Models by name, saved maps (.json, .safetensors), or folders of study reports.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port (default: a free one).", min=0, max=65535)] = None,
    browser: Annotated[bool, typer.Option(help="Open the browser.")] = True,
    host: Annotated[
        str, typer.Option(help="Address to serve on. If other machines can reach it, visitors need a token.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(help="Token that every visitor must show (default: generated if one is needed).")
    ] = None,
    time_limit: Annotated[float, typer.Option(help="Time limit for one question, in seconds.", min=1)] = Limits.seconds,
    max_tokens: Annotated[int, typer.Option(help="Longest text, in tokens.", min=1)] = Limits.tokens,
    final_norm: FinalNorm = True,
    reading: ModelOptions = ModelOptions(),  # noqa: B008  # a frozen record
) -> None:
    """Explore maps in the browser: type a text or drop an image, then click.

    Example: tensorlens explore smollm2-135m dinov2-small-saliency
    """
    for package in ("starlette", "uvicorn"):
        if find_spec(package) is None:
            raise missing_extra("The explorer", package, "explore")
    names = models or ["smollm2-135m"]
    for name in names:
        if not Path(name).exists():  # neither a saved map nor a folder: it must be the name of a model
            reading.check(name)
    from tensorlens.app.explorer.doors import LOOPBACK
    from tensorlens.app.explorer.library import open_library

    library = open_library(names, partial(reading.lens, final_norm=final_norm), is_recommended=reading.rules is None)
    is_local = host in LOOPBACK
    if token is not None and len(token) < 12:
        raise InputError(
            f"Expected a token of at least 12 characters, got {len(token)}. Leave it out to have one generated."
        )
    token = token or (None if is_local else secrets.token_urlsafe(24))
    listener = _listen(host, port)
    _serve(listener, library, host, token, Limits(seconds=time_limit, tokens=max_tokens), opens_browser=browser)


def _listen(host: str, port: int | None) -> socket.socket:
    """A listening socket on the requested port, or on the first free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reason = ""
    for candidate in (port,) if port is not None else (*range(FIRST_PORT, FIRST_PORT + 20), 0):
        try:  # visitors can wait from now on: the address is printed before the server is up
            return socket.create_server((host, candidate), family=family)
        except OSError as error:
            reason = error.strerror or str(error)
    raise InputError(f"Cannot serve on {host}, port {port}: {reason}. Choose another --port or --host.")


def _serve(
    listener: socket.socket, library: Library, host: str, token: str | None, limits: Limits, *, opens_browser: bool
) -> None:
    import uvicorn

    from tensorlens.app.explorer.doors import Access, allowed_hosts, configuration
    from tensorlens.app.explorer.server import create_app

    port = listener.getsockname()[1]
    hosts = allowed_hosts(host)
    app = create_app(library, access=Access(hosts=hosts, token=token), limits=limits)
    shown = socket.gethostname() if hosts is None else f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{port}/" + (f"?token={token}" if token else "")
    typer.echo(f"TensorLens explorer: {address}\nStop it with Ctrl+C.")
    if opens_browser:
        threading.Timer(0.6, webbrowser.open, (address,)).start()
    uvicorn.Server(configuration(app, limits)).run(sockets=[listener])
