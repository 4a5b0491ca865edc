"""The model over HTTP: OpenAI-compatible routes and a chat page. All but its settings need the extra `serve`."""

from whimbrel.server.config import ServeConfig, is_loopback

__all__ = ["ServeConfig", "is_loopback"]
