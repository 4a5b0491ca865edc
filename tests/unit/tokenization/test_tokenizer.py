from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.tokenization import Tokenizer, load_tokenizer, train_tokenizer

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return load_tokenizer("gpt2")


@pytest.fixture(scope="module")
def general() -> Tokenizer:
    """GPT-2 with the tokenizers backend."""
    tokenizer = Tokenizer.from_json(load_tokenizer("gpt2").to_json())
    tokenizer._tiktoken = None
    return tokenizer


@pytest.fixture(scope="module")
def cases(fixtures: Path) -> list[dict[str, object]]:
    return json.loads((fixtures / "gpt2_token_ids.json").read_text(encoding="utf-8"))


def test_gpt2_vocabulary(gpt2: Tokenizer) -> None:
    assert (gpt2.vocab_size, gpt2.eot_id, gpt2.backend, gpt2.dtype) == (50257, 50256, "tiktoken", np.uint16)
    assert gpt2.encode("Hello world") == [15496, 995]


@pytest.mark.parametrize("backend", ["gpt2", "general"])
def test_gpt2_ids_match_tiktoken(backend: str, cases, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(backend)
    assert len(cases) == 260
    for case in cases:
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert tokenizer.decode(case["ids"]) == case["text"]


@given(text=TEXTS)
def test_both_backends_give_the_same_ids(text: str, gpt2: Tokenizer, general: Tokenizer) -> None:
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


def test_a_million_spaces_are_encoded(gpt2: Tokenizer) -> None:
    assert len(gpt2.encode(" " * 1_000_000)) == 1_000_000


def test_a_lone_surrogate_is_rejected(general: Tokenizer, gpt2: Tokenizer) -> None:
    for tokenizer in (general, gpt2):
        with pytest.raises(DataError, match="surrogate"):
            tokenizer.encode("ab\ud800")


def test_decode_rejects_ids_outside_the_vocabulary(gpt2: Tokenizer) -> None:
    with pytest.raises(DataError, match="50257"):
        gpt2.decode([15496, 50257])


def test_incomplete_utf8_decodes_to_replacement_characters(gpt2: Tokenizer) -> None:
    assert gpt2.decode(gpt2.encode("é")[:1]) == "é"
    assert gpt2.decode(gpt2.encode("𐍈")[:1]) == "\ufffd"


def test_a_saved_tokenizer_loads_here_and_in_transformers(gpt2: Tokenizer, cases, tmp_path: Path) -> None:
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


def test_the_hub_file_has_the_fingerprint_of_the_built_in_gpt2(gpt2: Tokenizer, shared_data: Path) -> None:
    assert load_tokenizer(shared_data / "tokenizers" / "gpt2" / "tokenizer.json").fingerprint == gpt2.fingerprint


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
    ("eos_token", "message"),
    [
        ('"<absent>"', "no end-of-text token .<absent>."),
        ('"!"', "'!' to be a special token.*endoftext"),
        ('{"content": "!"}', "'!' to be a special token"),
        ('{"x": 1}', r'expected eos_token .* got {"x": 1}'),
        ("[5]", r"expected eos_token .* got \[5\]"),
        ("0", "expected eos_token .* got 0"),
    ],
)
def test_an_invalid_end_of_text_token_is_rejected(
    gpt2: Tokenizer, eos_token: str, message: str, tmp_path: Path
) -> None:
    gpt2.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(f'{{"eos_token": {eos_token}}}')
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path)


def test_the_end_of_text_token_must_be_special(gpt2: Tokenizer) -> None:
    """An added token that is not special is found in plain text, so a document could contain it."""
    content = json.loads(gpt2.to_json())
    content["added_tokens"][0]["special"] = False
    with pytest.raises(DataError, match="to be a special token"):
        Tokenizer.from_json(json.dumps(content), "<|endoftext|>")
    with pytest.raises(DataError, match="no end-of-text token"):
        Tokenizer.from_json(json.dumps(content))


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b"\xff\xfe"])
def test_a_file_that_is_not_a_tokenizer_is_rejected(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json is not"):
        load_tokenizer(file)


def test_a_missing_tokenizer_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'gpt2'"):
        load_tokenizer(tmp_path / "absent")


CHATML = (
    "<|im_start|>system\nYou are brief.<|im_end|>\n<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
)
IM_TOKENS = ("<|im_start|>", "<|im_end|>")


@functools.cache
def chat_tokenizer(kind: str) -> Tokenizer:
    """256 bytes, end-of-text (256) and ChatML's tokens (257, 258), with the layouts of several model families."""
    content = json.loads(train_tokenizer(["a b"], 257).to_json())
    token = content["added_tokens"][0]
    content["added_tokens"] += [token | {"id": 257 + at, "content": text} for at, text in enumerate(IM_TOKENS)]
    if kind == "normalizer":
        content["normalizer"] = {"type": "NFC"}
    if kind == "trimmed offsets":
        content["post_processor"] = {
            "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True
        }  # fmt: skip
    if kind == "adds bos":
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}},
        }
    if kind == "sentencepiece":
        content["pre_tokenizer"] = {
            "type": "Metaspace",
            "replacement": "\u2581",
            "prepend_scheme": "first",
            "split": True,
        }
        content["decoder"] = content["pre_tokenizer"]
        content["model"]["unk_token"] = "!"
    return Tokenizer.from_json(json.dumps(content), "<|endoftext|>")


KINDS = ["plain", "normalizer", "trimmed offsets", "adds bos", "sentencepiece"]


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_ids_match_transformers(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = chat_tokenizer(kind)
    tokenizer.save(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in (CHATML, "plain text", "", "<|endoftext|>", "a<|im_end|>", "<|im_start|> é 漢 <|im_end"):
        for added in (True, False):
            expected = theirs(text, add_special_tokens=added)["input_ids"]
            assert tokenizer.encode_prompt(text, add_special_tokens=added).ids == expected


@pytest.mark.parametrize("kind", KINDS)
def test_parse_special_false_encodes_special_tokens_as_text(kind: str) -> None:
    tokenizer = chat_tokenizer(kind)
    parsed, literal = (tokenizer.encode_prompt(CHATML, parse_special=parse).ids for parse in (True, False))
    assert [parsed.count(257), parsed.count(258)] == [3, 2]
    assert not {257, 258} & set(literal)
    assert len(literal) > len(parsed)
    assert literal[-len(tokenizer.encode(CHATML)) :] == tokenizer.encode(CHATML)
    assert not {257, 258} & set(tokenizer.encode(CHATML))  # documents are never parsed


@pytest.mark.parametrize("parse_special", [True, False])
@pytest.mark.parametrize("kind", ["plain", "normalizer", "trimmed offsets", "adds bos"])
def test_offsets_are_the_starts_of_prompt_tokens(kind: str, parse_special: bool) -> None:
    tokenizer = chat_tokenizer(kind)
    text = "  two\n\n" + CHATML + " end. "
    ids, offsets = tokenizer.encode_prompt(text, parse_special=parse_special)
    added = kind == "adds bos"
    assert offsets[: 1 + added] == [0] * (1 + added)
    ends = [*offsets[1:], len(text)]
    assert [text[start:end] for start, end in zip(offsets, ends, strict=True)][added:] == [
        tokenizer.decode([index]) for index in ids
    ][added:]


def test_the_bos_token_comes_from_the_settings(tmp_path: Path) -> None:
    chat_tokenizer("plain").save(tmp_path)
    for named, bos_id in (('"<|im_start|>"', 257), ('{"content": "<|im_end|>"}', 258), ("null", 256)):
        (tmp_path / "tokenizer_config.json").write_text(f'{{"bos_token": {named}, "eos_token": "<|endoftext|>"}}')
        assert load_tokenizer(tmp_path).bos_id == bos_id
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": 5}')
    with pytest.raises(DataError, match="tokenizer_config.json: expected bos_token .* got 5"):
        load_tokenizer(tmp_path)


BROKEN = {
    "load": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "post-process": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "X", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
}


@pytest.mark.parametrize("part", BROKEN)
def test_a_file_that_makes_the_library_panic_raises_data_error(part: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads(chat_tokenizer("plain").to_json()) | BROKEN[part]))
    with pytest.raises(DataError, match=r"tokenizer\.json") as excinfo:
        load_tokenizer(tmp_path)
    assert "\n" not in str(excinfo.value)


def test_a_text_that_makes_the_library_panic_raises_data_error() -> None:
    content = json.loads(chat_tokenizer("plain").to_json()) | {"pre_tokenizer": {"type": "FixedLength", "length": 0}}
    tokenizer = Tokenizer.from_json(json.dumps(content))
    for encode in (tokenizer.encode, tokenizer.encode_prompt):
        with pytest.raises(DataError, match="cannot encode this text") as excinfo:
            encode("Hello")
        assert "\n" not in str(excinfo.value)


@pytest.mark.parametrize("where", ["vocab", "added"])
def test_a_huge_id_is_rejected_before_allocation(where: str, tmp_path: Path) -> None:
    content = json.loads(chat_tokenizer("plain").to_json())
    if where == "vocab":
        content["model"]["vocab"]["absurd"] = 10**8
    else:
        content["added_tokens"].append(content["added_tokens"][0] | {"id": 10**8, "content": "absurd"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"expected token ids .* got 100000000 for 'absurd'"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_deeply_nested_json_is_rejected(name: str, tmp_path: Path) -> None:
    chat_tokenizer("plain").save(tmp_path)
    (tmp_path / name).write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(DataError, match=name) as excinfo:
        load_tokenizer(tmp_path)
    assert "\n" not in str(excinfo.value)


def test_a_unigram_model_does_not_match_special_tokens_in_plain_text() -> None:
    """Its vocabulary includes them, so it would match them like any other piece."""
    pieces = [["<unk>", 0.0], ["<s>", 0.0], ["</s>", 0.0], *([letter, -1.0] for letter in "<>/sab")]
    content = json.loads(chat_tokenizer("plain").to_json())
    special = content["added_tokens"][0]
    content |= {
        "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False},
        "pre_tokenizer": None,
        "decoder": None,
        "added_tokens": [special | {"id": at, "content": pieces[at][0]} for at in range(3)],
    }
    tokenizer = Tokenizer.from_json(json.dumps(content), "</s>")
    assert tokenizer.encode_prompt("a</s>b").ids == [7, 2, 8]
    literal = tokenizer.encode_prompt("a</s>b", parse_special=False)
    assert (literal.ids, literal.offsets) == ([7, 3, 5, 6, 4, 8], [0, 1, 1, 1, 1, 5])
    assert tokenizer.encode("a</s>b") == literal.ids
    assert tokenizer.encode_documents(["a</s>b"])[0].tolist() == [2, *literal.ids]
