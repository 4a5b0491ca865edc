"""Several adapters of one base model in one engine: mixed batches, prefix cache, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.models import add_noise

import whimbrel
from whimbrel.base.errors import ConfigError, RequestError
from whimbrel.inference import LLM, SamplingParams
from whimbrel.inference.adapters import MultiLoraLinear
from whimbrel.inference.sequence import Request
from whimbrel.model_io import load_adapter, save_adapter
from whimbrel.models import GPT, GPTConfig, LoraConfig, apply_lora, resize_vocabulary
from whimbrel.models.lora import lora_parameters, token_modules
from whimbrel.tokenization import ChatTemplate

LLAMA = {"norm": "rms", "position": "rope", "activation": "silu", "gated_mlp": True, "bias": "none", "tied_head": False}
SHAPE = {"context_length": 128, "vocab_size": 260, "num_layers": 2, "embd_size": 32, "num_heads": 2}
SHAPES = {
    "llama": GPTConfig(**SHAPE, num_kv_heads=1, mlp_size=64, **LLAMA),
    "gpt2": GPTConfig(**SHAPE),
}
ADAPTERS = {
    "all": {"rank": 4, "alpha": 8},
    "some": {"rank": 2, "use_rslora": True},
    "dora": {"rank": 3, "use_dora": True},
}
MODULES = {"llama": ("q_proj", "v_proj", "up_proj"), "gpt2": ("c_attn",)}
GREEDY = SamplingParams(temperature=0)
PROMPTS = [[5, 9, 13], list(range(40, 75)), [7] * 20, [100, 3], [9, 8, 7, 6, 5], [11, 12], [1] * 17, [33]]


def save(base: Path, name: str, path: Path, seed: int, **settings: object) -> None:
    model = whimbrel.load_model(base)
    modules = MODULES[base.name] if name == "some" else None
    apply_lora(model, LoraConfig(**ADAPTERS[name] | {"modules": modules} | settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in lora_parameters(model):
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    save_adapter(model, path)


@pytest.fixture(scope="module", params=SHAPES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory, and its adapters next to it."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    whimbrel.save_model(add_noise(GPT(SHAPES[request.param]), 0.1), folder / request.param, byte_tokenizer())
    for seed, name in enumerate(ADAPTERS):
        save(folder / request.param, name, folder / name, seed)
    return folder / request.param


@pytest.fixture
def adapters(base: Path) -> dict[str, Path]:
    return {name: base.parent / name for name in ADAPTERS}


def requests(names: list[str | None], prompts: list[list[int]] = PROMPTS, tokens: int = 16) -> list[Request]:
    """One request per prompt, with the adapters in turn."""
    return [
        Request(prompt_ids=tuple(ids), max_new_tokens=tokens, sampling=GREEDY, adapter=names[i % len(names)])
        for i, ids in enumerate(prompts)
    ]


def outputs(llm: LLM, each: list[Request]) -> list[list[int]]:
    return [output.outputs[0].tokens for output in llm.complete(each)]


def alone(base: Path, adapter: Path | None, ids: list[int], quantize: str | None = None) -> list[int]:
    """The greedy tokens of a model with one adapter in its layers, or none."""
    model = whimbrel.load_model(base, quantize=quantize)
    if adapter is not None:
        load_adapter(model, adapter)
    return whimbrel.generate(model.eval(), ids, max_new_tokens=16, temperature=0)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_mixed_batch_gives_what_each_adapter_gives_alone(base, adapters, quantize):
    names = [None, *adapters]
    llm = LLM(base, device="cpu", quantize=quantize, adapters=adapters, max_batch=8)
    expected = [
        alone(base, None if (name := names[i % len(names)]) is None else adapters[name], ids, quantize)
        for i, ids in enumerate(PROMPTS)
    ]
    assert outputs(llm, requests(names)) == expected
    same_prompt = [outputs(llm, requests([name], [PROMPTS[1]]))[0] for name in names]
    assert len(set(map(tuple, same_prompt))) == len(names), "adapters with the same effect"


def test_batch_changes_while_sequences_run(base, adapters):
    """Few blocks and slots: sequences wait, are preempted, and change their place in the batch."""
    names = [*adapters, None]
    large = LLM(base, device="cpu", adapters=adapters, max_batch=8)
    small = LLM(base, device="cpu", adapters=adapters, max_batch=3, num_blocks=10, block_size=8, prefill_chunk=16)
    prompts = [ids for ids in PROMPTS if len(ids) < 30]
    assert outputs(small, requests(names, prompts)) == outputs(large, requests(names, prompts))
    assert small.engine.stats().preemptions > 0


@pytest.mark.parametrize("names", [["all", "some"], ["all", None], [None, "some"]])
def test_prefix_cache_is_not_shared_between_adapters(base, adapters, names):
    prompt = [list(range(30, 94))]
    llm = LLM(base, device="cpu", adapters=adapters, max_batch=2)
    expected = [outputs(LLM(base, device="cpu", adapters=adapters), requests([name], prompt)) for name in names]
    for name, tokens in zip(names, expected, strict=True):
        assert outputs(llm, requests([name], prompt)) == tokens
        assert llm.engine.stats().prefix_hits == 0
    for hits, (name, tokens) in enumerate(zip(names, expected, strict=True), 1):
        assert outputs(llm, requests([name], prompt)) == tokens
        assert llm.engine.stats().prefix_hits == 48 * hits


def test_compiled_decoding(base, adapters):
    if base.name != "llama":
        pytest.skip("the same layers, which take a minute to compile")
    names = [None, *adapters]
    eager = LLM(base, device="cpu", adapters=adapters, max_batch=4)
    compiled = LLM(base, device="cpu", adapters=adapters, max_batch=4, compile=True)
    each = [replace(request, max_new_tokens=3 + 4 * i) for i, request in enumerate(requests(names))]
    assert outputs(compiled, each) == outputs(eager, each)  # sequences change their place when others finish
    assert outputs(compiled, each[3:5]) == outputs(eager, each[3:5])


@pytest.mark.gpu
# inductor suggests TF32; fp32 must stay exact here
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_cuda_graphs(base, adapters, compiled):
    names = [None, *adapters]
    cpu = LLM(base, device="cpu", adapters=adapters, max_batch=4)
    cuda = LLM(base, device="cuda", adapters=adapters, max_batch=4, compile=compiled)
    for _ in range(2):  # the second time with the prefix cache
        assert outputs(cuda, requests(names)) == outputs(cpu, requests(names))


def test_the_model_is_not_changed(base, adapters):
    model = whimbrel.load_model(base)
    names = [type(module) for module in model.modules()]
    llm = LLM(model, adapters=adapters)
    assert [type(module) for module in model.modules()] == names
    assert llm.model.lm_head.weight is model.lm_head.weight
    layers = [module for module in llm.model.modules() if isinstance(module, MultiLoraLinear)]
    assert len(layers) == 8
    assert all(any(layer.weight is parameter for parameter in model.parameters()) for layer in layers)


def test_samples_beams_and_streams_use_the_adapter(base, adapters):
    llm = LLM(base, device="cpu", adapters=adapters, max_batch=4)
    merged = LLM(str(adapters["all"]), device="cpu", max_batch=4)
    [ours], [theirs] = (
        engine.generate([PROMPTS[1]], SamplingParams(), n=3, seed=1, max_new_tokens=8, **options)
        for engine, options in ((llm, {"adapter": "all"}), (merged, {}))
    )
    assert [each.tokens for each in ours.outputs] == [each.tokens for each in theirs.outputs]
    assert [beam.tokens for beam in llm.beam_search(PROMPTS[0], max_new_tokens=6, adapter="all")] == [
        beam.tokens for beam in merged.beam_search(PROMPTS[0], max_new_tokens=6)
    ]
    options = {"max_new_tokens": 8, "ignore_eos": True}
    assert list(llm.stream_tokens(PROMPTS[0], GREEDY, adapter="all", **options)) == list(
        merged.stream_tokens(PROMPTS[0], GREEDY, **options)
    )


@pytest.mark.parametrize("token", [3, 260], ids=["token of the base", "new token"])
def test_an_adapter_with_trained_tokens_is_served_alone(base, adapters, tmp_path, token):
    model = resize_vocabulary(whimbrel.load_model(base), 261)
    apply_lora(model, LoraConfig(rank=2), tokens=dict.fromkeys(token_modules(model.config), (token,)))
    save_adapter(model, tmp_path / "tokens")
    with pytest.raises(ConfigError, match="adapter tokens has trained token embeddings.*whimbrel serve PATH"):
        LLM(base, device="cpu", adapters=adapters | {"tokens": tmp_path / "tokens"})
    assert LLM(tmp_path / "tokens", device="cpu").generate([[5, token]], GREEDY, max_new_tokens=2)


def test_chat_uses_template_and_stop_tokens_of_the_adapter(base, adapters, tmp_path):
    model = whimbrel.load_model(base)
    load_adapter(model, adapters["all"])
    save_adapter(model, tmp_path / "chat")
    ChatTemplate("[{{ messages[0]['content'] }}]").save(tmp_path / "chat")
    (tmp_path / "chat" / "generation_config.json").write_text('{"eos_token_id": 7, "do_sample": false}')
    llm = LLM(base, device="cpu", adapters={"chat": tmp_path / "chat"})
    answer = llm.chat([{"role": "user", "content": "hi"}], adapter="chat", max_new_tokens=12)
    ids = byte_tokenizer().encode("[hi]")
    assert answer.prompt_ids == ids
    expected = alone(base, tmp_path / "chat", ids)[:12]
    assert answer.outputs[0].tokens == (expected[: expected.index(7)] if 7 in expected else expected)
    assert llm.chat([{"role": "user", "content": "hi"}], GREEDY, max_new_tokens=2).prompt_ids != ids


def test_refusals(base, adapters, tmp_path):
    llm = LLM(base, device="cpu", adapters=adapters)
    with pytest.raises(RequestError, match=r"expected one of the loaded adapters \(all, some, dora\), got 'other'"):
        llm.generate("a", adapter="other")
    with pytest.raises(RequestError, match=r"\(none\), got 'all'"):
        LLM(base, device="cpu").generate("a", adapter="all")
    model = whimbrel.load_model(base)
    load_adapter(model, adapters["all"])
    with pytest.raises(ConfigError, match="expected a base model without adapters"):
        LLM(model, adapters=adapters)
    save(base, "some", tmp_path / "other", 0)
    byte_tokenizer(["<|im_end|>"]).save(tmp_path / "other")
    with pytest.raises(ConfigError, match="expected 'other' to use the base model's tokenizer"):
        LLM(base, device="cpu", adapters={"other": tmp_path / "other"})
    byte_tokenizer([f"<|{i}|>" for i in range(9)]).save(tmp_path / "other")
    with pytest.raises(ConfigError, match="adapter other: expected a tokenizer of at most 260 tokens"):
        LLM(base, device="cpu", adapters={"other": tmp_path / "other"})
