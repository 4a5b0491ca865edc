"""Keys and values of the tokens already read, so that the next token costs one step."""

from whimbrel.cache.dynamic import DynamicCache, DynamicLayer

__all__ = ["DynamicCache", "DynamicLayer"]
