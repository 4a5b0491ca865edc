"""OpenAI-compatible HTTP server with a chat page. Everything except `ServeConfig` requires the `serve` extra."""

from whimbrel.server.config import ServeConfig, is_loopback

__all__ = ["ServeConfig", "is_loopback"]
