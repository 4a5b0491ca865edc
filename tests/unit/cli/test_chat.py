"""`whimbrel chat`."""

from __future__ import annotations

import io
import signal
from pathlib import Path

import pytest
import torch
from tests.unit.tokenization.byte_tokenizer import byte_tokenizer

from whimbrel.base.errors import ConfigError, DataError, RequestError
from whimbrel.cli.chat import chat
from whimbrel.inference import generate, stream_text
from whimbrel.model_io import save_model
from whimbrel.models import GPT, GPTConfig
from whimbrel.tokenization import load_chat_template

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}[assistant]{{ eos_token }}"
)

TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(context_length=256, vocab_size=257, num_layers=1, embd_size=16, num_heads=2, tied_head=False))


@pytest.fixture(scope="module")
def directory(model: GPT, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    save_model(model, folder, TOKENIZER)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def talk(directory, capsys, monkeypatch):
    """Say these lines to the model; the answers, and what the program says itself."""

    def run(*lines: str, source: Path = directory, **options: object) -> tuple[list[str], str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        chat(source, **{"max_new_tokens": 6, "temperature": 0, "device": "cpu"} | options)
        printed = capsys.readouterr()
        return printed.out.split("\n\n")[:-1], printed.err

    return run


def continuation(model: GPT, ids: list[int], count: int = 6) -> str:
    """What a model writes after these tokens."""
    drawn = generate(model, ids, max_new_tokens=count, temperature=0, eos_id=TOKENIZER.eot_id)
    return "".join(stream_text(TOKENIZER, ids, drawn))


def expected(model: GPT, folder: Path, messages: list[dict[str, str]], count: int = 6) -> str:
    return continuation(model, load_chat_template(folder).encode(TOKENIZER, messages), count)


def test_answers_are_those_to_the_whole_conversation(model, directory, talk):
    answers, said = talk("Hello", "", "And you?", "/reset", "Hello", "/exit", "never asked", system="Be brief.")
    assert len(answers) == 3
    told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    first = expected(model, directory, told)
    assert answers[0] == answers[2] == first.lstrip()
    told += [{"role": "assistant", "content": first}, {"role": "user", "content": "And you?"}]
    assert answers[1] == expected(model, directory, told).lstrip()
    assert "/reset forgets" in said
    assert "begins anew" in said


def test_the_end_of_the_input_ends_the_program(talk):
    assert len(talk("Hello")[0]) == 1
    assert talk()[0] == []


def test_a_word_of_the_system_that_cannot_fit_is_refused_before_anything_is_asked(talk, capsys):
    with pytest.raises(RequestError, match="system prompt .* at most 250 tokens"):
        talk("Hello", system="x" * 300)
    assert "/reset" not in capsys.readouterr().err


def test_what_is_no_command_is_said_so(talk):
    answers, said = talk("/help")
    assert answers == []
    assert "'/help' is no command" in said


def test_ctrl_c_stops_the_answer_and_not_the_program(model, directory, talk, monkeypatch):
    from whimbrel.inference import Engine

    real, drawn = Engine._sample, []

    def sample(*given):
        drawn.append(0)
        if len(drawn) == 3:
            signal.raise_signal(signal.SIGINT)
        return real(*given)

    monkeypatch.setattr(Engine, "_sample", sample)
    handler = signal.getsignal(signal.SIGINT)
    answers, _ = talk("Hello", "And you?")
    assert len(drawn) == 3 + 6
    assert signal.getsignal(signal.SIGINT) is handler
    told = [{"role": "user", "content": "Hello"}]
    stopped = expected(model, directory, told, 3)
    assert answers[0] == stopped.lstrip()
    told += [{"role": "assistant", "content": stopped}, {"role": "user", "content": "And you?"}]
    assert answers[1] == expected(model, directory, told).lstrip()


def test_ctrl_c_twice_ends_the_program(talk, monkeypatch):
    def sample(*_):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("whimbrel.inference.Engine._sample", sample)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            talk("Hello", "And you?")
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_at_the_prompt_says_how_to_leave(talk, monkeypatch):
    lines = iter([KeyboardInterrupt, "/exit"])

    def ask(prompt: str) -> str:
        line = next(lines)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("builtins.input", ask)
    assert talk()[1].count("/exit leaves") == 2


def test_a_long_conversation_forgets_its_beginning_and_says_so(talk):
    answers, said = talk(*[f"This is message number {number}, and a long one at that." for number in range(5)])
    assert len(answers) == 5
    assert "the model's context is full: it no longer knows of the oldest" in said


def test_a_message_too_long_is_refused_and_the_conversation_goes_on(talk):
    answers, said = talk("word " * 200, "Hello")
    assert len(answers) == 1
    assert "at most 250 tokens" in said


def test_templates_can_be_named_or_given_as_a_file(model, directory, talk, tmp_path):
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "short.jinja").write_text("{{ messages[-1].content }}")
    (tmp_path / "mine.jinja").write_text("{{ messages[-1].content }}{{ eos_token }}{{ eos_token }}")
    short, _ = talk("Hello", template="short")
    mine, _ = talk("Hello", template=str(tmp_path / "mine.jinja"))
    hello, eot = TOKENIZER.encode("Hello"), TOKENIZER.eot_id
    for found, ids in ((short, hello), (mine, [*hello, eot, eot])):
        assert found == [continuation(model, ids).lstrip()]
    with pytest.raises(ConfigError, match="no file 'long', and .* has no chat template 'long'.*default, short"):
        talk("Hello", template="long")
    with pytest.raises(ConfigError, match="no file '', and"):
        talk("Hello", template="")
    (tmp_path / "binary").write_bytes(b"ab\xff")
    with pytest.raises(DataError, match="binary.* not UTF-8 at byte 2"):
        talk("Hello", template=str(tmp_path / "binary"))


def test_a_model_without_a_template_is_shown_a_play(model, talk, tmp_path):
    save_model(model, tmp_path / "plain", TOKENIZER)
    answers, said = talk("Hello", source=tmp_path / "plain")
    assert "no chat template" in said
    assert answers == [continuation(model, TOKENIZER.encode("User: Hello\nAssistant:")).lstrip()]


def test_drafts_and_quantised_weights_and_caches_talk_too(directory, talk):
    plain, _ = talk("Hello", "again again again")
    assert talk("Hello", "again again again", draft="ngram")[0] == plain
    assert talk("Hello", "again again again", draft=str(directory))[0] == plain
    assert len(talk("Hello", weights="int8", cache="int8", stop=["zzz"], seed=1, temperature=1.0)[0]) == 1
