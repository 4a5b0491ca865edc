"""GGUF: a model and its tokenizer in one file, as llama.cpp and all that is built on it read them."""

from whimbrel.base.errors import MissingExtraError

try:
    import gguf  # noqa: F401 (the modules below use it; here its absence gets its one line)
except ImportError as error:
    raise MissingExtraError("GGUF export", "gguf", "gguf") from error

from whimbrel.model_io.gguf.export import export_gguf

__all__ = ["export_gguf"]
