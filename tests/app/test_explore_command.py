"""`tensorlens explore` as a command: what it prints, whom it lets in, and what it says when it cannot start."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pytest
import torch
from typer.testing import CliRunner

import tensorlens as tl
from tensorlens.app import explore_command
from tensorlens.app.cli import app


@pytest.fixture
def saved_map(tmp_path):
    path = tmp_path / "map.json"
    share = torch.zeros(2)
    tl.TokenMap(scores=torch.eye(2), in_tokens=("a", "b"), out_tokens=("a", "b"), method="m", bias_share=share).save(
        path
    )
    return path


@contextmanager
def explorer(*arguments: str, errors: IO[str] | None = None) -> Iterator[str]:
    """The command in a process of its own; gives the address that it prints."""
    command = [sys.executable, "-u", "-m", "tensorlens", "explore", "--no-browser", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found
            yield found.group()
        finally:
            process.terminate()


def status(address: str) -> int:
    try:
        browser = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor())
        with browser.open(address, timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_here_no_token_is_needed(saved_map):
    with explorer(str(saved_map), "--port", "0") as address:
        assert address.startswith("http://127.0.0.1:") and "token" not in address
        assert status(address) == 200


def test_beyond_this_machine_everyone_needs_the_token(saved_map):
    with explorer(str(saved_map), "--port", "0", "--host", "0.0.0.0") as address:
        port, token = re.search(r":(\d+)/\?token=(\S{24,})", address).groups()  # type: ignore[union-attr]
        here = f"http://127.0.0.1:{port}/"
        assert status(here) == 401
        assert status(f"{here}?token={token[:-1]}") == 401
        assert status(f"{here}?token={token}") == 200


@pytest.mark.parametrize("in_order", [True, False], ids=["closed", "reset"])
def test_a_client_that_hangs_up_leaves_no_trace(folder, tmp_path, in_order):
    """In the head, in the body of a question and of a picture, and while the answer comes."""
    asked = json.dumps({"model": folder, "text": "Red and blue", "method": "tensor.norm"})
    head = "Host: 127.0.0.1\r\nContent-Length: {}\r\n\r\n"
    sent = [
        "GET / HT",
        f"POST /api/map HTTP/1.1\r\n{head.format(1000)}{{",
        f"POST /api/images HTTP/1.1\r\n{head.format(10**6)}{'x' * 70_000}",
        f"POST /api/map HTTP/1.1\r\n{head.format(len(asked))}{asked}",
        "GET /component.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    ]
    errors = tmp_path / "errors.txt"
    with errors.open("w") as file, explorer(folder, "--port", "0", errors=file) as address:
        port = int(re.search(r":(\d+)/", address).group(1))  # type: ignore[union-attr]
        for text in sent * 2:
            one = socket.create_connection(("127.0.0.1", port))
            if not in_order:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.sendall(text.encode())
            time.sleep(0.2)
            one.close()
        assert status(address) == 200
    said = errors.read_text()
    assert said.startswith("Loading ") and "Traceback" not in said and "rror" not in said, said


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["explore", "--no-browser", *arguments])
    assert result.exit_code != 0
    return " ".join((result.output + str(result.exception)).split())


def test_a_port_that_is_taken(saved_map):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert f"port {port}" in refused(str(saved_map), "--port", port)


def test_a_short_token_is_refused(saved_map):
    assert "12 characters" in refused(str(saved_map), "--token", "short")


def test_without_the_extra_it_gives_the_install_line(saved_map, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(explore_command, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    assert 'pip install "attention-tensorlens[explore]"' in refused(str(saved_map))


def test_it_opens_the_browser_at_its_own_address(saved_map, monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(
        explore_command.threading,
        "Timer",
        lambda seconds, work, args: type("Now", (), {"start": lambda _: work(*args)})(),
    )
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: [one.close() for one in sockets])
    result = CliRunner().invoke(app, ["explore", str(saved_map)])
    assert result.exit_code == 0, result.output
    assert opened and opened[0] in result.output
