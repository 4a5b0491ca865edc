from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.text import Tokenizer, load_tokenizer, train_tokenizer

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return load_tokenizer("gpt2")


@pytest.fixture(scope="module")
def general() -> Tokenizer:
    """GPT-2 through the general library, whatever the fast one would do."""
    tokenizer = Tokenizer.from_json(load_tokenizer("gpt2").to_json())
    tokenizer._fast = None
    return tokenizer


@pytest.fixture(scope="module")
def cases(fixtures: Path) -> list[dict[str, object]]:
    return json.loads((fixtures / "fixture_260.json").read_text(encoding="utf-8"))


def test_gpt2_has_its_known_shape(gpt2: Tokenizer) -> None:
    assert (gpt2.vocab_size, gpt2.eot_id, gpt2.backend, gpt2.dtype) == (50257, 50256, "tiktoken", np.uint16)
    assert gpt2.encode("Hello world") == [15496, 995]


@pytest.mark.parametrize("backend", ["gpt2", "general"])
def test_ids_are_tiktokens_and_decode_to_the_text(backend: str, cases, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(backend)
    assert len(cases) == 260
    for case in cases:
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert tokenizer.decode(case["ids"]) == case["text"]


@given(text=TEXTS)
def test_both_libraries_agree_on_any_text(text: str, gpt2: Tokenizer, general: Tokenizer) -> None:
    ids = gpt2.encode(text)
    assert ids == general.encode(text)
    assert gpt2.decode(ids) == text


@pytest.mark.parametrize("backend", ["gpt2", "general"])
def test_special_tokens_in_a_document_are_plain_text(backend: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(backend)
    first, second = tokenizer.encode_documents(["a<|endoftext|>b", "c"])
    assert first.tolist() == [50256, 64, 27, 91, 437, 1659, 5239, 91, 29, 65]
    assert second.tolist() == [50256, 66]
    assert first.dtype == np.uint16


def test_runs_of_a_million_spaces_are_encoded(gpt2: Tokenizer) -> None:
    assert len(gpt2.encode(" " * 1_000_000)) == 1_000_000


def test_half_a_surrogate_pair_is_refused(general: Tokenizer, gpt2: Tokenizer) -> None:
    for tokenizer in (general, gpt2):
        with pytest.raises(DataError, match="surrogate"):
            tokenizer.encode("ab\ud800")


def test_decode_refuses_ids_outside(gpt2: Tokenizer) -> None:
    with pytest.raises(DataError, match="50257"):
        gpt2.decode([15496, 50257])


def test_broken_characters_decode_to_replacements(gpt2: Tokenizer) -> None:
    assert gpt2.decode(gpt2.encode("é")[:1]) == "é"
    assert gpt2.decode(gpt2.encode("𐍈")[:1]) == "\ufffd"


def test_saved_tokenizer_is_the_same_here_and_in_transformers(gpt2: Tokenizer, cases, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    gpt2.save(tmp_path)
    again, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again.fingerprint == gpt2.fingerprint == load_tokenizer(tmp_path / "tokenizer.json").fingerprint
    assert theirs.eos_token_id == gpt2.eot_id
    for case in cases:
        assert again.encode(case["text"]) == case["ids"]
        assert theirs.decode(case["ids"]) == case["text"]
        if "<|endoftext|>" not in case["text"]:
            assert theirs(case["text"])["input_ids"] == case["ids"]


def test_shared_tokenizer_file_is_the_shipped_one(gpt2: Tokenizer, shared_data: Path) -> None:
    assert load_tokenizer(shared_data / "tokenizers" / "gpt2" / "tokenizer.json").fingerprint == gpt2.fingerprint


def test_a_trained_tokenizer_is_small_fast_and_lossless(shakespeare: str) -> None:
    tokenizer = train_tokenizer([shakespeare], 512)
    assert (tokenizer.vocab_size, tokenizer.eot_id, tokenizer.backend) == (512, 511, "tiktoken")
    ids = tokenizer.encode(shakespeare)
    assert tokenizer.decode(ids) == shakespeare
    assert len(ids) < 0.55 * len(shakespeare)
    tokenizer._fast = None
    assert tokenizer.encode(shakespeare) == ids


def test_training_repeats_itself(shakespeare: str) -> None:
    first, second = (train_tokenizer([shakespeare[:200_000]], 400) for _ in range(2))
    assert first.to_json() == second.to_json()


def test_training_says_what_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="257"):
        train_tokenizer(["text"], 256)
    for absurd in (10**9, 10**30):
        with pytest.raises(ConfigError, match=f"vocab_size={absurd} is too large: at most 16,777,216"):
            train_tokenizer(["text"], absurd)
    for absurd in (-1, 0, 10**30):
        with pytest.raises(ConfigError, match=f"min_frequency={absurd} must be 1 to"):
            train_tokenizer(["text"], 300, min_frequency=absurd)
    with pytest.raises(DataError, match="no text"):
        train_tokenizer(iter(()), 300)
    assert train_tokenizer(["ab ab ab"], 300).vocab_size < 300
    assert "of the 300 asked for" in caplog.text


def test_merges_out_of_rank_order_fall_back_to_the_general_library(shakespeare: str) -> None:
    """`tiktoken` merges by id, so a file whose ids stand in another order than its merges must not go through it."""
    content = json.loads(train_tokenizer([shakespeare[:50_000]], 300).to_json())
    vocabulary = content["model"]["vocab"]
    last, before = ("".join(merge) for merge in content["model"]["merges"][:-3:-1])
    vocabulary[last], vocabulary[before] = vocabulary[before], vocabulary[last]
    assert Tokenizer.from_json(json.dumps(content)).backend == "tokenizers"
    content["normalizer"] = {"type": "Lowercase"}
    assert Tokenizer.from_json(json.dumps(content)).encode("A") == Tokenizer.from_json(json.dumps(content)).encode("a")


def test_the_end_of_text_token_comes_from_the_settings(gpt2: Tokenizer, tmp_path: Path) -> None:
    gpt2.save(tmp_path)
    content = json.loads(gpt2.to_json())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 50257, "content": "<end>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).eot_id == 50256
    for named in ('"<end>"', '{"content": "<end>"}'):
        (tmp_path / "tokenizer_config.json").write_text(f'{{"eos_token": {named}}}')
        assert load_tokenizer(tmp_path).eot_id == 50257


@pytest.mark.parametrize(
    ("named", "fault"),
    [
        ('"<absent>"', "no end-of-text token .<absent>."),
        ('"!"', "'!' is not a special token .* name one of <|endoftext|>"),
        ('{"content": "!"}', "'!' is not a special token"),
        ('{"x": 1}', r'names the eos_token {"x": 1}: give'),
        ("[5]", r"names the eos_token \[5\]: give"),
        ("0", "names the eos_token 0: give"),
    ],
)
def test_an_end_of_text_token_that_cannot_be_is_refused(
    gpt2: Tokenizer, named: str, fault: str, tmp_path: Path
) -> None:
    gpt2.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(f'{{"eos_token": {named}}}')
    with pytest.raises(DataError, match=fault):
        load_tokenizer(tmp_path)


def test_a_token_that_text_is_cut_into_opens_no_document(gpt2: Tokenizer) -> None:
    """An added token that is not special is found in plain text, so it could open a document inside one."""
    content = json.loads(gpt2.to_json())
    content["added_tokens"][0]["special"] = False
    with pytest.raises(DataError, match="not a special token"):
        Tokenizer.from_json(json.dumps(content), "<|endoftext|>")
    with pytest.raises(DataError, match="no end-of-text token"):
        Tokenizer.from_json(json.dumps(content))


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b"\xff\xfe"])
def test_a_file_that_is_no_tokenizer_is_named(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json is not"):
        load_tokenizer(file)


def test_a_missing_tokenizer_says_what_may_be_given(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'gpt2'"):
        load_tokenizer(tmp_path / "absent")
