"""Which layers of a model keep a cache, and how far each of them sees."""

from __future__ import annotations

from typing import Any

from whimbrel.base.errors import ConfigError

__all__ = ["layer_windows"]

WINDOW_NAMES = {
    "full_attention": None,
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
"""Where a config keeps the window of each type of layer. A chunk is never longer than a window of its size."""


def layer_windows(config: Any) -> list[int | None]:
    """The window of each layer that keeps keys and values, None where it sees everything.

    Takes our `GPTConfig` and any config of `transformers`. The last layers of a model may read what earlier ones keep
    (`num_kv_shared_layers`) and are left out.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = getattr(text, "num_hidden_layers", getattr(text, "num_layers", None))
    if not isinstance(count, int):
        raise ConfigError(f"{type(text).__name__} has no num_hidden_layers (or num_layers): give the config of a model")
    types = getattr(text, "layer_types", None)
    if types is None:
        types = [_only_type(text)] * count
    if len(types) != count:
        raise ConfigError(f"layer_types names {len(types)} layers and the model has {count}")
    shared = getattr(text, "num_kv_shared_layers", None) or 0
    if not 0 <= shared <= count:
        raise ConfigError(f"num_kv_shared_layers = {shared} of a model with {count} layers: give at most as many")
    return [_window(text, kind) for kind in types[: count - shared]]


def _only_type(text: Any) -> str:
    """The type of all layers of a config that does not name them one by one."""
    windowed = (kind for kind, name in WINDOW_NAMES.items() if name is not None and getattr(text, name, None))
    return next(windowed, "full_attention")


def _window(text: Any, kind: str) -> int | None:
    if kind not in WINDOW_NAMES:
        raise ConfigError(
            f"layer_types: expected {', '.join(WINDOW_NAMES)}, got {kind!r}, whose state is not keys and values: "
            "use transformers.DynamicCache for this model"
        )
    name = WINDOW_NAMES[kind]
    if name is None:
        return None
    window = getattr(text, name, None)
    if not isinstance(window, int):
        raise ConfigError(f"layer_types has {kind!r} and {name} = {window}: give {name}")
    return window
