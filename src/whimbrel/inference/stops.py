"""Stop strings: text passes through, up to the first of them."""

from __future__ import annotations

from collections.abc import Sequence

from whimbrel.base.errors import RequestError

__all__ = ["StopStrings"]


class StopStrings:
    """Lets text through in pieces, but for what may yet become a stop string, and nothing from the first one on.

    The stop string that ends first is the one met, so it does not matter how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if isinstance(stops, str) or not all(stops):
            raise RequestError(f"stop strings {stops!r} must be a list of texts, none of them empty")
        self.met = False
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> str:
        """The text that is certain to come before a stop string."""
        if self.met:
            return ""
        text = self._held + piece
        places = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.met, self._held = True, ""
            return text[: min(places)[1]]
        safe = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
