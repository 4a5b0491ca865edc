"""Keys and values of the tokens already read, so that the next token costs one step."""

from whimbrel.cache.codec import find_codec
from whimbrel.cache.container import Cache
from whimbrel.cache.dynamic import DynamicCache, StaticCache
from whimbrel.cache.foreign import register_foreign
from whimbrel.cache.growing import DynamicLayer
from whimbrel.cache.layer import CacheLayerMixin
from whimbrel.cache.sink import SinkLayer
from whimbrel.cache.sliding import SlidingLayer
from whimbrel.cache.static import StaticLayer

__all__ = [
    "Cache",
    "CacheLayerMixin",
    "DynamicCache",
    "DynamicLayer",
    "SinkLayer",
    "SlidingLayer",
    "StaticCache",
    "StaticLayer",
    "find_codec",
    "register_foreign",
]
