"""A model of `whimbrel quickstart`, exported to GGUF, generates the same text in llama.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.commands import whimbrel

from whimbrel import generate, load_model, load_tokenizer

PROMPT, NEW_TOKENS = "First Citizen:\nBefore we", 16


def test_llama_cpp_generates_equal_text(workdir: Path, shakespeare: str, llama_cpp) -> None:
    pytest.importorskip("gguf", reason="needs the package 'gguf': pip install 'whimbrel[gguf]'")
    Path("text.txt").write_text(shakespeare[:60_000])
    assert whimbrel("quickstart", "text.txt", "--minutes", "0.01", "--depth", "1", "--plain") == 0
    assert whimbrel("export", "runs/text", "text.gguf", "--dtype", "fp32") == 0
    tokenizer = load_tokenizer("runs/text")
    ids = tokenizer.encode(PROMPT)
    expected = generate(load_model("runs/text"), ids, max_new_tokens=NEW_TOKENS, temperature=0)
    request = {"model": str(workdir / "text.gguf"), "texts": [PROMPT], "prompt": PROMPT, "count": NEW_TOKENS}
    [answer] = llama_cpp([request])
    assert answer["ids"] == [ids]
    assert answer["tokens"] == expected
