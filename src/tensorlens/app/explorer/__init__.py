"""The explorer: a small web server on this machine, for one person, and the page it serves.

`server` has the routes, `doors` checks requests and sockets, `questions` has the valid questions, `Limits` their sizes,
`jobs` the worker and its queue, `answers` the work, `library` what was named at start and what is kept between
questions. The page is in `static/`; `views` draws the maps on it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds that keep one request from exhausting the machine.

    Attributes:
        characters: Length of a text.
        tokens: Length of a text in tokens.
        json_bytes: Size of the body of a question.
        image_bytes: Size of an uploaded file.
        image_pixels: Size of a decoded picture.
        images: Number of uploaded pictures kept.
        connections: Open sockets; beyond this number, the one that has been idle longest is closed.
        header_seconds: Time for the head of a request to arrive.
        seconds: Time for one question, from its start.
        upload_seconds: Time for a body to arrive.
        body_bytes: Size of all bodies that arrive at the same time.
        tensors: Number of model passes kept.
        tensor_bytes: Memory of all kept passes; the newest is kept in any case.
        result_bytes: Memory of the maps kept for download.
    """

    characters: int = 20_000
    tokens: int = 2_048
    json_bytes: int = 128 * 1024
    image_bytes: int = 12 * 2**20
    image_pixels: int = 40_000_000
    images: int = 32
    connections: int = 128
    header_seconds: float = 10.0
    seconds: float = 300.0
    upload_seconds: float = 30.0
    body_bytes: int = 96 * 2**20
    tensors: int = 4
    tensor_bytes: int = 3 * 2**30
    result_bytes: int = 256 * 2**20
