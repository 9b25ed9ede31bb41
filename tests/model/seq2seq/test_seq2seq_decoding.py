"""Decoding: the cache changes nothing, and beam search finds what exhaustive search finds."""

from itertools import product

import pytest
import torch

from segue_model.seq2seq import Transformer, TransformerConfig, beam_search, greedy
from segue_model.seq2seq.training import pad

BOS, EOS, PAD = 1, 2, 0
SOURCES = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 0, 0, 0, 0], [6, 6, 9, 5, 0, 0]])  # unequal lengths


def lively_model(target_vocab: int = 14, **changes: object) -> Transformer:
    """Weights large enough that choices differ from step to step."""
    model = Transformer(
        TransformerConfig(
            source_vocab=14, target_vocab=target_vocab, dim=32, heads=4, encoder_layers=2, decoder_layers=2, **changes
        )
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    return model.eval()


def rescored(model: Transformer, source: torch.Tensor, sequences: list[list[int]]) -> list[float]:
    """log p of each sequence (EOS included) after BOS, computed without a cache; PAD and BOS are no targets."""
    targets = pad([[BOS, *tokens] for tokens in sequences])
    logits = model(source.expand(len(sequences), -1), targets[:, :-1])
    logits[..., [PAD, BOS]] = -torch.inf
    found = logits.log_softmax(-1).gather(-1, targets[:, 1:, None])[..., 0]
    return found.masked_fill(targets[:, 1:] == PAD, 0.0).sum(dim=-1).tolist()


def without_padding(row: torch.Tensor) -> list[int]:
    return [token for token in row.tolist() if token != PAD]


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("chunks", [[1] * 7, [3, 1, 3]])
@torch.no_grad()
def test_cached_equals_uncached(norm: str, chunks: list[int]) -> None:
    """Logits over cached self- and cross-attention K/V equal those of one whole pass to 1e-5, however it is cut."""
    model = lively_model(norm=norm)
    target = torch.tensor([[1, 5, 9, 7, 12, 3, 4], [1, 8, 2, 0, 0, 0, 0], [1, 6, 6, 13, 2, 0, 0]])
    whole = model(SOURCES, target)
    cache = model.encode(SOURCES)
    steps = [model.decode(chunk, cache).logits for chunk in target.split(chunks, dim=1)]
    difference = (torch.cat(steps, dim=1) - whole).abs().max().item()
    print(f"\n{norm}-norm, chunks {chunks}: largest difference {difference:.1e}")
    assert difference < 1e-5
    assert cache.pos == 7


@torch.no_grad()
def test_the_source_is_projected_once() -> None:
    """Cross-attention K/V never change while the target grows."""
    model = lively_model()
    cache = model.encode(SOURCES)
    keys = [layer.source.k for layer in cache.layers]
    for _ in range(3):
        model.decode(torch.full((3, 1), 5), cache)
    assert all(layer.source.k is k for layer, k in zip(cache.layers, keys, strict=True))


@torch.no_grad()
def test_batch_neighbours_change_nothing() -> None:
    """A source decodes alike alone and padded beside longer ones."""
    model = lively_model()
    together = greedy(model, SOURCES, max_tokens=9)
    for row, source in enumerate(SOURCES):
        alone = greedy(model, source[source != PAD][None], max_tokens=9)
        assert without_padding(together.tokens[row]) == without_padding(alone.tokens[0])
        assert together.log_probs[row].item() == pytest.approx(alone.log_probs[0].item(), abs=1e-5)


@torch.no_grad()
def test_greedy_equals_a_loop_without_a_cache() -> None:
    """Recomputing everything at every step picks the same tokens."""
    model = lively_model()
    found = greedy(model, SOURCES, max_tokens=9).tokens
    for row, source in enumerate(SOURCES):
        tokens = [BOS]
        while len(tokens) <= 9 and tokens[-1] != EOS:
            logits = model(source[source != PAD][None], torch.tensor([tokens]))[0, -1]
            logits[[PAD, BOS]] = -torch.inf
            tokens.append(int(logits.argmax()))
        assert without_padding(found[row]) == tokens[1:]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
@torch.no_grad()
def test_a_wide_beam_finds_what_exhaustive_search_finds(alpha: float) -> None:
    """With room for every hypothesis, beam search returns the best of all sequences under the length penalty."""
    ended = [[*body, EOS] for n in range(3) for body in product((3, 4, 5), repeat=n)]
    everything = [*ended, *map(list, product((3, 4, 5), repeat=3))]
    lengths = []
    for seed in range(8):
        torch.manual_seed(seed)
        model = lively_model(target_vocab=6)
        found = beam_search(model, SOURCES, max_tokens=3, beams=64, alpha=alpha).tokens
        for row, source in zip(found, SOURCES, strict=True):
            log_probs = rescored(model, source, everything)
            scores = [p / ((5 + len(t)) / 6) ** alpha for p, t in zip(log_probs, everything, strict=True)]
            best = everything[scores.index(max(scores))]
            assert without_padding(row) == best
            lengths.append(len(best))
    counts = {length: lengths.count(length) for length in sorted(set(lengths))}
    print(f"\nalpha {alpha}: best of {len(everything)} sequences, how often by length {counts}")
    assert len(counts) > 1


@torch.no_grad()
def test_beams_carry_their_own_cache_and_score() -> None:
    """The score of a beam's hypothesis, gathered over reordered caches, equals an uncached pass over it to 1e-5."""
    model = lively_model()
    found = beam_search(model, SOURCES, max_tokens=8, beams=5)
    for row, source in enumerate(SOURCES):
        tokens = without_padding(found.tokens[row])
        assert found.log_probs[row].item() == pytest.approx(rescored(model, source, [tokens])[0], abs=1e-5)


@torch.no_grad()
def test_a_beam_beats_greedy_somewhere_and_never_loses_with_room_for_all() -> None:
    """The most likely next token need not begin the most likely sequence."""
    gains = []
    for seed in range(12):
        torch.manual_seed(seed)
        model = lively_model(target_vocab=6)
        wide = beam_search(model, SOURCES, max_tokens=3, beams=64, alpha=0.0)
        gains += (wide.log_probs - greedy(model, SOURCES, max_tokens=3).log_probs).tolist()
    print(f"\nexhaustive over greedy: better in {sum(gain > 1e-4 for gain in gains)} of {len(gains)}")
    assert min(gains) > -1e-5
    assert max(gains) > 1e-3


def test_impossible_searches_are_refused() -> None:
    """Both limits are named, and an empty source has nothing to attend to."""
    model = lively_model()
    with pytest.raises(ValueError, match="at least 1, got 0 and 5"):
        beam_search(model, SOURCES, max_tokens=5, beams=0)
    with pytest.raises(ValueError, match="keys are blocked"):
        greedy(model, torch.zeros(1, 3, dtype=torch.long), max_tokens=5)
