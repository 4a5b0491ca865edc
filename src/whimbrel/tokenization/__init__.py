"""Tokenizers (`tokenizer.json`) and chat templates. Does not import torch."""

from whimbrel.tokenization.builtin_templates import BUILTIN_TEMPLATES, apply_builtin_template
from whimbrel.tokenization.chat_template import (
    DEFAULT_CHAT_TEMPLATE,
    Chat,
    ChatTemplate,
    Message,
    SupervisedTokens,
    TrainOn,
    load_chat_template,
)
from whimbrel.tokenization.tokenizer import Tokenizer, load_tokenizer, read_special_tokens, train_tokenizer

__all__ = [
    "BUILTIN_TEMPLATES",
    "DEFAULT_CHAT_TEMPLATE",
    "Chat",
    "ChatTemplate",
    "Message",
    "SupervisedTokens",
    "Tokenizer",
    "TrainOn",
    "apply_builtin_template",
    "load_chat_template",
    "load_tokenizer",
    "read_special_tokens",
    "train_tokenizer",
]
