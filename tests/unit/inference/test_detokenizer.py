"""Incremental detokenization: complete characters, spaces, stop strings, invalid UTF-8."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Pipeline

from whimbrel.base.errors import RequestError
from whimbrel.inference import TextStream, encode_prompt, stream_text
from whimbrel.inference.detokenizer import Detokenizer, StopStrings
from whimbrel.tokenization import Tokenizer, load_tokenizer
from whimbrel.tokenization.bpe import BYTE_DECODER

TEXT = "naïve 漢字 🐦 end"
LEFT_OUT = None


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return load_tokenizer("gpt2")


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """A SentencePiece-style tokenizer as in Llama 2, with a space symbol and byte fallback."""
    words = ["▁", "▁the", "▁end", "a", "n", "v", "e", "d"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    pipeline = Pipeline(models.Unigram([(piece, -1.0) for piece in pieces], 0, byte_fallback=True))
    pipeline.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    pipeline.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pipeline.add_special_tokens([AddedToken(token, special=True) for token in pieces[:3]])
    return Tokenizer(pipeline, "</s>")


@pytest.fixture(scope="module", params=["gpt2", "sentencepiece"])
def tokenizer(request) -> Tokenizer:
    return request.getfixturevalue(request.param)


def token_of(tokenizer: Tokenizer, byte: int | None) -> int:
    """The token of one byte, or a token without text."""
    if byte is LEFT_OUT:
        return 1 if tokenizer.pipeline.id_to_token(1) == "<s>" else tokenizer.vocab_size
    ids = map(tokenizer.pipeline.token_to_id, (f"<0x{byte:02X}>", {b: c for c, b in BYTE_DECODER.items()}[byte]))
    return next(token for token in ids if token is not None)


def test_text_is_emitted_in_complete_characters(tokenizer):
    prompt, rest = tokenizer.encode("Say:"), tokenizer.encode("Say: " + TEXT)[len(tokenizer.encode("Say:")) :]
    pieces = list(stream_text(tokenizer, prompt, rest))
    assert "".join(pieces) == " " + TEXT
    assert len(pieces) > 4
    assert all("\ufffd" not in piece for piece in pieces)


@given(
    parts=st.lists(
        st.one_of(
            st.integers(0, 255).map(lambda byte: [byte]),
            st.sampled_from("é漢🐦\ufffda ").map(lambda character: [*character.encode()]),
            st.just([LEFT_OUT]),
        ),
        max_size=20,
    ),
    data=st.data(),
)
def test_byte_tokens_decode_like_the_joined_bytes_with_correct_spans(tokenizer, parts, data):
    drawn = [byte for part in parts for byte in part]
    for place in data.draw(st.lists(st.integers(0, len(drawn)), max_size=5)):
        drawn.insert(place, LEFT_OUT)  # also in the middle of a character
    raw = bytes(byte for byte in drawn if byte is not LEFT_OUT)
    # a lone surrogate in UTF-8, for which Python's decoder needs one more byte
    assume(not re.search(rb"\xed[\xa0-\xbf]", raw))
    stream, text, read = TextStream(tokenizer, [5]), "", b""
    for byte in drawn:
        text += stream.push(token_of(tokenizer, byte))
        if byte is LEFT_OUT:
            assert stream.span == (len(text), len(text))
        else:
            read += bytes([byte])
            characters = len(read.decode(errors="replace"))
            assert stream.span == (characters - 1, characters)
    assert raw.decode(errors="replace") in (text, text + "\ufffd")  # an incomplete character at the end


@given(text=st.text(), data=st.data())
def test_pieces_join_to_the_decoded_text_up_to_any_stop(tokenizer, text, data):
    before, ids = tokenizer.encode("a the"), tokenizer.encode(text)
    for place in data.draw(st.lists(st.integers(0, len(ids)), max_size=5)):
        ids.insert(place, token_of(tokenizer, LEFT_OUT))
    written = tokenizer.pipeline.decode(before + ids).removeprefix("a the")
    stop = data.draw(st.text("a the\n", min_size=1, max_size=3) | st.just(text[1:3] or "a"))
    assert "".join(stream_text(tokenizer, before, ids)) == written
    assert "".join(stream_text(tokenizer, before, ids, [stop])) == written.split(stop)[0]


def test_a_character_started_by_the_prompt_is_completed(gpt2):
    ids = gpt2.encode("🐦!")
    assert len(ids) > 2
    assert "".join(stream_text(gpt2, ids[:1], ids[1:])) == "🐦!"


def test_text_of_the_prompt_is_not_repeated(gpt2):
    assert "".join(stream_text(gpt2, gpt2.encode("🐦")[:1], gpt2.encode("!"))) == "!"
    assert "".join(stream_text(gpt2, gpt2.encode("so \ufffd"), gpt2.encode(" then"))) == " then"


def test_a_generated_replacement_character_is_kept(tokenizer):
    written = tokenizer.encode("the\ufffd")
    assert "".join(stream_text(tokenizer, [], written)) == "the\ufffd"


def test_tokens_without_text_do_not_delay_others(tokenizer):
    """Each is decoded once, however many there are, and they do not count as the start of the text."""
    seen = []

    class Counting:
        def __getattr__(self, name):
            return getattr(tokenizer.pipeline, name)

        def decode(self, ids, **options):
            seen.extend(ids)
            return tokenizer.pipeline.decode(ids, **options)

    none = [token_of(tokenizer, LEFT_OUT)] * 500
    stream = TextStream(SimpleNamespace(pipeline=Counting(), eot_id=tokenizer.eot_id), tokenizer.encode("the") + none)
    assert not any(map(stream.push, none))
    assert "".join(map(stream.push, tokenizer.encode("a the")[-1:])) == " the"
    assert len(seen) < 5 * len(none)


def test_special_tokens_can_be_kept(sentencepiece):
    characters = Detokenizer(sentencepiece, keep_special=True)
    ids = [1, *sentencepiece.encode("the end"), 2]
    assert "".join(map(characters.push, ids)) == sentencepiece.decode(ids) == "<s> the end</s>"


def test_a_space_is_kept_after_the_prompt_but_not_at_the_start_of_a_text(sentencepiece):
    ids = sentencepiece.encode("the end")
    assert sentencepiece.pipeline.id_to_token(ids[0]) == "▁the"
    assert "".join(stream_text(sentencepiece, [1], ids)) == "the end"
    assert "".join(stream_text(sentencepiece, ids, ids)) == " the end"


def test_invalid_utf8_is_replaced(tokenizer):
    rng = random.Random(0)
    whole = tokenizer.encode("the end 漢")
    for _ in range(300):
        noise = [rng.randrange(3, 259) for _ in range(rng.randrange(1, 20))]
        written = "".join(stream_text(tokenizer, [5], [*noise, *whole]))
        assert written.endswith("the end 漢")
    stream = TextStream(tokenizer, whole)
    awaited = max(range(3, 259), key=lambda token: tokenizer.decode([token]) == "\ufffd")
    assert "\ufffd" in "".join(stream.push(awaited) for _ in range(4))  # not held back forever


def test_a_stop_string_may_span_tokens(gpt2):
    ids = gpt2.encode("First line\nUser: second")
    stream = TextStream(gpt2, [], ["ine\nUser:"])
    shown = []
    for token in ids:
        shown.append(stream.push(token))
        if stream.stopped:
            break
    assert "".join(shown) == "First l"
    assert len(shown) < len(ids)
    assert stream.flush() == stream.push(ids[0]) == ""
    consumed = iter(ids)
    assert "".join(stream_text(gpt2, [], consumed, ["ine\nUser:"])) == "First l"
    assert list(consumed) == ids[len(shown) :]  # no token is sampled after the stop string


def test_held_back_text_is_flushed_at_the_end(gpt2):
    ids = gpt2.encode("one\nUse")
    assert "".join(stream_text(gpt2, [], ids, ["\nUser:"])) == "one\nUse"


def test_text_before_an_incomplete_character_is_emitted(gpt2):
    """Some tokens are a space and the first bytes of a character."""
    half = next(token for token in range(50000) if gpt2.decode([token]) == " \ufffd")
    assert "".join(stream_text(gpt2, [], [*gpt2.encode("one"), half])) == "one "
    assert "".join(stream_text(gpt2, [], [half, gpt2.eot_id, *gpt2.encode("two")])) == " \n\ntwo"
    stream = TextStream(gpt2, [], ["e "])
    assert [*map(stream.push, [*gpt2.encode("one"), half]), stream.flush()] == ["on", "", ""]
    assert stream.stopped


def test_end_of_text_separates_documents(gpt2):
    ids = [*gpt2.encode("one"), gpt2.eot_id, *gpt2.encode("two")]
    assert "".join(stream_text(gpt2, [], ids)) == "one\n\ntwo"


def test_an_empty_prompt_is_the_bos_token(gpt2, sentencepiece):
    assert encode_prompt(gpt2, "").ids == [gpt2.eot_id]
    assert encode_prompt(gpt2, "a b").ids == gpt2.encode("a b")
    assert encode_prompt(gpt2, "", bos_id=7).ids == [7]
    named = Tokenizer.from_json(sentencepiece.to_json(), "</s>", "<s>")
    assert encode_prompt(named, "").ids == [named.pipeline.token_to_id("<s>")] != [named.eot_id]


def test_special_tokens_in_a_prompt_are_parsed_by_default(tokenizer):
    text = f"the{tokenizer.eot_token}end"
    assert encode_prompt(tokenizer, text).ids.count(tokenizer.eot_id) == 1
    assert tokenizer.eot_id not in encode_prompt(tokenizer, text, parse_special=False).ids
    assert tokenizer.encode(text) == encode_prompt(tokenizer, text, parse_special=False).ids


def push_pieces(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    matcher = StopStrings(stops)
    shown = [matcher.push(piece) for piece in pieces]
    return [*shown, matcher.flush()], matcher.found


def first_to_end(text: str, stops: list[str]) -> str | None:
    """The text before the stop string that completes first, searched character by character."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return None


@given(
    st.lists(st.text("abc", max_size=4), max_size=8),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_stop_string_that_ends_first(pieces, stops):
    shown, found = push_pieces(pieces, stops)
    text = "".join(pieces)
    before = first_to_end(text, stops)
    assert found == (before is not None)
    assert "".join(shown) == (text if before is None else before)


@given(st.text("ab", max_size=12), st.text("ab", min_size=1, max_size=5))
def test_only_prefixes_of_stop_strings_are_held_back(text, stop):
    matcher, shown = StopStrings([stop]), ""
    for end, letter in enumerate(text, 1):
        shown += matcher.push(letter)
        if matcher.found:
            break
        held_back = text[len(shown) : end]
        assert stop.startswith(held_back)
        assert not any(stop.startswith(text[start:end]) for start in range(len(shown)))


def test_text_is_emitted_as_soon_as_it_is_safe():
    assert push_pieces(["one\n", "\nH", "uman: yes"], ["\n\nHuman:"]) == (["one", "", "", ""], True)
    assert push_pieces(["one\n", "\nHu", "go\n"], ["\n\nHuman:"]) == (["one", "", "\n\nHugo", "\n"], False)
    assert push_pieces(["a", "b"], []) == (["a", "b", ""], False)


def test_no_text_follows_a_stop_string():
    assert push_pieces(["a.b", "c.", "d"], ["."]) == (["a", "", "", ""], True)


@pytest.mark.parametrize("stops", ["end", [""], ["end", ""]])
def test_empty_stop_strings_are_rejected(stops):
    with pytest.raises(RequestError, match="non-empty strings"):
        StopStrings(stops)
