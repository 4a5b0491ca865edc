"""What is asked of the engine, what comes back, and one text under way between the two."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from whimbrel.base.errors import RequestError
from whimbrel.cache.blocks import BlockManager, BlockTable
from whimbrel.inference.sampling import History, SampleRNG, SamplingParams

__all__ = ["Event", "Finish", "Request", "Sequence", "Logprob"]

Finish = Literal["stop", "length", "error"]


class Logprob(NamedTuple):
    """How likely a token was to the model, and which ones were likeliest in its place."""

    logprob: float | None
    """None for the first token of a prompt, before which there is nothing."""
    top: tuple[tuple[int, float], ...] = ()
    """(token, its log-probability), likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt and how to go on from it."""

    prompt_ids: tuple[int, ...]
    """The tokens to go on from."""
    max_new_tokens: int
    """How many tokens are drawn at most, also no more than the context has room for; 0 only scores the prompt."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """How each is drawn."""
    seed: int | None = None
    """The same seed gives the same tokens; None draws differently each time."""
    n: int = 1
    """How many samples are drawn; they share the pages of the prompt."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a sample and are not part of it."""
    logprobs: int | None = None
    """Logprob each new token, with this many of the likeliest beside it."""
    prompt_logprobs: int | None = None
    """Logprob each token of the prompt, with this many of the likeliest beside it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", tuple(self.prompt_ids))
        if not self.prompt_ids:
            raise RequestError("the prompt is empty: give at least one token")
        for name, least in (("max_new_tokens", 0), ("n", 1), ("logprobs", 0), ("prompt_logprobs", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise RequestError(f"{name} = {value} must be at least {least}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise RequestError(f"seed = {self.seed} must be a whole number from 0 to 2**63 - 1")


class Event(NamedTuple):
    """Something that happened to one sample of a request."""

    request: int
    """The number returned by `add_request`."""
    sample: int
    """0 to n - 1."""
    token: int | None = None
    """The token drawn; None where the prompt was scored, or a stop token ended the sample."""
    logprob: float | None = None
    """Of the token, where the request asked."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens in its place, with their log-probabilities."""
    finish_reason: Finish | None = None
    """Why this is the sample's last event: a stop token was drawn, there is room for no more tokens, or the model's
    numbers are not finite (`error`)."""
    prompt: tuple[Logprob, ...] | None = None
    """Scores of the prompt's tokens, where asked: once per request, on its first sample, before the first token."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One text under way: what is known of it, and what of that its pages hold.

    Known tokens that the pages lack are still to be read; when the last has been read, the next token is drawn. So a
    prompt at its beginning, a prompt half read, a text that goes on and one that starts over are all the same thing.
    """

    number: int
    """Of the request, in the order they came."""
    request: Request
    """What was asked."""
    block_table: BlockTable
    """The pages."""
    tokens: list[int]
    """The prompt and what was drawn after it."""
    samples: list[int]
    """Which samples of the request this is: all that are wanted until the prompt has been read, then one."""
    scores: list[Logprob]
    """Of the prompt's tokens, as far as they are known."""
    rng: SampleRNG
    """The random stream, which goes on where it was whatever becomes of the pages."""
    longest: int
    """How many tokens the text may come to have."""

    @classmethod
    def of(cls, request: Request, number: int, pool: BlockManager, context_length: int) -> Sequence:
        """A row with nothing read yet."""
        tokens, samples = list(request.prompt_ids), list(range(request.n))
        longest = min(len(tokens) + request.max_new_tokens, context_length)
        return cls(
            number, request, BlockTable(pool), tokens, samples, [Logprob(None)], SampleRNG(request.seed), longest
        )

    def split(self) -> list[Sequence]:
        """A row for each sample, this one first, that share the pages read so far but have random streams apart."""
        self.samples, others = self.samples[:1], self.samples[1:]
        return [self, *(self._twin(sample) for sample in others)]

    def leave_out(self, sample: int) -> None:
        """Stand for all samples that this row stood for but one."""
        self.samples.remove(sample)
        self.rng = SampleRNG(self.request.seed, self.sample)

    def _twin(self, sample: int) -> Sequence:
        draws = SampleRNG(self.request.seed, sample)
        holding, tokens = self.block_table.fork(), self.tokens[:]
        return Sequence(self.number, self.request, holding, tokens, [sample], self.scores, draws, self.longest)

    @property
    def sample(self) -> int:
        """Which of the samples this is."""
        return self.samples[0]

    @property
    def age(self) -> tuple[int, int]:
        """Rows that came first have the smallest."""
        return self.number, self.sample

    @property
    def pending(self) -> int:
        """Known tokens that have not been read."""
        return len(self.tokens) - self.block_table.stored

    @property
    def drawn(self) -> int:
        """Tokens after the prompt."""
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def history(self) -> History:
        """What penalties count."""
        return History(self.tokens, len(self.request.prompt_ids))

    @property
    def complete(self) -> bool:
        """Whether no more tokens may be drawn."""
        return len(self.tokens) >= self.longest

    @property
    def predictable(self) -> bool:
        """Whether its next token is the model's likeliest, unseen by anyone."""
        request = self.request
        told = self.drawn > 0 or request.prompt_logprobs is None
        plain = request.sampling.plain and request.logprobs is None
        return told and plain and not self.complete and len(self.samples) == 1

    @property
    def unscored(self) -> range:
        """Positions that tell how likely the next token of the prompt is, and have still to be asked."""
        if self.request.prompt_logprobs is None:
            return range(0)
        return range(len(self.scores) - 1, len(self.request.prompt_ids) - 1)
