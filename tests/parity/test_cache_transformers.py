"""Our caches as `past_key_values` of real `transformers` models: what they write is what their own cache writes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache, partial

import pytest
import torch
import transformers
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
PIECES = [10, 1, 1, 9, 1, 3, 15]

Model = transformers.PreTrainedModel
Config = transformers.PreTrainedConfig
Make = Callable[[Config], object]


@cache
def build(family: str, seed: int = 0) -> Model:
    """A small model of `transformers` whose every weight matters in the output."""
    name, settings = FAMILIES[family]
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Model:
    return build(request.param)


def few(*families: str) -> pytest.MarkDecorator:
    """Only these families, where the others would go the same way."""
    return pytest.mark.parametrize("model", families, indirect=True)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def texts() -> Tensor:
    """Two random texts without the token that pads."""
    return torch.randint(1, 99, (2, 40), generator=torch.Generator().manual_seed(1))


def theirs(config: Config) -> transformers.DynamicCache:
    return transformers.DynamicCache(config=config)


def ours(config: Config) -> DynamicCache:
    return DynamicCache(config)


def lazy(config: Config) -> DynamicCache:
    return DynamicCache()


def write(model: Model, prompt: Tensor, past: object, tokens: int = 20, **options: object) -> GenerateDecoderOnlyOutput:
    """What their `generate` makes of a prompt, with the logits of every step."""
    return model.generate(
        prompt,
        max_new_tokens=tokens,
        past_key_values=past,
        return_dict_in_generate=True,
        output_logits=True,
        **GREEDY | options,
    )


def read(model: Model, texts: Tensor, past: object, pieces: list[int]) -> Tensor:
    """Logits of texts that are read piece by piece."""
    return torch.cat([model(part, past_key_values=past).logits for part in texts.split(pieces, dim=1)], dim=1)


def alike(got: GenerateDecoderOnlyOutput, expected: GenerateDecoderOnlyOutput) -> None:
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), **CLOSE)


def test_greedy_text_and_its_logits_are_theirs(model: Model, texts: Tensor):
    expected = write(model, texts[:, :10], theirs(model.config))
    for past in (ours(model.config), lazy(model.config)):
        got = write(model, texts[:, :10], past)
        alike(got, expected)
        assert got.past_key_values is past
        assert past.get_seq_length() == 29


@pytest.mark.parametrize("make", [ours, lazy])
def test_a_text_read_in_pieces_is_the_text_read_at_once(model: Model, texts: Tensor, make: Make):
    past = make(model.config)
    torch.testing.assert_close(read(model, texts, past, PIECES), model(texts, use_cache=False).logits, **CLOSE)
    assert past.get_seq_length() == 40


def test_layers_are_those_of_the_config_and_a_window_holds_no_more_than_it_sees(model: Model, texts: Tensor):
    past, peer = ours(model.config), theirs(model.config)
    assert past.is_sliding == peer.is_sliding
    for part in texts.split(PIECES, dim=1):
        model(part, past_key_values=past)
        seen = past.get_seq_length()
        held = [layer.keys.shape[2] for layer in past.layers]
        assert held == [min(seen, WINDOW) if slides else seen for slides in peer.is_sliding]


def test_mask_sizes_are_those_of_what_comes_back(model: Model):
    past, states = ours(model.config), torch.randn(2, 2, max(PIECES), 12)
    for tokens in PIECES:
        for index in range(len(past.layers)):
            seen = past.get_seq_length(index)
            length, offset = past.get_mask_sizes(tokens, index)
            keys, values = past.update(states[:, :, :tokens], states[:, :, :tokens], index)
            assert keys.shape[2] == values.shape[2] == length
            assert offset == seen + tokens - length


def test_rows_padded_at_the_left_write_what_each_writes_alone(model: Model, texts: Tensor):
    rows = [texts[0, :12], texts[1, :9], texts[0, 20:23]]
    padded = torch.stack([F.pad(row, (12 - len(row), 0)) for row in rows])
    options = {"attention_mask": (padded != 0).long(), "tokens": 12}
    expected = write(model, padded, theirs(model.config), **options)
    for make in (ours, lazy):
        alike(write(model, padded, make(model.config), **options), expected)
    for row, sequence in zip(rows, expected.sequences, strict=True):
        alone = write(model, row[None], ours(model.config), tokens=12)
        assert torch.equal(sequence[12:], alone.sequences[0, len(row) :])


@few("llama", "gpt2", "qwen3")
def test_sinks_of_a_row_padded_at_the_left_are_its_first_real_tokens(model: Model, texts: Tensor):
    rows = [texts[0, :12], texts[1, :9], texts[0, 20:23]]
    padding = [12 - len(row) for row in rows]
    padded = torch.stack([F.pad(row, (count, 0)) for row, count in zip(rows, padding, strict=True)])
    past = Cache(layer_class_to_replicate=partial(SinkLayer, 2, 6), padding=padding)
    together = write(model, padded, past, attention_mask=(padded != 0).long())
    for index, row in enumerate(rows):
        alone = write(model, row[None], Cache(layer_class_to_replicate=partial(SinkLayer, 2, 6), padding=[0]))
        assert torch.equal(together.sequences[index, 12:], alone.sequences[0, len(row) :])
        torch.testing.assert_close(torch.stack(together.logits)[:, index], torch.stack(alone.logits)[:, 0], **CLOSE)


@pytest.mark.parametrize("pieces", [[40], [25, 15], [20, 1, 1, 18]])
@few("llama", "gpt2", "mistral", "gemma3")
def test_gradients_are_theirs(model: Model, texts: Tensor, pieces: list[int]):
    grads = []
    for past in (theirs(model.config), ours(model.config)):
        model.zero_grad(set_to_none=True)
        with torch.enable_grad():
            read(model, texts, past, pieces).float().logsumexp(-1).mean().backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    model.zero_grad(set_to_none=True)
    expected, got = grads
    assert [name for name, grad in got.items() if grad is None] == []
    for name, grad in expected.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-4, atol=1e-6 + 1e-4 * grad.abs().max().item())


@few("llama")
def test_gradients_that_would_be_lost_are_refused(model: Model, texts: Tensor):
    for past in (StaticCache(model.config, max_cache_len=50), DynamicCache(model.config, codec="int8")):
        with torch.enable_grad(), pytest.raises(CacheError, match="does not support gradients"):
            model(texts, past_key_values=past)
        assert past.get_seq_length() == 0


@few("llama", "gpt2", "mistral", "qwen2", "gemma3")
def test_beams_are_theirs(model: Model, texts: Tensor):
    options = {"num_beams": 3, "num_return_sequences": 2, "output_scores": True, "tokens": 12}
    got = write(model, texts[:, :10], ours(model.config), **options)
    expected = write(model, texts[:, :10], theirs(model.config), **options)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(got.sequences_scores, expected.sequences_scores, **CLOSE)


@few("llama", "mistral")
def test_drawn_samples_are_theirs(model: Model, texts: Tensor):
    def draw(past: object) -> Tensor:
        torch.manual_seed(5)
        return write(model, texts[:, :10], past, tokens=8, do_sample=True, num_return_sequences=3).sequences

    assert torch.equal(draw(ours(model.config)), draw(theirs(model.config)))


@pytest.mark.parametrize("draft", ["another", "itself", "lookup"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3"])
def test_assisted_text_is_the_greedy_text(family: str, texts: Tensor, draft: str):
    """Another model's tokens are mostly taken back (crop by some), its own never (crop by none)."""
    model = build(family)
    prompt = texts[:1, :5].repeat(1, 2)
    by = {
        "another": {"assistant_model": build(family, seed=1)},
        "itself": {"assistant_model": model},
        "lookup": {"prompt_lookup_num_tokens": 3},
    }
    past = ours(model.config)
    got = write(model, prompt, past, **by[draft])
    assert torch.equal(got.sequences, write(model, prompt, theirs(model.config)).sequences)
    assert past.get_seq_length() == 29


@few("llama", "gpt2", "mistral", "gemma3")
@pytest.mark.parametrize("make", [ours, lazy])
def test_a_second_turn_goes_on_where_the_first_ended(model: Model, texts: Tensor, make: Make):
    past, peer = make(model.config), theirs(model.config)
    first = write(model, texts[:, :10], past, tokens=8).sequences
    assert torch.equal(first, write(model, texts[:, :10], peer, tokens=8).sequences)
    said = torch.cat((first, texts[:, 30:36]), dim=1)
    got = write(model, said, past, tokens=8)
    alike(got, write(model, said, peer, tokens=8))
    alike(got, write(model, said, make(model.config), tokens=8))
    assert past.get_seq_length() == 31


@few("llama", "gpt2", "qwen3")
@pytest.mark.parametrize("make", [ours, lazy])
def test_a_cropped_text_goes_on_as_another(model: Model, texts: Tensor, make: Make):
    past = make(model.config)
    read(model, texts, past, [20, 20])
    past.crop(-22)
    assert past.get_seq_length() == 18
    other = torch.cat((texts[:, :18], texts.flip(1)[:, :10]), dim=1)
    got = read(model, other[:, 18:], past, [4, 1, 5])
    torch.testing.assert_close(got, model(other, use_cache=False).logits[:, 18:], **CLOSE)


def test_rows_are_chosen_and_repeated_as_theirs_are(model: Model, texts: Tensor):
    pasts = ours(model.config), lazy(model.config), theirs(model.config)
    following = texts[:, 30:34]
    for past in pasts:
        read(model, texts[:, :12], past, [12])
        past.batch_repeat_interleave(2)
        past.reorder_cache(torch.tensor([3, 0, 0, 2]))
        past.batch_select_indices(torch.tensor([0, 2]))
    rows = torch.cat((texts[[1, 0], :12], following), dim=1)
    expected = model(rows, use_cache=False).logits[:, 12:]
    for past in pasts:
        torch.testing.assert_close(read(model, following, past, [1, 3]), expected, **CLOSE)


@few("llama", "gemma3")
def test_a_cache_is_used_again_after_a_reset(model: Model, texts: Tensor):
    past = ours(model.config)
    write(model, texts[:, :10], past)
    past.reset()
    assert past.get_seq_length() == 0
    alike(write(model, texts[:1, 10:30], past), write(model, texts[:1, 10:30], theirs(model.config)))


def test_a_static_cache_writes_their_text_and_says_when_it_is_full(model: Model, texts: Tensor):
    past, expected = StaticCache(model.config, max_cache_len=32), write(model, texts[:, :10], theirs(model.config))
    alike(write(model, texts[:, :10], past), expected)
    alike(write(model, texts[:, :10], StaticCache(max_cache_len=32)), expected)
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
    "static int8": lambda config: StaticCache(config, max_cache_len=40, codec="int8"),
    "dynamic": ours,
    "lazy int4": lambda config: DynamicCache(codec="int4"),
    "sliding": lambda config: Cache(layer_class_to_replicate=partial(SlidingLayer, 12)),
    "sinks": lambda config: Cache(layer_class_to_replicate=partial(SinkLayer, 2, 6), padding=[0, 0]),
}


def step_by_step(model: Callable[..., object], prompt: Tensor, past: object, tokens: int = 6) -> Tensor:
    """Greedy text from plain calls of a model."""
    text, new = [], prompt
    for _ in range(tokens):
        new = model(new, past_key_values=past).logits[:, -1:].argmax(-1)
        text.append(new)
    return torch.cat(text, dim=1)


@pytest.mark.parametrize("kind", COMPILED)
def test_a_compiled_model_writes_the_same(texts: Tensor, kind: str):
    torch._dynamo.reset()
    model, past = build("llama"), COMPILED[kind](build("llama").config)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    expected = step_by_step(model, texts[:, :10], COMPILED[kind](model.config))
    assert torch.equal(step_by_step(compiled, texts[:, :10], past), expected)
    assert past.get_seq_length() == 15
    assert past.is_compileable is kind.startswith("static")


def test_a_static_cache_takes_as_many_graphs_as_theirs(texts: Tensor):
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

        step_by_step(torch.compile(model, backend=count), texts[:, :10], past)
        counts.append(len(graphs))
    assert counts[0] == counts[1]


def test_layers_that_are_compiled_one_by_one_read_a_static_cache(texts: Tensor):
    """Masks are then made outside of compiled code, and have to fit what compiled code hands back."""
    torch._dynamo.reset()
    expected = step_by_step(build("llama"), texts[:, :10], COMPILED["static"](build("llama").config))
    model = copy.deepcopy(build("llama"))
    for layer in model.model.layers:
        layer.compile(backend="eager")
    assert torch.equal(step_by_step(model, texts[:, :10], COMPILED["static"](model.config)), expected)


@pytest.mark.parametrize(("codec", "most"), [("int8", 0.02), ("fp8", 0.1), ("int4", 0.3)])
@few("llama", "gpt2", "mistral", "gemma3n")
def test_codes_stay_close_to_the_numbers(model: Model, texts: Tensor, codec: str, most: float):
    """Errors are held against the spread of the logits themselves."""
    exact = model(texts, use_cache=False).logits
    got = read(model, texts, DynamicCache(model.config, codec=codec), PIECES)
    error = ((got - exact).std() / exact.std()).item()
    assert 1e-3 < error < most
    beams = write(model, texts[:, :10], DynamicCache(model.config, codec=codec), tokens=6, num_beams=2)
    assert beams.sequences.shape == (2, 16)


@pytest.mark.parametrize("make", [ours, lazy])
def test_our_own_models_write_the_same_inside_transformers(texts: Tensor, make: Make):
    torch.manual_seed(0)
    shape = {"num_layers": 3, "vocab_size": 99, "embd_size": 48, "num_heads": 4, "context_length": 64, "init_std": 0.1}
    model = WhimbrelForCausalLM(WhimbrelConfig(gpt=shape)).eval()
    past = make(model.config)
    torch.testing.assert_close(read(model, texts, past, PIECES), model(texts).logits, **CLOSE)
    prompt = texts[:, :10]
    expected = write(model, prompt, None, use_cache=False, suppress_tokens=[0])
    alike(write(model, prompt, make(model.config), suppress_tokens=[0]), expected)
    beams = {"num_beams": 3, "tokens": 12}
    got = write(model, prompt, make(model.config), **beams).sequences
    assert torch.equal(got, write(model, prompt, theirs(model.config), **beams).sequences)
    drafted = write(model, prompt[:1], make(model.config), assistant_model=model, suppress_tokens=[0])
    assert torch.equal(drafted.sequences, expected.sequences[:1])


@few("llama", "mistral", "gemma3")
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_cache_is_rebuilt_from_what_iterating_gives(model: Model, texts: Tensor, codec: str):
    past, peer = DynamicCache(model.config, codec=codec), theirs(model.config)
    for each in (past, peer):
        read(model, texts[:, :6], each, [6])
    windows = [None if window is None else int(window) for _, _, window in past]
    assert windows == [None if window is None else int(window) for _, _, window in peer]
    if codec == "none":
        for ours_entry, their_entry in zip(past, peer, strict=True):
            for got, expected in zip(ours_entry[:2], their_entry[:2], strict=True):
                torch.testing.assert_close(got[:, :, -expected.size(2) :], expected)
    expected = read(model, texts[:, 6:12], past.fork(), [4, 2])
    rebuilt = (
        DynamicCache(past),
        DynamicCache(ddp_cache_data=[entry[:2] for entry in past], config=model.config),
        transformers.DynamicCache(past),
    )
    close = CLOSE if codec == "none" else {"atol": 0.1 * expected.std().item(), "rtol": 0}  # later tokens have no codes
    for other in rebuilt:
        assert other.get_seq_length() == 6
        torch.testing.assert_close(read(model, texts[:, 6:12], other, [4, 2]), expected, **close)


def test_a_cache_built_of_entries_that_cannot_be_is_refused():
    states = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ConfigError, match=r"expected \(keys, values\) or \(keys, values, window\).*got 1 items"):
        DynamicCache([(states,)])
    with pytest.raises(ConfigError, match="got the keys and values of layers twice"):
        DynamicCache([(states, states)], ddp_cache_data=[(states, states)])
    assert list(DynamicCache(build("llama").config)) == [(None, None, None)] * 4


@pytest.mark.parametrize("beams", [1, 2])
def test_an_encoder_decoder_model_writes_what_it_writes_with_theirs(beams: int):
    torch.manual_seed(0)
    shape = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**shape, decoder_start_token_id=0)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    texts = torch.randint(2, 99, (2, 9))
    options = {"max_new_tokens": 10, "min_new_tokens": 10, "num_beams": beams, "do_sample": False}
    expected = model.generate(texts, **options)
    past = CrossAttentionCache(DynamicCache(), DynamicCache())
    assert torch.equal(model.generate(texts, past_key_values=past, **options), expected)
    assert past.self_attention_cache.get_seq_length() == 10
    assert past.cross_attention_cache.get_seq_length() == 9
    with pytest.raises(
        ConfigError, match="cross_attention_cache: expected layers of type DynamicLayer without a codec"
    ):
        CrossAttentionCache(DynamicCache(), DynamicCache(codec="int8"))


@pytest.mark.parametrize("kind", ["linear_attention", "hybrid", "conv"])
def test_layers_without_keys_and_values_are_refused(kind: str):
    config = transformers.LlamaConfig(**SHAPE)
    config.layer_types = ["full_attention", kind] * 2
    for make in (DynamicCache, partial(StaticCache, max_cache_len=9)):
        with pytest.raises(ConfigError, match=f"got '{kind}', whose state is not keys and values: use transformers"):
            make(config)


def test_a_static_cache_of_theirs_is_refused_by_our_models():
    shape = {"num_layers": 2, "vocab_size": 99, "embd_size": 48, "num_heads": 4, "context_length": 64}
    model = WhimbrelForCausalLM(WhimbrelConfig(gpt=shape)).eval()
    past = transformers.StaticCache(config=model.config, max_cache_len=20)
    with pytest.raises(ConfigError, match="got 20 slots for 3 tokens: use whimbrel.cache.StaticCache"):
        model(torch.tensor([[5, 6, 7]]), past_key_values=past)
