"""Text to token ids and back: one `Tokenizer`, one file form (`tokenizer.json`); chat templates. No torch."""

from whimbrel.tokenization.chat import PLAIN, ChatTemplate, Message, load_chat_template, special_token_texts
from whimbrel.tokenization.tokenizer import Tokenizer, load_tokenizer
from whimbrel.tokenization.training import train_tokenizer

__all__ = [
    "ChatTemplate",
    "Message",
    "PLAIN",
    "Tokenizer",
    "load_chat_template",
    "load_tokenizer",
    "special_token_texts",
    "train_tokenizer",
]
