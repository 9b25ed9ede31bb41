"""From logits to the next token: bias, penalties, filters, one seeded draw, and log-probabilities."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch


class SamplingError(ValueError):
    """Logits or a request that no token can be drawn from; names the row and what was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SampleRequest:
    sampling: Sampling
    position: int
    history: Sequence[int]
    banned: frozenset[int] = frozenset()
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    token_id: int
    logprob: TokenLogprob | None


def sample(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> list[Sampled]:
    raise NotImplementedError


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprob]:
    raise NotImplementedError


def uniform(seed: int, position: int) -> float:
    raise NotImplementedError
