"""From a source to a target, token by token, over cached keys and values. The model should be in eval mode."""

import math
from typing import NamedTuple

import torch

from segue_model.seq2seq.config import BOS, EOS, PAD
from segue_model.seq2seq.transformer import Transformer


class Hypotheses(NamedTuple):
    """The best target of each source."""

    tokens: torch.Tensor  # (B, T): after BOS, up to and with EOS, then padding; no EOS where the limit came first
    log_probs: torch.Tensor  # (B,): sum over the tokens


@torch.inference_mode()
def greedy(model: Transformer, source: torch.Tensor, *, max_tokens: int) -> Hypotheses:
    """The most likely token at each step. source: (B, S), padded at the end; max_tokens counts EOS."""
    return beam_search(model, source, max_tokens=max_tokens, beams=1)


@torch.inference_mode()
def beam_search(
    model: Transformer, source: torch.Tensor, *, max_tokens: int, beams: int = 4, alpha: float = 0.6
) -> Hypotheses:
    """The best of `beams` hypotheses kept in parallel, ranked by log p / ((5 + length) / 6)^alpha (Wu et al. 2016).

    The defaults are the paper's (section 6.1). source: (B, S), padded at the end; max_tokens counts EOS.
    Raises ValueError for beams or max_tokens below 1.
    """
    if beams < 1 or max_tokens < 1:
        raise ValueError(f"beams and max_tokens must be at least 1, got {beams} and {max_tokens}")
    batch, device = source.shape[0], source.device
    rows = torch.arange(batch, device=device)[:, None]  # (B, 1)
    cache = model.encode(source)
    cache.select(rows.expand(batch, beams).flatten())
    tokens = source.new_full((batch, beams, 1), BOS)  # (B, K, t)
    log_probs = torch.full((batch, beams), -math.inf, device=device)  # (B, K)
    log_probs[:, 0] = 0.0  # all beams begin alike: only one may propose
    for _ in range(max_tokens):
        logits = model.decode(tokens[:, :, -1].flatten()[:, None], cache).logits  # (B * K, 1, V)
        candidates = log_probs[..., None] + _next_log_probs(logits.reshape(batch, beams, -1), tokens)
        tokens, log_probs, parents = _best(candidates, tokens, alpha)
        cache.select((rows * beams + parents).flatten())
        if bool(_ended(tokens).all()):
            break
    return Hypotheses(tokens[:, 0, 1:], log_probs[:, 0])


def _next_log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(B, K, V): PAD and BOS are no targets; after its end a hypothesis goes on with PAD, at no cost."""
    logits = logits.index_fill(-1, tokens.new_tensor([PAD, BOS]), -math.inf)
    padding_only = torch.full_like(logits[0, 0], -math.inf)  # (V,)
    padding_only[PAD] = 0.0
    return torch.where(_ended(tokens)[..., None], padding_only, logits.log_softmax(dim=-1))


def _best(
    candidates: torch.Tensor, tokens: torch.Tensor, alpha: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The K best of K * V continuations: tokens (B, K, t + 1), log_probs (B, K), the beam each goes on from (B, K)."""
    beams, vocab = candidates.shape[1:]
    lengths = (tokens[..., 1:] != PAD).sum(dim=-1) + (~_ended(tokens)).long()  # (B, K), with the new token
    scores = candidates / ((5 + lengths[..., None]) / 6) ** alpha
    chosen = scores.flatten(1).topk(beams, dim=-1).indices  # (B, K)
    parents, new = chosen // vocab, chosen % vocab
    kept = tokens.gather(1, parents[..., None].expand_as(tokens))
    return torch.cat((kept, new[..., None]), dim=-1), candidates.flatten(1).gather(1, chosen), parents


def _ended(tokens: torch.Tensor) -> torch.Tensor:
    """(B, K): the hypothesis has its EOS."""
    last = tokens[..., -1]
    return (last == EOS) | (last == PAD)
