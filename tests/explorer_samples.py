"""Tiny models for the explorer, with a tokenizer or an image processor, and a server in a thread."""

from __future__ import annotations

import http.client
import io
import json
import threading
import time
from contextlib import closing, contextmanager
from typing import Any

import torch
import uvicorn
from PIL import Image
from starlette.testclient import TestClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from zoo import build

import tensorlens as tl
from tensorlens.app.explore_command import _listen
from tensorlens.app.explorer import Limits
from tensorlens.app.explorer.doors import Access, configuration
from tensorlens.app.explorer.library import Library
from tensorlens.app.explorer.server import create_app

HOST = "http://127.0.0.1:8765"
SENTENCE = "The cat sat on the mat"
_WORDS = ("The", "Ġcat", "Ġsat", "Ġon", "Ġthe", "Ġmat", "Ġdog", "<script>alert(1)</script>", "شمس", "👩‍🚀")


def tokenizer() -> PreTrainedTokenizerFast:
    """Words by name; any other one is `<pad>`."""
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<s>", *_WORDS, *(f"w{k}" for k in range(48))])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement="Ġ", prepend_scheme="never")
    inner.decoder = decoders.Metaspace(replacement="Ġ", prepend_scheme="never")
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", unk_token="<pad>")


class Pixels:
    """An image processor: resize, nothing else."""

    def __call__(self, images: Any, return_tensors: str) -> dict[str, torch.Tensor]:
        pixels = torch.tensor(list(images.resize((8, 8)).tobytes()), dtype=torch.float64).reshape(8, 8, 3)
        return {"pixel_values": (pixels / 255 - 0.5).permute(2, 0, 1)[None]}


def load(name: str) -> tl.Lens:
    processor = Pixels() if name in ("vit", "dinov2") else tokenizer()
    return tl.Lens(build(name).double(), processor, name=name)


def library(*names: str, **others: Any) -> Library:
    return Library(**{"names": names or ("gpt2", "vit", "bert-classifier"), "load": load} | others)


def png(width: int = 40, height: int = 30, colour: tuple[int, int, int] = (200, 90, 40)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(buffer, "PNG")
    return buffer.getvalue()


def events(response: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in response.text.splitlines()]


def make_client(shelf: Library | None = None, limits: Limits | None = None, **access: Any) -> Any:
    """The application without a socket."""
    app = create_app(shelf or library(), access=Access(**access), limits=limits)
    return TestClient(app, base_url=HOST, raise_server_exceptions=False)


@contextmanager
def serving(shelf: Library, limits: Limits | None = None, **access: Any):
    """A real server on a free port; yields its address and its inside."""
    listener = _listen("127.0.0.1", 0)
    app = create_app(shelf, access=Access(**access), limits=limits)
    bounds = limits or Limits()
    server = uvicorn.Server(configuration(app, bounds, log_level="error", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", app.state.explorer
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listener.close()


def post_question(address: str, timeout: float = 60.0, **question):
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=timeout)
    body = {"model": "gpt2", "text": SENTENCE, "method": "tensor.in_out"} | question
    connection.request("POST", "/api/map", json.dumps(body))
    response = connection.getresponse()
    lines = response.read().decode().splitlines()
    connection.close()
    return response.status, json.loads(lines[-1])


def status_of(address: str, path: str, data: bytes | None = None) -> int:
    with closing(http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)) as connection:
        connection.request("GET" if data is None else "POST", path, data)
        response = connection.getresponse()
        response.read()
        return response.status
