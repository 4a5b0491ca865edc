"""KV caches: layers and containers for our models and for transformers models."""

from whimbrel.cache.buffer import find_codec
from whimbrel.cache.container import Cache, DynamicCache, StaticCache
from whimbrel.cache.foreign import register_foreign
from whimbrel.cache.layer import CacheLayerMixin, DynamicLayer
from whimbrel.cache.sliding import SinkLayer, SlidingLayer
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
