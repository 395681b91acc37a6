"""The routes of the explorer. Every answer is JSON, a stream of JSON lines, a file to save, or part of the page."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from tensorlens.__about__ import __version__
from tensorlens.app.explorer import Limits
from tensorlens.app.explorer.answers import Answers, facts
from tensorlens.app.explorer.doors import Access, Guard, StrictJson
from tensorlens.app.explorer.jobs import Busy, Job, Work, Worker
from tensorlens.app.explorer.library import Library, can_answer, input_kind
from tensorlens.app.explorer.questions import (
    AblateAsk,
    AnswerAsk,
    Ask,
    CircuitAsk,
    OpenAsk,
    SimilarAsk,
    WhyAsk,
    read_question,
)
from tensorlens.errors import InputError, TensorLensError
from tensorlens.files import to_json
from tensorlens.maps.methods import METHODS
from tensorlens.maps.token_map import TokenMap
from tensorlens.recording.conventions import RULE_SETS
from tensorlens.views.captions import is_of_tensor
from tensorlens.views.page import component, isolated, payload

STATIC = Path(__file__).parent / "static"
_SHARED = (
    "mount, Inside, Pairs, element, visible, shorten, formatNumber, button, shadeAround, chooseShade, onShadeChange"
)
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
_ASKED: dict[str, type[OpenAsk]] = {
    "open": OpenAsk,
    "add": OpenAsk,
    "map": Ask,
    "predictions": Ask,
    "inside": Ask,
    "ablate": AblateAsk,
    "why": WhyAsk,
    "circuit": CircuitAsk,
    "answer": AnswerAsk,
    "similar": SimilarAsk,
}
"""Methods of `Answers`, each with a route, and the question that it takes."""
_QUESTIONS = {
    "tensor.in_class": "Why this word?",
    "tensor.in_out": "What made this output?",
    "tensor.contribution": "How much came from each input?",
    "tensor.norm": "What could move this output?",
}
"""The question that a method answers, in plain words; baselines and controls keep their names."""
_DOWNLOADS = (".html", ".png", ".svg", ".json", ".csv", ".safetensors")
# A report has its own scripts and styles; in a sandbox, it cannot reach this server.
_REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
)
_HEARTBEAT = 0.5
_MODEL_SECONDS = 3600.0  # for the first model, which may have to be downloaded


class TooLarge(InputError):
    """A body is longer than its limit."""


def create_app(library: Library, *, access: Access | None = None, limits: Limits | None = None) -> Starlette:
    """The explorer as an ASGI application."""
    return _Explorer(library, limits or Limits()).app(access or Access())


class _Explorer:
    """The routes and their shared state."""

    def __init__(self, library: Library, limits: Limits) -> None:
        self.library, self.limits = library, limits
        self.worker, self.answers = Worker(), Answers(library, limits)
        self.arriving = 0  # bytes of bodies that are not complete yet

    def app(self, access: Access) -> Starlette:
        routes = [
            Route("/", self.page),
            Route("/static/{name}", self.static),
            Route("/component.js", self.component),
            Route("/api/start", self.start),
            *(self._question(name, kind) for name, kind in _ASKED.items()),
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
            first = OpenAsk(model=self.library.names[0])
            self.worker.submit(Job(lambda job: self.answers.open(job, first), seconds=_MODEL_SECONDS))
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

    async def start(self, request: Request) -> Response:
        """The lists to choose from: models, methods, maps and reports."""
        methods = [
            {
                "name": name,
                "title": _QUESTIONS.get(name, name),
                "summary": method.summary,
                "takes_target": method.takes_target,
                "is_of_tensor": is_of_tensor(name),
            }
            for name, method in METHODS.items()
        ]
        return StrictJson(
            {
                "version": __version__,
                "models": [self._about(name) for name in self.library.names],
                "methods": methods,
                "rules": list(RULE_SETS),
                "is_recommended": self.library.is_recommended,
                "maps": [title for title, _ in self.library.maps],
                "reports": [report.title for report in self.library.reports],
                "limits": asdict(self.limits),
            }
        )

    def _about(self, name: str) -> dict[str, Any]:
        """The facts about a model; empty until it is loaded."""
        lens = self.library.opened.get(name)
        if lens is None:
            return {"name": name, "kind": None, "answers": None}
        return {"name": name, "kind": input_kind(lens), "answers": can_answer(lens)}

    # Questions --------------------------------------------------------------------------------------------------------

    def _question(self, name: str, kind: type[OpenAsk]) -> Route:
        async def ask(request: Request) -> Response:
            question = read_question(await self._body(request, self.limits.json_bytes), kind, self.limits)
            return self._stream(request, partial(getattr(self.answers, name), ask=question))

        return Route(f"/api/{name}", ask, methods=["POST"])

    async def upload(self, request: Request) -> Response:
        data = await self._body(request, self.limits.image_bytes)
        return StrictJson({"image": await run_in_threadpool(self.answers.add_image, data)})

    # What is there already --------------------------------------------------------------------------------------------

    async def saved(self, request: Request) -> Response:
        name = f"saved-{request.path_params['number']}"
        found = self._kept(name)
        event = {"type": "done", "result": name, "map": await run_in_threadpool(lambda: payload(found.view()))}
        return StrictJson(event | facts(found))

    async def download(self, request: Request) -> Response:
        name, _, suffix = request.path_params["name"].rpartition(".")
        if f".{suffix}" not in _DOWNLOADS:
            raise InputError(f"Expected a name ending in one of {' '.join(_DOWNLOADS)}, got {suffix[:20]!r}.")
        found = self._kept(name)
        found = found.words() if request.query_params.get("words") == "1" else found
        content = await run_in_threadpool(_saved, found, f".{suffix}")
        file = f"{found.method.replace('.', '-')}.{suffix}"
        headers = {"content-disposition": f'attachment; filename="{file}"'}
        return Response(content, media_type=_KINDS[f".{suffix}"], headers=headers)

    async def report(self, request: Request) -> Response:
        number = _number(request.path_params["number"])
        if number >= len(self.library.reports):
            raise InputError(
                f"This report does not exist; the explorer was started with {len(self.library.reports)} reports."
            )
        text = await run_in_threadpool(self.library.reports[number].path.read_text, "utf-8")
        return HTMLResponse(text, headers={"content-security-policy": _REPORT_POLICY})

    def _kept(self, name: str) -> TokenMap:
        kind, _, number = name.partition("saved-")
        if kind == "" and _number(number) < len(self.library.maps):
            return self.library.maps[_number(number)][1]
        found = self.answers.results.get(name)
        if found is None:
            raise InputError("The server no longer has this map. Ask for it again, then save it.")
        return found

    # Bodies and streams -----------------------------------------------------------------------------------------------

    async def _body(self, request: Request, most: int) -> bytes:
        """The body of a request, bounded in size and time."""
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.upload_seconds):
                async for part in request.stream():
                    body += part
                    self.arriving += len(part)
                    if len(body) > most:
                        raise TooLarge(f"Expected at most {most:,} bytes, got more. Send something smaller.")
                    if self.arriving > self.limits.body_bytes:
                        raise Busy("Too many files are arriving at once. Send it again in a moment.")
        except TimeoutError:
            raise InputError(
                f"Expected the whole request within {self.limits.upload_seconds:g} s, got a part."
            ) from None
        finally:
            self.arriving -= len(body)
        return bytes(body)

    def _stream(self, request: Request, work: Work) -> Response:
        """Queue the work, and send its news line by line as it comes."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def notify() -> None:
            with suppress(RuntimeError):  # the loop is closed: the server has stopped
                loop.call_soon_threadsafe(news.set)

        job = Job(work, seconds=self.limits.seconds, notify=notify)
        self.worker.submit(job)
        return StreamingResponse(self._lines(request, job, news), media_type="application/x-ndjson")

    async def _lines(self, request: Request, job: Job, news: asyncio.Event) -> AsyncIterator[str]:
        """News as lines, with a heartbeat in between; when the reader has gone, the work is stopped."""
        try:
            while not await request.is_disconnected():
                news.clear()
                events = job.news() or [{"type": "beat"}]
                if job.is_waiting:
                    events = [{"type": "waiting", "stage": self.worker.stage}]
                for event in events:
                    yield to_json(event, ascii_only=True) + "\n"
                if events[-1]["type"] in ("done", "error"):
                    return
                with suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), _HEARTBEAT)
        finally:
            job.cancel()


def _number(text: str) -> int:
    """A number in an address; larger than any list if it is not a number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 10**6


def _static(name: str) -> Response:
    content = _files().get(name)
    if content is None:
        return StrictJson({"type": "error", "message": "There is no such page."}, status_code=404)
    return Response(content, media_type=_KINDS[Path(name).suffix])


@cache
def _files() -> dict[str, bytes]:
    """The page's files by name: requests are looked up here and never on disk."""
    return {path.name: path.read_bytes() for path in STATIC.iterdir() if path.suffix in _KINDS}


def _saved(found: TokenMap, suffix: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="tensorlens-") as folder:
        return found.save(Path(folder) / f"map{suffix}").read_bytes()


async def _explain(request: Request, error: Exception) -> Response:
    status = 503 if isinstance(error, Busy) else 413 if isinstance(error, TooLarge) else 400
    return StrictJson({"type": "error", "message": str(error)}, status_code=status)
