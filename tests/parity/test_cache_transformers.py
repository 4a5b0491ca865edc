"""Our caches passed as `past_key_values` to transformers models give the same output as the caches of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache, partial

import pytest
import torch
import transformers
from tests.support.models import add_noise
from torch import Tensor
from torch.nn import functional as F
from transformers.generation import GenerateDecoderOnlyOutput

from whimbrel.base.errors import CacheError, ConfigError
from whimbrel.cache import Cache, DynamicCache, SinkLayer, SlidingLayer, StaticCache
from whimbrel.hf import CrossAttentionCache, WhimbrelConfig, WhimbrelForCausalLM

WINDOW = 7
SHAPE = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": 99, "n_positions": 128, "n_embd": 48, "n_layer": 3, "n_head": 4, "eos_token_id": None}
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
CHUNKED = {
    "attention_chunk_size": WINDOW,
    "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
    "no_rope_layers": [1, 1, 1, 0],
    "num_local_experts": 2,
    "intermediate_size_mlp": 80,
}
SHARED = ALTERNATING | {
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 99,
    "hidden_size_per_layer_input": 8,
    "altup_num_inputs": 2,
    "laurel_rank": 4,
    "activation_sparsity_pattern": [0.0] * 4,
}
FAMILIES = {
    "llama": ("LlamaConfig", SHAPE),
    "gpt2": ("GPT2Config", GPT2),
    "mistral": ("MistralConfig", SHAPE | {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2Config", SHAPE | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen3": ("Qwen3Config", SHAPE),
    "gemma2": ("Gemma2Config", SHAPE | ALTERNATING),
    "gemma3": ("Gemma3TextConfig", SHAPE | ALTERNATING),
    "gemma3n": ("Gemma3nTextConfig", SHAPE | SHARED),
    "llama4": ("Llama4TextConfig", SHAPE | CHUNKED),
}
CLOSE = {"atol": 5e-5, "rtol": 0}
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
CHUNKS = [10, 1, 1, 9, 1, 3, 15]

Model = transformers.PreTrainedModel
Config = transformers.PreTrainedConfig
Make = Callable[[Config], object]


@cache
def build(family: str, seed: int = 0) -> Model:
    """A small transformers model with noise added to every parameter, so that each one affects the output."""
    name, settings = FAMILIES[family]
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**settings)).eval()
    return add_noise(model, 0.1)


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Model:
    return build(request.param)


def only_families(*families: str) -> pytest.MarkDecorator:
    """Run the test with these families only."""
    return pytest.mark.parametrize("model", families, indirect=True)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def input_ids() -> Tensor:
    """Two random sequences without the padding token."""
    return torch.randint(1, 99, (2, 40), generator=torch.Generator().manual_seed(1))


def hf_cache(config: Config) -> transformers.DynamicCache:
    return transformers.DynamicCache(config=config)


def whimbrel_cache(config: Config) -> DynamicCache:
    return DynamicCache(config)


def whimbrel_cache_without_config(config: Config) -> DynamicCache:
    return DynamicCache()


def generate(
    model: Model, prompt: Tensor, past: object, tokens: int = 20, **options: object
) -> GenerateDecoderOnlyOutput:
    """Run `generate` of transformers; returns sequences and the logits of every step."""
    return model.generate(
        prompt,
        max_new_tokens=tokens,
        past_key_values=past,
        return_dict_in_generate=True,
        output_logits=True,
        **GREEDY | options,
    )


def prefill(model: Model, input_ids: Tensor, past: object, chunks: list[int]) -> Tensor:
    """Logits of a prefill in chunks of these sizes."""
    return torch.cat([model(part, past_key_values=past).logits for part in input_ids.split(chunks, dim=1)], dim=1)


def assert_same_generation(got: GenerateDecoderOnlyOutput, expected: GenerateDecoderOnlyOutput) -> None:
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), **CLOSE)


def test_greedy_tokens_and_logits_match_transformers(model: Model, input_ids: Tensor):
    expected = generate(model, input_ids[:, :10], hf_cache(model.config))
    for past in (whimbrel_cache(model.config), whimbrel_cache_without_config(model.config)):
        got = generate(model, input_ids[:, :10], past)
        assert_same_generation(got, expected)
        assert got.past_key_values is past
        assert past.get_seq_length() == 29


@pytest.mark.parametrize("make", [whimbrel_cache, whimbrel_cache_without_config])
def test_chunked_prefill_matches_a_single_forward_pass(model: Model, input_ids: Tensor, make: Make):
    past = make(model.config)
    torch.testing.assert_close(
        prefill(model, input_ids, past, CHUNKS), model(input_ids, use_cache=False).logits, **CLOSE
    )
    assert past.get_seq_length() == 40


def test_layer_types_follow_the_config_and_sliding_layers_store_only_their_window(model: Model, input_ids: Tensor):
    past, hf_past = whimbrel_cache(model.config), hf_cache(model.config)
    assert past.is_sliding == hf_past.is_sliding
    for part in input_ids.split(CHUNKS, dim=1):
        model(part, past_key_values=past)
        seen = past.get_seq_length()
        stored = [layer.keys.shape[2] for layer in past.layers]
        assert stored == [min(seen, WINDOW) if slides else seen for slides in hf_past.is_sliding]


def test_mask_sizes_match_the_returned_keys_and_values(model: Model):
    past, states = whimbrel_cache(model.config), torch.randn(2, 2, max(CHUNKS), 12)
    for tokens in CHUNKS:
        for index in range(len(past.layers)):
            seen = past.get_seq_length(index)
            length, offset = past.get_mask_sizes(tokens, index)
            keys, values = past.update(states[:, :, :tokens], states[:, :, :tokens], index)
            assert keys.shape[2] == values.shape[2] == length
            assert offset == seen + tokens - length


def test_left_padded_sequences_generate_the_same_as_alone(model: Model, input_ids: Tensor):
    rows = [input_ids[0, :12], input_ids[1, :9], input_ids[0, 20:23]]
    padded = torch.stack([F.pad(row, (12 - len(row), 0)) for row in rows])
    options = {"attention_mask": (padded != 0).long(), "tokens": 12}
    expected = generate(model, padded, hf_cache(model.config), **options)
    for make in (whimbrel_cache, whimbrel_cache_without_config):
        assert_same_generation(generate(model, padded, make(model.config), **options), expected)
    for row, sequence in zip(rows, expected.sequences, strict=True):
        alone = generate(model, row[None], whimbrel_cache(model.config), tokens=12)
        assert torch.equal(sequence[12:], alone.sequences[0, len(row) :])


@only_families("llama", "gpt2", "qwen3")
def test_sinks_of_a_left_padded_sequence_are_its_first_real_tokens(model: Model, input_ids: Tensor):
    rows = [input_ids[0, :12], input_ids[1, :9], input_ids[0, 20:23]]
    padding = [12 - len(row) for row in rows]
    padded = torch.stack([F.pad(row, (count, 0)) for row, count in zip(rows, padding, strict=True)])
    past = Cache(layer_class_to_replicate=partial(SinkLayer, 2, 6), padding=padding)
    together = generate(model, padded, past, attention_mask=(padded != 0).long())
    for index, row in enumerate(rows):
        alone = generate(model, row[None], Cache(layer_class_to_replicate=partial(SinkLayer, 2, 6), padding=[0]))
        assert torch.equal(together.sequences[index, 12:], alone.sequences[0, len(row) :])
        torch.testing.assert_close(torch.stack(together.logits)[:, index], torch.stack(alone.logits)[:, 0], **CLOSE)


@pytest.mark.parametrize("chunks", [[40], [25, 15], [20, 1, 1, 18]])
@only_families("llama", "gpt2", "mistral", "gemma3")
def test_gradients_match_transformers(model: Model, input_ids: Tensor, chunks: list[int]):
    grads = []
    for past in (hf_cache(model.config), whimbrel_cache(model.config)):
        model.zero_grad(set_to_none=True)
        with torch.enable_grad():
            prefill(model, input_ids, past, chunks).float().logsumexp(-1).mean().backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    model.zero_grad(set_to_none=True)
    expected, got = grads
    assert [name for name, grad in got.items() if grad is None] == []
    for name, grad in expected.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-4, atol=1e-6 + 1e-4 * grad.abs().max().item())


@only_families("llama")
def test_unsupported_gradients_are_rejected(model: Model, input_ids: Tensor):
    for past in (StaticCache(model.config, max_cache_len=50), DynamicCache(model.config, codec="int8")):
        with torch.enable_grad(), pytest.raises(CacheError, match="does not support gradients"):
            model(input_ids, past_key_values=past)
        assert past.get_seq_length() == 0


@only_families("llama", "gpt2", "mistral", "qwen2", "gemma3")
def test_beam_search_matches_transformers(model: Model, input_ids: Tensor):
    options = {"num_beams": 3, "num_return_sequences": 2, "output_scores": True, "tokens": 12}
    got = generate(model, input_ids[:, :10], whimbrel_cache(model.config), **options)
    expected = generate(model, input_ids[:, :10], hf_cache(model.config), **options)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(got.sequences_scores, expected.sequences_scores, **CLOSE)


@only_families("llama", "mistral")
def test_samples_match_transformers(model: Model, input_ids: Tensor):
    def sample(past: object) -> Tensor:
        torch.manual_seed(5)
        return generate(model, input_ids[:, :10], past, tokens=8, do_sample=True, num_return_sequences=3).sequences

    assert torch.equal(sample(whimbrel_cache(model.config)), sample(hf_cache(model.config)))


@pytest.mark.parametrize("draft", ["another", "itself", "lookup"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3"])
def test_assisted_generation_matches_greedy_decoding(family: str, input_ids: Tensor, draft: str):
    """Draft tokens of another model are mostly rejected (crop of a few tokens), those of the model itself never."""
    model = build(family)
    prompt = input_ids[:1, :5].repeat(1, 2)
    assistants = {
        "another": {"assistant_model": build(family, seed=1)},
        "itself": {"assistant_model": model},
        "lookup": {"prompt_lookup_num_tokens": 3},
    }
    past = whimbrel_cache(model.config)
    got = generate(model, prompt, past, **assistants[draft])
    assert torch.equal(got.sequences, generate(model, prompt, hf_cache(model.config)).sequences)
    assert past.get_seq_length() == 29


@only_families("llama", "gpt2", "mistral", "gemma3")
@pytest.mark.parametrize("make", [whimbrel_cache, whimbrel_cache_without_config])
def test_a_cache_can_be_reused_for_a_second_turn(model: Model, input_ids: Tensor, make: Make):
    past, hf_past = make(model.config), hf_cache(model.config)
    first = generate(model, input_ids[:, :10], past, tokens=8).sequences
    assert torch.equal(first, generate(model, input_ids[:, :10], hf_past, tokens=8).sequences)
    conversation = torch.cat((first, input_ids[:, 30:36]), dim=1)
    got = generate(model, conversation, past, tokens=8)
    assert_same_generation(got, generate(model, conversation, hf_past, tokens=8))
    assert_same_generation(got, generate(model, conversation, make(model.config), tokens=8))
    assert past.get_seq_length() == 31


@only_families("llama", "gpt2", "qwen3")
@pytest.mark.parametrize("make", [whimbrel_cache, whimbrel_cache_without_config])
def test_generation_continues_correctly_after_crop(model: Model, input_ids: Tensor, make: Make):
    past = make(model.config)
    prefill(model, input_ids, past, [20, 20])
    past.crop(-22)
    assert past.get_seq_length() == 18
    other = torch.cat((input_ids[:, :18], input_ids.flip(1)[:, :10]), dim=1)
    got = prefill(model, other[:, 18:], past, [4, 1, 5])
    torch.testing.assert_close(got, model(other, use_cache=False).logits[:, 18:], **CLOSE)


def test_batch_reorder_select_and_repeat_match_transformers(model: Model, input_ids: Tensor):
    pasts = whimbrel_cache(model.config), whimbrel_cache_without_config(model.config), hf_cache(model.config)
    following = input_ids[:, 30:34]
    for past in pasts:
        prefill(model, input_ids[:, :12], past, [12])
        past.batch_repeat_interleave(2)
        past.reorder_cache(torch.tensor([3, 0, 0, 2]))
        past.batch_select_indices(torch.tensor([0, 2]))
    rows = torch.cat((input_ids[[1, 0], :12], following), dim=1)
    expected = model(rows, use_cache=False).logits[:, 12:]
    for past in pasts:
        torch.testing.assert_close(prefill(model, following, past, [1, 3]), expected, **CLOSE)


@only_families("llama", "gemma3")
def test_a_cache_can_be_reused_after_reset(model: Model, input_ids: Tensor):
    past = whimbrel_cache(model.config)
    generate(model, input_ids[:, :10], past)
    past.reset()
    assert past.get_seq_length() == 0
    assert_same_generation(
        generate(model, input_ids[:1, 10:30], past), generate(model, input_ids[:1, 10:30], hf_cache(model.config))
    )


def test_static_cache_matches_transformers_and_raises_when_full(model: Model, input_ids: Tensor):
    past, expected = (
        StaticCache(model.config, max_cache_len=32),
        generate(model, input_ids[:, :10], hf_cache(model.config)),
    )
    assert_same_generation(generate(model, input_ids[:, :10], past), expected)
    assert_same_generation(generate(model, input_ids[:, :10], StaticCache(max_cache_len=32)), expected)
    full = past.is_sliding.index(False) if False in past.is_sliding else None
    if full is None:
        return  # windows are never full
    layer = past.layers[full]
    before = layer.keys.clone()
    with pytest.raises(CacheError, match="29 of 32 used.*got 4"):
        layer.update(*torch.zeros(2, 2, before.size(1), 4, before.size(3)))
    assert layer.get_seq_length() == 29
    assert torch.equal(layer.keys, before)


COMPILED = {
    "static": lambda config: StaticCache(config, max_cache_len=40),
    "static-int8": lambda config: StaticCache(config, max_cache_len=40, codec="int8"),
    "dynamic": whimbrel_cache,
    "dynamic-int4": lambda config: DynamicCache(codec="int4"),
    "sliding": lambda config: Cache(layer_class_to_replicate=partial(SlidingLayer, 12)),
    "sinks": lambda config: Cache(layer_class_to_replicate=partial(SinkLayer, 2, 6), padding=[0, 0]),
}


def greedy_decode(model: Callable[..., object], prompt: Tensor, past: object, tokens: int = 6) -> Tensor:
    """Greedy decoding by calling the model directly."""
    generated, new = [], prompt
    for _ in range(tokens):
        new = model(new, past_key_values=past).logits[:, -1:].argmax(-1)
        generated.append(new)
    return torch.cat(generated, dim=1)


@pytest.mark.parametrize("kind", COMPILED)
def test_compiled_models_give_the_same_tokens(input_ids: Tensor, kind: str):
    torch._dynamo.reset()
    model, past = build("llama"), COMPILED[kind](build("llama").config)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    expected = greedy_decode(model, input_ids[:, :10], COMPILED[kind](model.config))
    assert torch.equal(greedy_decode(compiled, input_ids[:, :10], past), expected)
    assert past.get_seq_length() == 15
    assert past.is_compileable is kind.startswith("static")


def test_static_cache_compiles_as_many_graphs_as_transformers(input_ids: Tensor):
    model, counts = build("llama"), []
    for past in (
        transformers.StaticCache(config=model.config, max_cache_len=40),
        StaticCache(model.config, max_cache_len=40),
    ):
        torch._dynamo.reset()
        graphs: list[object] = []

        def count(graph: torch.fx.GraphModule, _: object, graphs: list[object] = graphs) -> object:
            graphs.append(graph)
            return graph

        greedy_decode(torch.compile(model, backend=count), input_ids[:, :10], past)
        counts.append(len(graphs))
    assert counts[0] == counts[1]


def test_static_cache_works_with_separately_compiled_layers(input_ids: Tensor):
    """The masks are then created outside compiled code and must match the keys that compiled code returns."""
    torch._dynamo.reset()
    expected = greedy_decode(build("llama"), input_ids[:, :10], COMPILED["static"](build("llama").config))
    model = copy.deepcopy(build("llama"))
    for layer in model.model.layers:
        layer.compile(backend="eager")
    assert torch.equal(greedy_decode(model, input_ids[:, :10], COMPILED["static"](model.config)), expected)


@pytest.mark.parametrize(("codec", "max_error"), [("int8", 0.02), ("fp8", 0.1), ("int4", 0.3)])
@only_families("llama", "gpt2", "mistral", "gemma3n")
def test_quantized_caches_stay_close_to_full_precision(model: Model, input_ids: Tensor, codec: str, max_error: float):
    """The error is relative to the standard deviation of the logits."""
    exact = model(input_ids, use_cache=False).logits
    got = prefill(model, input_ids, DynamicCache(model.config, codec=codec), CHUNKS)
    error = ((got - exact).std() / exact.std()).item()
    assert 1e-3 < error < max_error
    beams = generate(model, input_ids[:, :10], DynamicCache(model.config, codec=codec), tokens=6, num_beams=2)
    assert beams.sequences.shape == (2, 16)


@pytest.mark.parametrize("make", [whimbrel_cache, whimbrel_cache_without_config])
def test_whimbrel_models_generate_the_same_in_transformers(input_ids: Tensor, make: Make):
    torch.manual_seed(0)
    shape = {"num_layers": 3, "vocab_size": 99, "embd_size": 48, "num_heads": 4, "context_length": 64, "init_std": 0.1}
    model = WhimbrelForCausalLM(WhimbrelConfig(gpt=shape)).eval()
    past = make(model.config)
    torch.testing.assert_close(prefill(model, input_ids, past, CHUNKS), model(input_ids).logits, **CLOSE)
    prompt = input_ids[:, :10]
    expected = generate(model, prompt, None, use_cache=False, suppress_tokens=[0])
    assert_same_generation(generate(model, prompt, make(model.config), suppress_tokens=[0]), expected)
    beams = {"num_beams": 3, "tokens": 12}
    got = generate(model, prompt, make(model.config), **beams).sequences
    assert torch.equal(got, generate(model, prompt, hf_cache(model.config), **beams).sequences)
    drafted = generate(model, prompt[:1], make(model.config), assistant_model=model, suppress_tokens=[0])
    assert torch.equal(drafted.sequences, expected.sequences[:1])


@only_families("llama", "mistral", "gemma3")
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_cache_can_be_rebuilt_by_iterating_over_it(model: Model, input_ids: Tensor, codec: str):
    past, hf_past = DynamicCache(model.config, codec=codec), hf_cache(model.config)
    for each in (past, hf_past):
        prefill(model, input_ids[:, :6], each, [6])
    windows = [None if window is None else int(window) for _, _, window in past]
    assert windows == [None if window is None else int(window) for _, _, window in hf_past]
    if codec == "none":
        for ours_entry, their_entry in zip(past, hf_past, strict=True):
            for got, expected in zip(ours_entry[:2], their_entry[:2], strict=True):
                torch.testing.assert_close(got[:, :, -expected.size(2) :], expected)
    expected = prefill(model, input_ids[:, 6:12], past.fork(), [4, 2])
    rebuilt = (
        DynamicCache(past),
        DynamicCache(ddp_cache_data=[entry[:2] for entry in past], config=model.config),
        transformers.DynamicCache(past),
    )
    close = (
        CLOSE if codec == "none" else {"atol": 0.1 * expected.std().item(), "rtol": 0}
    )  # later tokens are not quantized
    for other in rebuilt:
        assert other.get_seq_length() == 6
        torch.testing.assert_close(prefill(model, input_ids[:, 6:12], other, [4, 2]), expected, **close)


def test_invalid_cache_entries_are_rejected():
    states = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ConfigError, match=r"expected \(keys, values\) or \(keys, values, window\).*got 1 items"):
        DynamicCache([(states,)])
    with pytest.raises(ConfigError, match="layer data in both"):
        DynamicCache([(states, states)], ddp_cache_data=[(states, states)])
    assert list(DynamicCache(build("llama").config)) == [(None, None, None)] * 4


@pytest.mark.parametrize("beams", [1, 2])
def test_encoder_decoder_generation_matches_transformers(beams: int):
    torch.manual_seed(0)
    shape = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**shape, decoder_start_token_id=0)).eval()
    add_noise(model, 0.1)
    input_ids = torch.randint(2, 99, (2, 9))
    options = {"max_new_tokens": 10, "min_new_tokens": 10, "num_beams": beams, "do_sample": False}
    expected = model.generate(input_ids, **options)
    past = CrossAttentionCache(DynamicCache(), DynamicCache())
    assert torch.equal(model.generate(input_ids, past_key_values=past, **options), expected)
    assert past.self_attention_cache.get_seq_length() == 10
    assert past.cross_attention_cache.get_seq_length() == 9
    with pytest.raises(ConfigError, match="cross_attention_cache: .*without a codec"):
        CrossAttentionCache(DynamicCache(), DynamicCache(codec="int8"))


@pytest.mark.parametrize("kind", ["linear_attention", "hybrid", "conv"])
def test_layer_types_without_keys_and_values_are_rejected(kind: str):
    config = transformers.LlamaConfig(**SHAPE)
    config.layer_types = ["full_attention", kind] * 2
    for make in (DynamicCache, partial(StaticCache, max_cache_len=9)):
        with pytest.raises(ConfigError, match=f"got '{kind}'.* use transformers"):
            make(config)


def test_whimbrel_models_reject_the_static_cache_of_transformers():
    shape = {"num_layers": 2, "vocab_size": 99, "embd_size": 48, "num_heads": 4, "context_length": 64}
    model = WhimbrelForCausalLM(WhimbrelConfig(gpt=shape)).eval()
    past = transformers.StaticCache(config=model.config, max_cache_len=20)
    with pytest.raises(ConfigError, match="got 20 slots for 3 tokens: use whimbrel.cache.StaticCache"):
        model(torch.tensor([[5, 6, 7]]), past_key_values=past)
