"""Sampling from a model: `generate(model, prompt_ids)`, `stream` for tokens as they are drawn."""

import sys
from types import ModuleType

from whimbrel.generate.complete import Completion, generate, generate_batch
from whimbrel.generate.decode import Text, decode_n, decode_one, prefill, stream
from whimbrel.generate.engine import Engine, EngineConfig, Stats
from whimbrel.generate.request import Event, Request, Score
from whimbrel.generate.sampling import Draws, Sampling, log_probabilities, sample
from whimbrel.generate.text import TextStream, encode_prompt, stream_text

__all__ = [
    "Completion",
    "Draws",
    "Engine",
    "EngineConfig",
    "Event",
    "Request",
    "Sampling",
    "Score",
    "Stats",
    "Text",
    "TextStream",
    "decode_n",
    "decode_one",
    "encode_prompt",
    "generate",
    "generate_batch",
    "log_probabilities",
    "prefill",
    "sample",
    "stream",
    "stream_text",
]


class _CallableModule(ModuleType):
    """`whimbrel.generate` names both this room and the function: once imported, the room answers calls as well."""

    __call__ = staticmethod(generate)


sys.modules[__name__].__class__ = _CallableModule
