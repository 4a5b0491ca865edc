"""OpenAI-compatible HTTP server with a chat page. Everything but the settings needs the extra `serve`."""

from whimbrel.server.config import ServeConfig, is_loopback

__all__ = ["ServeConfig", "is_loopback"]
