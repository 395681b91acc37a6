"""The routes of the explorer. Every answer is JSON, a stream of JSON lines, a file to save, or part of the page."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from tensorlens.__about__ import __version__
from tensorlens.app.explorer.answer_questions import read_answer_ask
from tensorlens.app.explorer.answers import Answers, facts
from tensorlens.app.explorer.explained import ExplainedAnswers
from tensorlens.app.explorer.guard import Access, Guard, StrictJson
from tensorlens.app.explorer.jobs import Busy, Job, Work, Worker
from tensorlens.app.explorer.library import Library, kind_of
from tensorlens.app.explorer.limits import Limits
from tensorlens.app.explorer.questions import (
    read_ask,
    read_component,
    read_model,
    read_output,
    read_score,
    read_subject,
)
from tensorlens.app.explorer.recent import Recent
from tensorlens.app.options import RULES
from tensorlens.errors import InputError, TensorLensError
from tensorlens.maps.methods import METHODS
from tensorlens.maps.token_map import TokenMap
from tensorlens.strict_json import to_json
from tensorlens.views.page import component, inside_component, isolated, payload
from tensorlens.views.record import is_of_tensor

STATIC = Path(__file__).parent / "static"
_SHARED = "mount, element, visible, shorten, formatNumber, button, shadeAround, chooseShade, onShadeChange"
_KINDS = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".json": "application/json",
    ".csv": "text/csv",
    ".safetensors": "application/octet-stream",
}
_QUESTIONS = {
    "tensor.in_class": "Why this word?",
    "tensor.in_out": "What made this output?",
    "tensor.contribution": "How much came from each input?",
    "tensor.norm": "What could move this output?",
}
"""What a method answers, as a newcomer would ask it; baselines and controls keep their names."""
_DOWNLOADS = (".html", ".png", ".svg", ".json", ".csv", ".safetensors")
# A report brings its own scripts and styles; sandboxed, it is a stranger to this server.
_REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
)
_HEARTBEAT = 0.5


class TooLarge(InputError):
    """A body is longer than its limit."""


def create_app(library: Library, *, access: Access | None = None, limits: Limits | None = None) -> Starlette:
    """The explorer as an ASGI application.

    Args:
        library: The models, maps and reports it may show.
        access: Host names and token; loopback without a token if None.
        limits: Bounds on requests and memory; the defaults of `Limits` if None.
    """
    return _Explorer(library, limits or Limits()).app(access or Access())


class _Explorer:
    """The routes, and what they share."""

    def __init__(self, library: Library, limits: Limits) -> None:
        self.library, self.limits = library, limits
        self.worker = Worker(limits.waiting)
        self.answers = Answers(library, limits)
        self.explained = ExplainedAnswers(self.answers)
        self.worker.on_stuck = self.forget
        self.conversions = asyncio.Semaphore(limits.conversions)
        self.files: Recent[str, bytes] = Recent(16, 64 * 2**20)
        self.arriving = 0  # bytes of bodies that are not whole yet

    def forget(self) -> None:
        """Let go of what a thread that was given up may have left half done."""
        self.answers.forget()
        self.explained.forget()

    def app(self, access: Access) -> Starlette:
        routes = [
            Route("/", self.page),
            Route("/static/{name}", self.static),
            Route("/component.js", self.component),
            Route("/inside.js", self.inside_component),
            Route("/api/start", self.start),
            *(self._question(name, read) for name, read in self._questions().items()),
            Route("/api/images", self.upload, methods=["POST"]),
            Route("/api/saved/{number}", self.saved),
            Route("/api/results/{name}", self.download),
            Route("/reports/{number}", self.report),
        ]
        app = Starlette(
            routes=routes,
            middleware=[Middleware(Guard, access=access)],
            exception_handlers={TensorLensError: _explain},
            lifespan=self.lifespan,
        )
        app.state.explorer = self
        return app

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Load the first model while the browser opens; stop the worker at the end."""
        if self.library.names:
            first = self.library.names[0]
            self.worker.submit(Job(lambda job: self.answers.open_model(job, first), seconds=3600.0))
        yield
        await run_in_threadpool(self.worker.close)

    # The page ---------------------------------------------------------------------------------------------------------

    async def page(self, request: Request) -> Response:
        return _static("index.html")

    async def static(self, request: Request) -> Response:
        return _static(request.path_params["name"])

    async def component(self, request: Request) -> Response:
        script = isolated(component(), f"window.TensorLens = {{ {_SHARED} }};")
        return Response(script, media_type=_KINDS[".js"])

    async def inside_component(self, request: Request) -> Response:
        script = isolated(inside_component(), "window.TensorLensInside = { Inside };")
        return Response(script, media_type=_KINDS[".js"])

    async def start(self, request: Request) -> Response:
        """What there is to choose from."""
        opened = self.library.opened
        return StrictJson(
            {
                "version": __version__,
                "models": [
                    {"name": n, "kind": kind_of(opened[n]) if n in opened else None} for n in self.library.names
                ],
                "methods": [
                    {
                        "name": name,
                        "title": _QUESTIONS.get(name, name),
                        "summary": method.summary,
                        "takes_target": method.takes_target,
                        "is_of_tensor": is_of_tensor(name),
                    }
                    for name, method in METHODS.items()
                ],
                "members": list(RULES),
                "maps": [title for title, _ in self.library.maps],
                "reports": [report.title for report in self.library.reports],
                "limits": asdict(self.limits),
            }
        )

    # Questions --------------------------------------------------------------------------------------------------------

    def _questions(self) -> dict[str, Callable[[Any], Work]]:
        """By address, from the document of a question to the work that answers it."""
        answers, limits = self.answers, self.limits
        return {
            "open": lambda asked: partial(answers.open_model, name=read_model(asked)),
            "map": lambda asked: partial(answers.map, ask=read_ask(asked, limits)),
            "answer": lambda asked: partial(self.explained.explain, ask=read_answer_ask(asked, limits)),
            "predictions": lambda asked: partial(
                answers.predict, subject=read_subject(asked, limits), out_token=read_output(asked)
            ),
            "inside": lambda asked: partial(answers.inside, ask=read_ask(asked, limits)),
            "ablate": lambda asked: partial(
                answers.ablate, ask=read_ask(asked, limits), component=read_component(asked)
            ),
            "why": lambda asked: partial(answers.why, ask=read_ask(asked, limits), score=read_score(asked)),
        }

    def _question(self, name: str, read: Callable[[Any], Work]) -> Route:
        async def ask(request: Request) -> Response:
            return self._stream(request, read(await self._json(request)))

        return Route(f"/api/{name}", ask, methods=["POST"])

    async def upload(self, request: Request) -> Response:
        data = await self._body(request, self.limits.image_bytes)
        async with self.conversions:
            return StrictJson({"image": await run_in_threadpool(self.answers.add_image, data)})

    # What is there already --------------------------------------------------------------------------------------------

    async def saved(self, request: Request) -> Response:
        name = f"saved-{request.path_params['number']}"
        found = self._kept(name)
        async with self.conversions:
            event = {"type": "done", "result": name, "map": await run_in_threadpool(lambda: payload(found.view()))}
        return StrictJson(event | facts(found))

    async def download(self, request: Request) -> Response:
        name, _, suffix = request.path_params["name"].rpartition(".")
        if f".{suffix}" not in _DOWNLOADS:
            raise InputError(f"Expected a name ending in one of {' '.join(_DOWNLOADS)}, got {suffix[:20]!r}.")
        found = self._kept(name)
        in_words = request.query_params.get("words") == "1"
        is_certified = bool(found.meta.get("certificate"))  # the same map, before and after
        async with self.conversions:
            found = found.words() if in_words else found
            content = await self._file(f"{name}.{suffix} {in_words} {is_certified}", found, f".{suffix}")
        file = f"{found.method.replace('.', '-')}.{suffix}"
        headers = {"content-disposition": f'attachment; filename="{file}"'}
        return Response(content, media_type=_KINDS[f".{suffix}"], headers=headers)

    async def report(self, request: Request) -> Response:
        number = _number(request.path_params["number"])
        if number >= len(self.library.reports):
            raise InputError(f"There is no such report; the explorer was started with {len(self.library.reports)}.")
        text = await run_in_threadpool(self.library.reports[number].path.read_text, "utf-8")
        return HTMLResponse(text, headers={"content-security-policy": _REPORT_POLICY})

    def _kept(self, name: str) -> TokenMap:
        kind, _, number = name.partition("saved-")
        if kind == "" and _number(number) < len(self.library.maps):
            return self.library.maps[_number(number)][1]
        found = self.answers.results.get(name)
        if found is None:
            raise InputError("This map is no longer kept by the server. Ask for it again, then save it.")
        return found

    # Bodies and streams -----------------------------------------------------------------------------------------------

    async def _json(self, request: Request) -> Any:
        body = await self._body(request, self.limits.json_bytes)
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise InputError(f"Expected a JSON document, got something else ({type(error).__name__}).") from error

    async def _body(self, request: Request, most: int) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.upload_seconds):
                async for part in request.stream():
                    body += part
                    self.arriving += len(part)
                    if len(body) > most:
                        raise TooLarge(f"Expected at most {most:,} bytes, got more. Send something smaller.")
                    if self.arriving > self.limits.body_bytes:
                        raise Busy("Expected room for one more file, got too many at once. Send it again in a moment.")
        except TimeoutError:
            raise InputError(
                f"Expected the whole request within {self.limits.upload_seconds:g} s, got a part."
            ) from None
        finally:
            self.arriving -= len(body)
        return bytes(body)

    async def _file(self, key: str, found: TokenMap, suffix: str) -> bytes:
        """A map as a file: made once, however many ask for it."""
        made = self.files.get(key)
        if made is None:
            made = await run_in_threadpool(_saved, found, suffix)
            self.files.put(key, made, len(made))
        return made

    def _stream(self, request: Request, work: Work) -> Response:
        """Queue the work and give its news line by line as they come."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        client = request.client.host if request.client else ""
        job = Job(work, seconds=self.limits.seconds, notify=lambda: _wake(loop, news), client=client)
        self.worker.submit(job)
        return StreamingResponse(self._lines(request, job, news), media_type="application/x-ndjson")

    async def _lines(self, request: Request, job: Job, news: asyncio.Event) -> AsyncIterator[str]:
        """News as lines, with a beat in between; a reader who went away is noticed, and the work stopped."""
        try:
            while not await request.is_disconnected():
                news.clear()
                self.worker.rescue()
                events = job.news()
                ahead = self.worker.ahead_of(job)
                if not events:
                    events = [{"type": "beat"} if ahead is None else {"type": "waiting", "ahead": ahead}]
                for event in events:
                    yield to_json(event, ascii_only=True) + "\n"
                if events[-1]["type"] in ("done", "error"):
                    return
                await _quietly(asyncio.wait_for(news.wait(), _HEARTBEAT))
        except ClientDisconnect:
            return
        finally:
            job.cancel()


async def _quietly(waiting: Any) -> None:
    try:
        await waiting
    except TimeoutError:
        return


def _wake(loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(news.set)


def _number(text: str) -> int:
    """A number from an address; larger than any list if it is not one."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 10**6


def _static(name: str) -> Response:
    content = _files().get(name)
    if content is None:
        return StrictJson({"type": "error", "message": "There is no such page."}, status_code=404)
    return Response(content, media_type=_KINDS[Path(name).suffix])


@cache
def _files() -> dict[str, bytes]:
    """The page's files by name: what is asked for is looked up here and never on disk."""
    return {path.name: path.read_bytes() for path in STATIC.iterdir() if path.suffix in _KINDS}


def _saved(found: TokenMap, suffix: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="tensorlens-") as folder:
        return found.save(Path(folder) / f"map{suffix}").read_bytes()


def _status(error: Exception) -> int:
    return 503 if isinstance(error, Busy) else 413 if isinstance(error, TooLarge) else 400


async def _explain(request: Request, error: Exception) -> Response:
    return StrictJson({"type": "error", "message": str(error)}, status_code=_status(error))
