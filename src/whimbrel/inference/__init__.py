"""Sampling from a model: `generate(model, prompt_ids)`, `stream` for tokens as they come; the engine of a server."""

from whimbrel.inference.beam import Beam, beam_search
from whimbrel.inference.complete import Completion, generate, generate_batch
from whimbrel.inference.conversation import Answer, Conversation
from whimbrel.inference.decode import Text, decode_n, decode_one, prefill, stream
from whimbrel.inference.engine import Engine, EngineConfig, Stats
from whimbrel.inference.request import Event, Request, Score
from whimbrel.inference.sampling import Draws, History, Sampling, distribution, log_probabilities, sample
from whimbrel.inference.session import Session
from whimbrel.inference.speculative import Draft, Guess, ModelDraft, NgramDraft, speculate
from whimbrel.inference.text import TextStream, encode_prompt, stream_text

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
