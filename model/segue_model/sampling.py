"""From logits to the next token: bias, penalties, filters, one seeded draw, and log-probabilities.

A row of logits goes through these steps, in this order:

1. logit_bias   added to the logits
2. penalties    over the tokens of `history`: repetition (Keskar et al. 2019, arXiv:1909.05858; a seen token's logit is
                divided by the penalty when positive and multiplied when negative), then frequency and presence
                (OpenAI's definition: minus frequency * count, minus presence once)
3. banned       -inf
4. temperature  logits / temperature; 0 takes the best token and ends here
5. top-k        the k best tokens
6. top-p        the fewest of these, best first, whose share of the mass left by top-k reaches top_p
                (Holtzman et al. 2019, arXiv:1904.09751)
7. min-p        those at least min_p times as probable as the best one (Nguyen et al. 2024, arXiv:2407.01082)
8. draw         inverse CDF in token id order, at `uniform(seed, position)`

Steps 4 to 7 follow the order of Hugging Face's logits warpers. Of equal candidates the lowest token ids win. A draw
looks at its own row, seed and position only, so a seeded answer is the same alone and under load.

Log-probabilities are those of the model itself: log_softmax of the raw logits, before any of these steps. They stay
comparable between requests with other settings, equal what scoring the same tokens gives, and exist for greedy answers,
whose sampled distribution is a single point.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from segue_model.arrays import Floats, Logits

Ids = NDArray[np.int64]

_BLOCK = 256  # weights whose sum the draw looks at first, and what a nucleus search sorts at the end
_MASK64 = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


class SamplingError(ValueError):
    """No token can be drawn from these logits, or a request does not fit them; names the row and what was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a turn's tokens are chosen, every field resolved. The ranges are for the caller to check."""

    temperature: float = 1.0  # >= 0; 0 = greedy
    top_k: int | None = None  # >= 1; None = off
    top_p: float = 1.0  # (0, 1]; 1 = off
    min_p: float = 0.0  # [0, 1); 0 = off
    repetition_penalty: float = 1.0  # > 0; 1 = off
    frequency_penalty: float = 0.0  # per occurrence; 0 = off
    presence_penalty: float = 0.0  # once; 0 = off
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added to its logit
    seed: int = 0  # any int64

    @property
    def penalises(self) -> bool:
        """Whether `history` matters."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """What one row of logits is asked for."""

    sampling: Sampling
    position: int  # ledger position of the token that is drawn
    history: Sequence[int]  # tokens the penalties look at; the caller chooses the window
    banned: frozenset[int] = frozenset()  # never drawn, such as stop tokens before min_tokens
    top_logprobs: int | None = None  # None: no logprobs; 0: the sampled token's; k: also those of the k best


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability under the model, in nats."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob) of the best tokens, best first


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token drawn from one row."""

    token_id: int
    logprob: TokenLogprob | None


def sample(logits: Logits, requests: Sequence[SampleRequest]) -> list[Sampled]:
    """Draw one token per row of `logits` (n, vocab) float32, a row for each request; the logits are left as they are.

    A logit of -inf is a token of probability 0. Raises SamplingError for a row with NaN or +inf, for one where nothing
    is left to draw, and for a token id outside the vocabulary.
    """
    rows = _rows(logits, len(requests))
    return [_sample_row(number, row, request) for number, (row, request) in enumerate(zip(rows, requests, strict=True))]


def token_logprobs(logits: Logits, token_ids: Sequence[int], top: int) -> list[TokenLogprob]:
    """The model's log-probability of token_ids[t] under `logits` (T, vocab)[t], and of the `top` best tokens there.

    For prompt logprobs and scoring: row t is the output at the position before the token. Raises SamplingError for bad
    rows and token ids, as sample() does.
    """
    rows = _rows(logits, len(token_ids))
    for number, row in enumerate(rows):
        _best(number, row, "logit")
        _checked_ids(number, "token_ids", token_ids[number : number + 1], row.size)
    return [_token_logprob(row, token_id, top) for row, token_id in zip(rows, token_ids, strict=True)]


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a position: splitmix64 (Steele, Lea and Flood 2014) from the hashed seed.

    Counter-based: output number `position` is computed directly, so no state has to be kept, restored or shared.
    """
    return (_mix64(_mix64(seed) + position * _GOLDEN_GAMMA) >> 11) * 2.0**-53


def _mix64(state: int) -> int:
    """The splitmix64 finaliser of a 64-bit state, advanced by one step first."""
    z = (state + _GOLDEN_GAMMA) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _rows(logits: Logits, count: int) -> Logits:
    if logits.ndim != 2 or len(logits) != count:
        raise SamplingError(f"logits must be ({count}, vocab), a row for each token, got {logits.shape}")
    return logits


def _sample_row(number: int, row: Floats, request: SampleRequest) -> Sampled:
    best = _best(number, row, "logit")
    scores = _adjusted(number, row, request)
    if scores is not row:
        best = _best(number, scores, "logit after bias, penalties and bans")
    greedy = request.sampling.temperature == 0
    token_id = best if greedy else _draw_token(scores, scores[best], request)
    top = request.top_logprobs
    return Sampled(token_id, None if top is None else _token_logprob(row, token_id, top))


def _best(number: int, scores: Floats, what: str) -> int:
    """The first best token. One pass finds bad rows too: argmax stops at NaN, +inf is above all, -inf means all are."""
    best = int(scores.argmax())
    if not math.isfinite(scores[best]):
        raise SamplingError(f"row {number}: the best {what} is {scores[best]} (token {best})")
    return best


def _adjusted(number: int, row: Floats, request: SampleRequest) -> Floats:
    """Bias, penalties and bans on a copy; the row itself when there are none."""
    sampling = request.sampling
    if not (sampling.logit_bias or sampling.penalises or request.banned):
        return row
    scores = row.copy()
    if sampling.logit_bias:
        ids = _checked_ids(number, "logit_bias", sampling.logit_bias, row.size)
        scores[ids] += np.fromiter(sampling.logit_bias.values(), np.float64, len(ids))
    if sampling.penalises:
        _penalise(scores, _checked_ids(number, "history", request.history, row.size), sampling)
    if request.banned:
        scores[_checked_ids(number, "banned", request.banned, row.size)] = -np.inf
    return scores


def _checked_ids(number: int, name: str, token_ids: Collection[int], vocab: int) -> Ids:
    ids = np.fromiter(token_ids, np.int64, len(token_ids))
    if ids.size and (ids.min() < 0 or ids.max() >= vocab):
        bad = ids[(ids < 0) | (ids >= vocab)][0]
        raise SamplingError(f"row {number}: {name} holds token {bad}, the vocabulary ends at {vocab - 1}")
    return ids


def _penalise(scores: Floats, history: Ids, sampling: Sampling) -> None:
    seen, counts = np.unique(history, return_counts=True)
    logits, repetition = scores[seen].astype(np.float64), sampling.repetition_penalty
    # A penalty near 0 may overflow; the row is then refused by name, a warning would add nothing.
    with np.errstate(over="ignore"):
        logits = np.where(logits > 0, logits / repetition, logits * repetition)
        scores[seen] = logits - counts * sampling.frequency_penalty - sampling.presence_penalty


def _draw_token(scores: Floats, peak: np.floating, request: SampleRequest) -> int:
    """One draw at temperature > 0; `peak` is the best score, so that weights are at most 1 and exp never overflows."""
    sampling = request.sampling
    kept: list[Ids] = []  # what each filter keeps, as indices into what the one before it kept
    if sampling.top_k is not None and sampling.top_k < scores.size:
        kept.append(_largest(scores, sampling.top_k))
        scores = scores[kept[-1]]
    with np.errstate(over="ignore"):  # a tiny temperature sends the others to -inf, weight 0, as it should
        weights = np.exp((scores.astype(np.float64) - peak) / sampling.temperature)
    if sampling.top_p < 1:
        kept.append(_nucleus(weights, sampling.top_p))
        weights = weights[kept[-1]]
    if sampling.min_p > 0:
        kept.append(np.flatnonzero(weights >= sampling.min_p))
        weights = weights[kept[-1]]
    index = _draw(weights, uniform(sampling.seed, request.position))
    for ids in reversed(kept):
        index = int(ids[index])
    return index


def _largest(values: Floats, count: int) -> Ids:
    """Indices, ascending, of the `count` largest values; 1 <= count <= len(values)."""
    rank = values.size - count
    return _at_least(values, np.partition(values, rank)[rank], count)


def _at_least(values: Floats, floor: np.floating, count: int) -> Ids:
    """Indices, ascending, of the `count` largest values, given that the smallest of them is `floor`."""
    ids = np.flatnonzero(values >= floor)
    if ids.size == count:
        return ids
    ties = np.flatnonzero(values[ids] == floor)
    return np.delete(ids, ties[count - ids.size :])


def _nucleus(weights: Floats, top_p: float) -> Ids:
    """Indices, ascending, of the fewest weights, largest first, whose sum reaches top_p of the total.

    A weighted quickselect: split the pool by size and go on in the part where the sum is reached, which costs less than
    sorting the vocabulary. It starts with narrow splits at the top, where the nucleus of a trained model lies.
    """
    pool, count, missing, parts = weights, 0, top_p * weights.sum(), 16
    while pool.size > _BLOCK:
        split = pool.size - pool.size // parts
        pool = np.partition(pool, split)
        upper = pool[split:]
        mass = upper.sum()
        if mass >= missing:
            pool = upper
        else:
            pool, count, missing, parts = pool[:split], count + upper.size, missing - mass, 2
    descending = np.sort(pool)[::-1]
    # The sums above run in another order than this one: their last bits may ask for more than there is.
    last = min(int(np.searchsorted(descending.cumsum(), missing)), pool.size - 1)
    return _at_least(weights, descending[last], count + last + 1)


def _draw(weights: Floats, u: float) -> int:
    """The index where the running sum of the weights passes u of the total: block by block first, then inside one.

    A cumulative sum is a chain of additions, 200 us over a vocabulary of 49,152; block sums are eight times cheaper.
    """
    starts = np.arange(0, weights.size, _BLOCK)
    sums = np.add.reduceat(weights, starts).cumsum()
    target = u * sums[-1]  # u <= 1 - 2**-53, so this rounds to less than the total
    block = int(np.searchsorted(sums, target, side="right"))
    inner = weights[starts[block] : starts[block] + _BLOCK].cumsum()
    # The block's sum in this order may end a bit below the other one; the target must stay inside, before weights of 0.
    rest = min(target - (sums[block - 1] if block else 0.0), np.nextafter(inner[-1], 0))
    return int(starts[block] + np.searchsorted(inner, rest, side="right"))


def _token_logprob(row: Floats, token_id: int, top: int) -> TokenLogprob:
    logits = row.astype(np.float64)
    peak = logits.max()
    log_total = peak + np.log(np.exp(logits - peak).sum())
    best = _best_first(row, min(top, row.size))
    return TokenLogprob(
        token_id,
        float(logits[token_id] - log_total),
        tuple((int(index), float(logits[index] - log_total)) for index in best),
    )


def _best_first(row: Floats, count: int) -> Ids:
    if count < 1:
        return np.empty(0, np.int64)
    ids = _largest(row, count)
    return ids[np.argsort(-row[ids], kind="stable")]
