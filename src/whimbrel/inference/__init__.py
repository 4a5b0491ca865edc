"""Text generation: `LLM` and `generate`, on an engine with continuous batching and a paged KV cache."""

from whimbrel.inference.beam import Beam, beam_search
from whimbrel.inference.chat import Answer, Conversation, PromptLimits, fit_messages
from whimbrel.inference.detokenizer import Detokenizer, TextStream, stream_text
from whimbrel.inference.engine import Engine, EngineConfig, Stats
from whimbrel.inference.llm import LLM, Completion, RequestOutput, encode_prompt, generate
from whimbrel.inference.model_runner import decode_one, prefill
from whimbrel.inference.sampling import History, SampleRNG, SamplingParams, distribution, log_probabilities, sample
from whimbrel.inference.sequence import Event, Logprob, Request
from whimbrel.inference.speculative import Draft, ModelDraft, NgramDraft, Proposal

__all__ = [
    "LLM",
    "Answer",
    "Beam",
    "Completion",
    "Conversation",
    "Detokenizer",
    "Draft",
    "Engine",
    "EngineConfig",
    "Event",
    "History",
    "Logprob",
    "ModelDraft",
    "NgramDraft",
    "PromptLimits",
    "Proposal",
    "Request",
    "RequestOutput",
    "SampleRNG",
    "SamplingParams",
    "Stats",
    "TextStream",
    "beam_search",
    "decode_one",
    "distribution",
    "encode_prompt",
    "fit_messages",
    "generate",
    "log_probabilities",
    "prefill",
    "sample",
    "stream_text",
]
