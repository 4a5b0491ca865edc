"""Chat templates for models that come without one: `chatml`, `llama3` and other common formats.

The text of each template is what `chat_template.jinja` of a fine-tuned model contains, so that transformers, vLLM and
llama.cpp render the prompts that the model was trained on. All render the start of a conversation in the same way
regardless of what follows, which `ChatTemplate.encode_for_training` needs.
"""

from __future__ import annotations

from typing import NamedTuple

from whimbrel.base.errors import ConfigError
from whimbrel.tokenization.chat_template import ChatTemplate
from whimbrel.tokenization.tokenizer import Tokenizer

__all__ = ["BUILTIN_TEMPLATES", "BuiltinTemplate", "apply_builtin_template"]


class BuiltinTemplate(NamedTuple):
    """A chat format."""

    source: str
    """The Jinja template; it may use `bos_token`."""
    special_tokens: tuple[str, ...]
    """Tokens of the format that must be special tokens of the tokenizer."""
    end_of_turn: str
    """The special token that ends each answer: the end-of-text token of a model with this template."""


_ROLES_WITHOUT_TOOLS = """\
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] or message.tool_calls %}
        {{- raise_exception('this format has no tools: use the chatml template') }}
    {%- elif message.role == 'system' and not loop.first %}
        {{- raise_exception('expected the system message to be the first message') }}
    {%- endif %}
{%- endfor %}
"""

# For formats without a system turn: the system prompt starts the first user turn.
_SYSTEM_IN_FIRST_TURN = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- for message in turns %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('expected user and assistant turns to alternate, starting with user') }}
    {%- endif %}
{%- endfor %}
"""

_CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' and messages[0].content %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'You can call these functions, given as JSON schemas:\\n<tools>\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\\n' }}
    {%- endfor %}
    {{- '</tools>\\nTo call one, write its name and arguments as JSON:\\n<tool_call>\\n' }}
    {{- '{"name": "<function>", "arguments": {"<argument>": "<value>"}}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('expected the roles system, user, assistant and tool, got ' + message.role) }}
    {%- endif %}
    {%- if not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.role == 'tool' %}
            {{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": ' + function.name | tojson }}
            {{- ', "arguments": ' + function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

_LLAMA2 = """\
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {{- bos_token + '[INST] ' }}
        {%- if loop.first and system %}
            {{- '<<SYS>>\\n' + system | trim + '\\n<</SYS>>\\n\\n' }}
        {%- endif %}
        {{- message.content | trim + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content | trim + ' </s>' }}
    {%- endif %}
{%- endfor %}
"""

_MISTRAL = """\
{{- bos_token }}
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system + '\\n\\n' if loop.first and system else '') + message.content + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content | trim + '</s>' }}
    {%- endif %}
{%- endfor %}
"""

_GEMMA = """\
{{- bos_token }}
{%- for message in turns %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' }}
    {{- (system | trim + '\\n\\n' if loop.first and system else '') + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""

_PHI3 = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}
"""

_ZEPHYR = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' + message.content + '</s>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}
"""

BUILTIN_TEMPLATES = {
    "chatml": BuiltinTemplate(_CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "gemma": BuiltinTemplate(
        _ROLES_WITHOUT_TOOLS + _SYSTEM_IN_FIRST_TURN + _GEMMA, ("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"
    ),
    "llama2": BuiltinTemplate(_ROLES_WITHOUT_TOOLS + _SYSTEM_IN_FIRST_TURN + _LLAMA2, ("</s>",), "</s>"),
    "llama3": BuiltinTemplate(
        _ROLES_WITHOUT_TOOLS + _LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>"
    ),
    "mistral": BuiltinTemplate(_ROLES_WITHOUT_TOOLS + _SYSTEM_IN_FIRST_TURN + _MISTRAL, ("</s>",), "</s>"),
    "phi3": BuiltinTemplate(
        _ROLES_WITHOUT_TOOLS + _PHI3, ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|end|>"
    ),
    "zephyr": BuiltinTemplate(_ROLES_WITHOUT_TOOLS + _ZEPHYR, ("</s>",), "</s>"),
}
"""The templates by name. Only `chatml` has tools."""


def apply_builtin_template(name: str, tokenizer: Tokenizer) -> tuple[ChatTemplate, Tokenizer]:
    """The template, and the tokenizer with the special tokens of its format, the end of turn as end-of-text token.

    The model needs as many rows in its embedding as the new tokenizer has tokens (`models.resize_vocabulary`).
    """
    if name not in BUILTIN_TEMPLATES:
        raise ConfigError(f"unknown template '{name}' (choose from: {', '.join(BUILTIN_TEMPLATES)})")
    chat_format = BUILTIN_TEMPLATES[name]
    extended = tokenizer.with_special_tokens(chat_format.special_tokens, eot_token=chat_format.end_of_turn)
    special = {"bos_token": extended.bos_token or extended.eot_token, "eos_token": extended.eot_token}
    return ChatTemplate(chat_format.source, special, trusted=True), extended
