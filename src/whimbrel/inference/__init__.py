"""Sampling from a model: `generate(model, prompt_ids)`, `stream` for tokens as they come; the engine of a server."""

from whimbrel.inference.beam import Beam, beam_search
from whimbrel.inference.chat import Answer, Conversation
from whimbrel.inference.complete import Completion, generate, generate_batch
from whimbrel.inference.decode import Text, decode_n, decode_one, prefill, stream
from whimbrel.inference.detokenizer import TextStream, encode_prompt, stream_text
from whimbrel.inference.engine import Engine, EngineConfig, Stats
from whimbrel.inference.sampling import History, SampleRNG, SamplingParams, distribution, log_probabilities, sample
from whimbrel.inference.sequence import Event, Logprob, Request
from whimbrel.inference.session import Session
from whimbrel.inference.speculative import Draft, Guess, ModelDraft, NgramDraft, speculate

__all__ = [
    "Answer",
    "Beam",
    "Completion",
    "Conversation",
    "Draft",
    "SampleRNG",
    "Engine",
    "EngineConfig",
    "Event",
    "Guess",
    "History",
    "ModelDraft",
    "NgramDraft",
    "Request",
    "SamplingParams",
    "Logprob",
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
