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
8. draw         inverse CDF in token id order, at `random_bits(seed, position)`

Steps 4 to 7 follow the order of Hugging Face's logits warpers. Of equal candidates the lowest token ids win. A draw
looks at its own row, seed and position only, so a seeded answer is the same alone and under load.

Log-probabilities are those of the model itself: log_softmax of the raw logits, before any of these steps. They stay
comparable between requests with other settings, equal what scoring the same tokens gives, and exist for greedy answers,
whose sampled distribution is a single point.

All this is the slow twin of the native runner's `sample.cpp`, which gives the same tokens and log-probabilities bit for
bit. What both must round, both round alike: scores are float32 after each change, which is computed in float64; a
candidate's probability is an integer (`softmax.py`), so the sums of steps 6 to 8 are exact; the share in 6 is
ceil(top_p * mass), the bound in 7 ceil(min_p * ONE), both in float64.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from segue_model.arrays import Floats, Logits
from segue_model.softmax import MAX_VOCAB, ONE, Ids, log_total, weights
from segue_model.splitmix import random_bits

_BLOCK = 256  # shares that the draw adds up first, and what a nucleus search sorts at the end


class SamplingError(ValueError):
    """No token can be drawn from a row of logits, or a request does not fit it; says what was found."""

    @classmethod
    def no_best(cls, what: str, value: float, token: int) -> "SamplingError":
        return cls(f"the best {what} is {value} (token {token})")

    @classmethod
    def unknown_token(cls, where: str, token: int, vocab: int) -> "SamplingError":
        return cls(f"{where} holds token {token}, the vocabulary ends at {vocab - 1}")


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


Outcome = Sampled | SamplingError


def sample(rows: Sequence[Logits], requests: Sequence[SampleRequest]) -> list[Outcome]:
    """Draw one token from each row of logits (vocab,), which are left as they are.

    A logit of -inf is a token of probability 0. A row gets a SamplingError when it holds NaN or +inf, when nothing is
    left to draw, and for a token id outside the vocabulary; the other rows are drawn. Raises ValueError when rows and
    requests do not go together.
    """
    check_rows(rows, requests)
    return [_sampled(row, request) for row, request in zip(rows, requests, strict=True)]


def check_rows(rows: Sequence[Logits], requests: Sequence[SampleRequest]) -> None:
    """Raises ValueError unless each request has a row, all of one vocabulary whose weights can be summed up."""
    if len(rows) != len(requests):
        raise ValueError(
            f"there must be a row of logits for each request, got {len(rows)} rows, {len(requests)} requests"
        )
    for row in rows:
        if row.ndim != 1 or not 0 < row.size <= MAX_VOCAB:
            raise ValueError(f"a row of logits must be (vocab,), of 1 .. {MAX_VOCAB} tokens, got {row.shape}")
        if row.size != rows[0].size:
            raise ValueError(f"rows of logits must be of one vocabulary, got {rows[0].size} and {row.size} tokens")


def token_logprobs(logits: Logits, token_ids: Sequence[int], top: int) -> list[TokenLogprob]:
    """The model's log-probability of token_ids[t] under `logits` (T, vocab)[t], and of the `top` best tokens there.

    For prompt logprobs and scoring: row t is the output at the position before the token. Raises SamplingError for bad
    rows and token ids, and names the row.
    """
    if logits.ndim != 2 or len(logits) != len(token_ids):
        raise SamplingError(f"logits must be ({len(token_ids)}, vocab), a row for each token, got {logits.shape}")
    return [_scored(number, *pair, top) for number, pair in enumerate(zip(logits, token_ids, strict=True))]


def logprob_of(row: Logits, token_id: int, total: float, best: Iterable[int]) -> TokenLogprob:
    """The log-probability of a token, and of the `best` ones, best first; `total` is log(sum(exp(row)))."""
    top = tuple((each, float(row[each]) - total) for each in best)
    return TokenLogprob(token_id, float(row[token_id]) - total, top)


def _sampled(row: Logits, request: SampleRequest) -> Outcome:
    try:
        return _sample_row(row, request)
    except SamplingError as error:
        return error


def _scored(number: int, row: Logits, token_id: int, top: int) -> TokenLogprob:
    try:
        best = _best(row, "logit")
        _checked_ids("token_ids", (token_id,), row.size)
    except SamplingError as error:
        raise SamplingError(f"row {number}: {error}") from error
    return _token_logprob(row, token_id, best, top)


def _sample_row(row: Logits, request: SampleRequest) -> Sampled:
    best = model_best = _best(row, "logit")
    scores = _adjusted(row, request)
    if scores is not row:
        best = _best(scores, "logit after bias, penalties and bans")
    greedy = request.sampling.temperature == 0
    token_id = best if greedy else _draw_token(scores, float(scores[best]), request)
    top = request.top_logprobs
    return Sampled(token_id, None if top is None else _token_logprob(row, token_id, model_best, top))


def _best(scores: Floats, what: str) -> int:
    """The first best token. One pass finds bad rows too: argmax stops at NaN, +inf is above all, -inf means all are."""
    best = int(scores.argmax())
    if not math.isfinite(scores[best]):
        raise SamplingError.no_best(what, float(scores[best]), best)
    return best


def _adjusted(row: Floats, request: SampleRequest) -> Floats:
    """Bias, penalties and bans on a copy; the row itself when there are none."""
    sampling = request.sampling
    if not (sampling.logit_bias or sampling.penalises or request.banned):
        return row
    scores = row.copy()
    if sampling.logit_bias:
        ids = _checked_ids("logit_bias", sampling.logit_bias, row.size)
        scores[ids] += np.fromiter(sampling.logit_bias.values(), np.float64, len(ids))
    if sampling.penalises:
        _penalise(scores, _checked_ids("history", request.history, row.size), sampling)
    if request.banned:
        scores[_checked_ids("banned", request.banned, row.size)] = -np.inf
    return scores


def _checked_ids(name: str, token_ids: Collection[int], vocab: int) -> Ids:
    ids = np.fromiter(token_ids, np.int64, len(token_ids))
    if ids.size and (ids.min() < 0 or ids.max() >= vocab):
        raise SamplingError.unknown_token(name, int(ids[(ids < 0) | (ids >= vocab)][0]), vocab)
    return ids


def _penalise(scores: Floats, history: Ids, sampling: Sampling) -> None:
    seen, counts = np.unique(history, return_counts=True)
    logits, repetition = scores[seen].astype(np.float64), sampling.repetition_penalty
    # A penalty near 0 may overflow; the row is then refused by name, a warning would add nothing.
    with np.errstate(over="ignore"):
        logits = np.where(logits > 0, logits / repetition, logits * repetition)
        scores[seen] = logits - counts * sampling.frequency_penalty - sampling.presence_penalty


def _draw_token(scores: Floats, peak: float, request: SampleRequest) -> int:
    """One draw at temperature > 0; `peak` is the best score."""
    sampling = request.sampling
    kept: list[Ids] = []  # what each filter keeps, as indices into what the one before it kept
    if sampling.top_k is not None and sampling.top_k < scores.size:
        kept.append(_largest(scores, sampling.top_k))
        scores = scores[kept[-1]]
    shares = weights(scores, peak, sampling.temperature)
    if sampling.top_p < 1:
        kept.append(_nucleus(shares, sampling.top_p))
        shares = shares[kept[-1]]
    if sampling.min_p > 0:
        kept.append(np.flatnonzero(shares >= math.ceil(sampling.min_p * ONE)))
        shares = shares[kept[-1]]
    index = _draw(shares, random_bits(sampling.seed, request.position))
    for ids in reversed(kept):
        index = int(ids[index])
    return index


def _largest(values: Floats, count: int) -> Ids:
    """Indices, ascending, of the `count` largest values; 1 <= count <= len(values)."""
    rank = values.size - count
    return _at_least(values, np.partition(values, rank)[rank], count)


def _at_least(values: Floats | Ids, floor: float, count: int) -> Ids:
    """Indices, ascending, of the `count` largest values, given that the smallest of them is `floor`."""
    ids = np.flatnonzero(values >= floor)
    if ids.size == count:
        return ids
    ties = np.flatnonzero(values[ids] == floor)
    return np.delete(ids, ties[count - ids.size :])


def _nucleus(shares: Ids, top_p: float) -> Ids:
    """Indices, ascending, of the fewest shares, largest first, whose sum reaches top_p of the total.

    A weighted quickselect: split the pool by size and go on in the part where the sum is reached, which costs less than
    sorting the vocabulary. It starts with narrow splits at the top, where the nucleus of a trained model lies.
    """
    total = int(shares.sum())
    missing = min(max(math.ceil(top_p * float(total)), 1), total)
    pool, count, parts = shares, 0, 16
    while pool.size > _BLOCK:
        split = pool.size - pool.size // parts
        pool = np.partition(pool, split)
        upper = pool[split:]
        mass = int(upper.sum())
        if mass >= missing:
            pool = upper
        else:
            pool, count, missing, parts = pool[:split], count + upper.size, missing - mass, 2
    descending = np.sort(pool)[::-1]
    last = int(np.searchsorted(descending.cumsum(), missing))
    return _at_least(shares, descending[last], count + last + 1)


def _draw(shares: Ids, random: int) -> int:
    """The index where the running sum of the shares passes random / 2**64 of the total.

    Block by block, then inside one: a cumulative sum is a chain of additions, which sums of blocks are not.
    """
    starts = np.arange(0, shares.size, _BLOCK)
    sums = np.add.reduceat(shares, starts).cumsum()
    target = random * int(sums[-1]) >> 64
    block = int(np.searchsorted(sums, target, side="right"))
    rest = target - (int(sums[block - 1]) if block else 0)
    inner = shares[starts[block] : starts[block] + _BLOCK].cumsum()
    return int(starts[block] + np.searchsorted(inner, rest, side="right"))


def _token_logprob(row: Logits, token_id: int, best: int, top: int) -> TokenLogprob:
    peak = float(row[best])
    total = log_total(peak, int(weights(row, peak, 1.0).sum()))
    return logprob_of(row, token_id, total, _best_first(row, min(top, row.size)).tolist())


def _best_first(row: Floats, count: int) -> Ids:
    if count < 1:
        return np.empty(0, np.int64)
    ids = _largest(row, count)
    return ids[np.argsort(-row[ids], kind="stable")]
