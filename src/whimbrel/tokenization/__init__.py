"""Tokenizers (`tokenizer.json`) and chat templates. Does not import torch."""

from whimbrel.tokenization.chat_template import (
    DEFAULT_CHAT_TEMPLATE,
    ChatTemplate,
    Message,
    load_chat_template,
)
from whimbrel.tokenization.tokenizer import Tokenizer, load_tokenizer, read_special_tokens, train_tokenizer

__all__ = [
    "DEFAULT_CHAT_TEMPLATE",
    "ChatTemplate",
    "Message",
    "Tokenizer",
    "load_chat_template",
    "load_tokenizer",
    "read_special_tokens",
    "train_tokenizer",
]
