"""llama2.c models and tokenizers against `transformers`' Llama, and a real trained model against its fixture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import whimbrel
from whimbrel.model_io.llama2c import load_llama2c_tokenizer


def interleave_rotary_rows(weight: torch.Tensor, head_size: int) -> torch.Tensor:
    """Permute rows from Hugging Face's rotary layout (rotate halves) to llama2.c's (rotate adjacent pairs)."""
    rows, columns = weight.shape
    return weight.view(-1, 2, head_size // 2, columns).transpose(1, 2).reshape(rows, columns)


def write_llama2c(model: transformers.LlamaForCausalLM, path: Path) -> None:
    """Write a transformers Llama in the legacy llama2.c format (version 0)."""
    config, state = model.config, model.state_dict()
    tied = config.tie_word_embeddings

    def each(name: str) -> list[torch.Tensor]:
        weights = [state[f"model.layers.{layer}.{name}.weight"] for layer in range(config.num_hidden_layers)]
        return (
            [interleave_rotary_rows(w, config.head_dim) for w in weights]
            if name[-6:] in ("q_proj", "k_proj")
            else weights
        )

    header = [
        config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads,
        config.num_key_value_heads, config.vocab_size * (1 if tied else -1), config.max_position_embeddings,
    ]  # fmt: skip
    unread = torch.zeros(2 * config.max_position_embeddings * config.head_dim // 2)
    tensors = [
        state["model.embed_tokens.weight"], *each("input_layernorm"), *each("self_attn.q_proj"),
        *each("self_attn.k_proj"), *each("self_attn.v_proj"), *each("self_attn.o_proj"),
        *each("post_attention_layernorm"), *each("mlp.gate_proj"), *each("mlp.down_proj"), *each("mlp.up_proj"),
        state["model.norm.weight"], unread, *([] if tied else [state["lm_head.weight"]]),
    ]  # fmt: skip
    with path.open("wb") as file:
        file.write(np.array(header, dtype="<i4").tobytes())
        for tensor in tensors:
            file.write(tensor.numpy().astype("<f4").tobytes())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_logits_equal_those_of_the_exported_llama(tied, kv_heads, ids, logits, tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=kv_heads, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=tied,
        initializer_range=0.2,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    write_llama2c(theirs, tmp_path / "model.bin")
    ours = whimbrel.load_model(tmp_path / "model.bin")
    assert ours.config.tied_head == tied
    torch.testing.assert_close(logits(ours, ids), logits(theirs, ids), atol=1e-5, rtol=0)
    assert whimbrel.load_model(tmp_path / "model.bin", dtype=torch.bfloat16).lm_head.weight.dtype == torch.bfloat16


def test_real_model_generates_its_known_text(shared_data, tmp_path):
    known = json.loads((shared_data / "models" / "aidreams_greedy_fixture.json").read_text())
    model = whimbrel.load_model(shared_data / "models" / known["model"])
    first, *rest = known["greedy_ids"]
    assert whimbrel.generate(model, [first], max_new_tokens=len(rest), temperature=0) == rest

    tokenizer = load_llama2c_tokenizer(shared_data / "models" / "aidreams_tok512.bin")
    text = known["text"].removeprefix(" ")
    assert tokenizer.pipeline.decode(rest) == text
    assert tokenizer.encode(text) == rest

    whimbrel.save_model(model, tmp_path / "model", tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    prompt = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")("I sense", return_tensors="pt").input_ids
    assert prompt[0].tolist() == [1, *tokenizer.encode("I sense")]
    generated = theirs.generate(prompt, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)[0]
    ours = whimbrel.generate(whimbrel.load_model(tmp_path / "model"), prompt[0], max_new_tokens=30, temperature=0)
    assert generated[prompt.shape[1] :].tolist() == ours
