"""Schemathesis hooks: keep completions short, and use existing token ids in `logit_bias`."""

import schemathesis

VOCABULARY = 50257
MAX_TOKENS_FIELDS = ("max_tokens", "max_completion_tokens")


@schemathesis.hook
def before_call(context, case, **options):
    body = case.body
    if not isinstance(body, dict):
        return
    limits = [name for name in MAX_TOKENS_FIELDS if body.get(name) is not None]
    if not limits:
        body["max_tokens"] = 2
    for name in limits:
        if isinstance(body[name], int | float) and body[name] > 2:
            body[name] = 2
    bias = body.get("logit_bias")
    if isinstance(bias, dict) and all(token.isascii() and token.isdecimal() and len(token) < 10 for token in bias):
        body["logit_bias"] = {str(int(token) % VOCABULARY): value for token, value in bias.items()}
