"""`whimbrel chat`."""

from __future__ import annotations

import io
import signal
from pathlib import Path

import pytest
import torch
from tests.support.byte_tokenizer import byte_tokenizer

from whimbrel.base.errors import ConfigError, DataError, RequestError
from whimbrel.cli.generate import chat
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
def run_chat(directory, capsys, monkeypatch):
    """Feed these lines to `chat`; returns the answers and what was printed to standard error."""

    def run(*lines: str, source: Path = directory, **options: object) -> tuple[list[str], str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        chat(source, **{"max_new_tokens": 6, "temperature": 0, "device": "cpu"} | options)
        printed = capsys.readouterr()
        return printed.out.split("\n\n")[:-1], printed.err

    return run


def continuation(model: GPT, ids: list[int], count: int = 6) -> str:
    generated = generate(model, ids, max_new_tokens=count, temperature=0, stop_ids=TOKENIZER.eot_id)
    return "".join(stream_text(TOKENIZER, ids, generated))


def expected(model: GPT, folder: Path, messages: list[dict[str, str]], count: int = 6) -> str:
    return continuation(model, load_chat_template(folder).encode(TOKENIZER, messages), count)


def test_answers_depend_on_the_complete_conversation_since_the_last_reset(model, directory, run_chat):
    answers, notices = run_chat("Hello", "", "And you?", "/reset", "Hello", "/exit", "never asked", system="Be brief.")
    assert len(answers) == 3
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    first = expected(model, directory, messages)
    assert answers[0] == answers[2] == first.lstrip()
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And you?"}]
    assert answers[1] == expected(model, directory, messages).lstrip()
    assert "/help lists the commands" in notices
    assert "new conversation" in notices


def test_end_of_input_quits(run_chat):
    assert len(run_chat("Hello")[0]) == 1
    assert run_chat()[0] == []


def test_system_prompt_that_exceeds_the_context_is_rejected_at_the_start(run_chat, capsys):
    with pytest.raises(RequestError, match="system prompt .* at most 250 tokens"):
        run_chat("Hello", system="x" * 300)
    assert "/help" not in capsys.readouterr().err


def test_help_lists_the_commands_and_unknown_ones_are_reported(run_chat):
    answers, notices = run_chat("/help", "/quit")
    assert answers == []
    for command in ("/help", "/reset", "/exit", "Ctrl-C"):
        assert f"\n{command}  " in notices
    assert "unknown command '/quit': type /help" in notices


def test_ctrl_c_stops_only_the_current_answer(model, directory, run_chat, monkeypatch):
    from whimbrel.inference import Engine

    real, calls = Engine._sample, []

    def sample(*given):
        calls.append(0)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return real(*given)

    monkeypatch.setattr(Engine, "_sample", sample)
    handler = signal.getsignal(signal.SIGINT)
    answers, _ = run_chat("Hello", "And you?")
    assert len(calls) == 3 + 6
    assert signal.getsignal(signal.SIGINT) is handler
    messages = [{"role": "user", "content": "Hello"}]
    stopped = expected(model, directory, messages, 3)
    assert answers[0] == stopped.lstrip()
    messages += [{"role": "assistant", "content": stopped}, {"role": "user", "content": "And you?"}]
    assert answers[1] == expected(model, directory, messages).lstrip()


def test_second_ctrl_c_quits(run_chat, monkeypatch):
    def sample(*_):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("whimbrel.inference.Engine._sample", sample)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            run_chat("Hello", "And you?")
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_at_the_prompt_prints_how_to_quit(run_chat, monkeypatch):
    lines = iter([KeyboardInterrupt, "/exit"])

    def ask(prompt: str) -> str:
        line = next(lines)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("builtins.input", ask)
    assert run_chat()[1].count("/exit quits") == 2


def test_oldest_messages_are_dropped_with_a_notice_when_the_context_is_full(run_chat):
    answers, notices = run_chat(*[f"This is message number {number}, and a long one at that." for number in range(5)])
    assert len(answers) == 5
    assert "context is full: dropped" in notices


def test_message_that_exceeds_the_context_is_rejected_and_the_chat_continues(run_chat):
    answers, notices = run_chat("word " * 200, "Hello")
    assert len(answers) == 1
    assert "at most 250 tokens" in notices


def test_template_option_accepts_a_name_or_a_file(model, directory, run_chat, tmp_path):
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "short.jinja").write_text("{{ messages[-1].content }}")
    (tmp_path / "mine.jinja").write_text("{{ messages[-1].content }}{{ eos_token }}{{ eos_token }}")
    short, _ = run_chat("Hello", template="short")
    mine, _ = run_chat("Hello", template=str(tmp_path / "mine.jinja"))
    hello, eot = TOKENIZER.encode("Hello"), TOKENIZER.eot_id
    for found, ids in ((short, hello), (mine, [*hello, eot, eot])):
        assert found == [continuation(model, ids).lstrip()]
    with pytest.raises(ConfigError, match="no such file: 'long'.* has no chat template 'long'.*default, short"):
        run_chat("Hello", template="long")
    with pytest.raises(ConfigError, match="no such file: ''"):
        run_chat("Hello", template="")
    (tmp_path / "run.toml").write_text("[train]\nsteps = 1\n")
    with pytest.raises(DataError, match=r"expected a Jinja file .*run\.toml"):
        run_chat("Hello", template=str(tmp_path / "run.toml"))
    (tmp_path / "binary").write_bytes(b"ab\xff")
    with pytest.raises(DataError, match="binary.* not UTF-8 at byte 2"):
        run_chat("Hello", template=str(tmp_path / "binary"))


def test_model_without_a_default_template_asks_for_a_name(model, run_chat, tmp_path):
    save_model(model, tmp_path / "named", TOKENIZER)
    (tmp_path / "named" / "additional_chat_templates").mkdir()
    (tmp_path / "named" / "additional_chat_templates" / "short.jinja").write_text("{{ messages[-1].content }}")
    with pytest.raises(ConfigError, match="has no chat template 'default'.*short.*--template") as caught:
        run_chat("Hello", source=tmp_path / "named")
    assert "None" not in str(caught.value)


def test_model_without_a_template_uses_a_plain_user_assistant_format(model, run_chat, tmp_path):
    save_model(model, tmp_path / "plain", TOKENIZER)
    answers, notices = run_chat("Hello", source=tmp_path / "plain")
    assert "no chat template" in notices
    assert answers == [continuation(model, TOKENIZER.encode("User: Hello\nAssistant:")).lstrip()]


def test_draft_quantized_weights_and_quantized_cache_work_in_chat(directory, run_chat):
    baseline, _ = run_chat("Hello", "again again again")
    assert run_chat("Hello", "again again again", draft="ngram")[0] == baseline
    assert run_chat("Hello", "again again again", draft=str(directory))[0] == baseline
    assert len(run_chat("Hello", quantize="int8", kv_cache_dtype="int8", stop=["zzz"], seed=1, temperature=1.0)[0]) == 1
