"""Sampling from a model: `generate(model, prompt_ids)`, `stream` for tokens as they come; the engine of a server."""

import sys
from types import ModuleType

from whimbrel.generate.beam import Beam, beam_search
from whimbrel.generate.complete import Completion, generate, generate_batch
from whimbrel.generate.conversation import Answer, Conversation
from whimbrel.generate.decode import Text, decode_n, decode_one, prefill, stream
from whimbrel.generate.engine import Engine, EngineConfig, Stats
from whimbrel.generate.request import Event, Request, Score
from whimbrel.generate.sampling import Draws, History, Sampling, distribution, log_probabilities, sample
from whimbrel.generate.session import Session
from whimbrel.generate.speculative import Draft, Guess, ModelDraft, NgramDraft, speculate
from whimbrel.generate.text import TextStream, encode_prompt, stream_text

__all__ = [
    "Answer",
    "Beam",
    "Completion",
    "Conversation",
    "Draft",
    "Draws",
    "Engine",
    "EngineConfig",
    "Event",
    "Guess",
    "History",
    "ModelDraft",
    "NgramDraft",
    "Request",
    "Sampling",
    "Score",
    "Session",
    "Stats",
    "Text",
    "TextStream",
    "beam_search",
    "decode_n",
    "decode_one",
    "distribution",
    "encode_prompt",
    "generate",
    "generate_batch",
    "log_probabilities",
    "prefill",
    "sample",
    "speculate",
    "stream",
    "stream_text",
]


class _CallableModule(ModuleType):
    """`whimbrel.generate` names both this room and the function: once imported, the room answers calls as well."""

    __call__ = staticmethod(generate)


sys.modules[__name__].__class__ = _CallableModule
