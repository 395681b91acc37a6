"""`MapWidget`: a map in a notebook whose clicks Python can read; for Jupyter, VS Code, Colab and marimo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import anywidget
import traitlets

from tensorlens.errors import TensorLensError
from tensorlens.views.page import component, payload, static_file
from tensorlens.views.record import MapView


class Shown(Protocol):
    """A map."""

    def view(self) -> MapView:
        """The plain data that is drawn."""
        ...


class MapWidget(anywidget.AnyWidget):
    """A map that is recomputed when an output or a target is chosen in it; ``widget.map`` is the one shown.

    Attributes:
        out_token: The output that is explained; setting it here or there gives another map.
        target: The target as it was written; empty for the model's top prediction.
        against: The contrast target; empty for none.
        in_token: The input that was clicked last; None before the first click. ``widget.observe(f, "in_token")``.
    """

    _esm = "\n".join([component(), static_file("widget.js"), "export default { render: renderWidget };"])

    data = traitlets.Dict().tag(sync=True)
    outputs = traitlets.List().tag(sync=True)
    takes_target = traitlets.Bool(False).tag(sync=True)
    error = traitlets.Unicode("").tag(sync=True)
    out_token = traitlets.Int(0).tag(sync=True)
    target = traitlets.Unicode("").tag(sync=True)
    against = traitlets.Unicode("").tag(sync=True)
    in_token = traitlets.Int(None, allow_none=True).tag(sync=True)

    def __init__(
        self, ask: Callable[[int, str, str], Shown], outputs: Sequence[str], *, takes_target: bool, **first: Any
    ) -> None:
        self._ask, self.map = ask, ask(first["out_token"], first["target"], first["against"])
        super().__init__(outputs=list(outputs), takes_target=takes_target, data=payload(self.map.view()), **first)

    @traitlets.observe("out_token", "target", "against")
    def _asked_again(self, _change: Any) -> None:
        if not self.data:  # its first values
            return
        try:
            found = self._ask(self.out_token, self.target, self.against)
        except TensorLensError as error:
            self.error = str(error)
            return
        self.map, self.error, self.in_token, self.data = found, "", None, payload(found.view())
