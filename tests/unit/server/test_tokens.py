"""Tokens by their bytes and names."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from whimbrel.inference.detokenizer import Detokenizer
from whimbrel.server.tokens import TokenTexts
from whimbrel.tokenization import Tokenizer, load_tokenizer, train_tokenizer

TEXT = "Hello naïve 北京 🙂 <|endoftext|>"


def test_bytes_of_a_byte_level_tokenizer_are_the_texts():
    tokenizer = load_tokenizer("gpt2")
    texts = TokenTexts(tokenizer)
    assert b"".join(texts.bytes_of(token) for token in tokenizer.encode(TEXT)) == TEXT.encode()
    assert texts.name_of(50256) == "<|endoftext|>"
    assert texts.bytes_of(60000) == b""
    assert texts.longest == 128
    [halved] = [token for token in tokenizer.encode("🙂") if texts.bytes_of(token) == b"\x99\x82"][:1]
    assert texts.name_of(halved) == r"bytes:\x99\x82"


def test_bytes_of_a_tokenizer_of_pieces(sentencepiece: Tokenizer):
    texts = TokenTexts(sentencepiece)
    assert b"".join(texts.bytes_of(token) for token in sentencepiece.encode("ab é")) == " ab é".encode()
    assert texts.name_of(3 + 0xC3) == r"bytes:\xc3"
    assert texts.name_of(1) == "<s>"


def test_only_ids_that_tokens_have_are_looked_at(monkeypatch: pytest.MonkeyPatch):
    content = json.loads(train_tokenizer(["a b"], 257).to_json())
    content["model"]["vocab"]["zz"] = 100_000
    seen = []
    added_by = Detokenizer.added_by
    monkeypatch.setattr(Detokenizer, "added_by", lambda self, token: seen.append(token) or added_by(self, token))
    tokenizer = Tokenizer.from_json(json.dumps(content))
    TokenTexts(tokenizer)
    assert tokenizer.vocab_size == 100_001
    assert len(set(seen)) == len(tokenizer.pipeline.get_vocab())
