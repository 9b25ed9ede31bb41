"""Positions, norms, dropout, embeddings and initialisation: the paper's sentences, checked."""

import math

import pytest
import torch

from segue_model.config import ConfigError
from segue_model.seq2seq import Transformer, TransformerConfig, label_smoothed_loss, sinusoids
from segue_model.seq2seq.layers import Dropout, LayerNorm


def small_config(**changes: object) -> TransformerConfig:
    sizes: dict[str, object] = {
        "source_vocab": 20,
        "target_vocab": 20,
        "dim": 32,
        "heads": 4,
        "encoder_layers": 2,
        "decoder_layers": 2,
    }
    return TransformerConfig(**(sizes | changes))


def rotation(shift: int, dim: int) -> torch.Tensor:
    """(dim, dim) float64: turns the hand of channel pair i by shift / 10000^(2i / dim)."""
    turns = [shift * 10_000.0 ** (-2 * i / dim) for i in range(dim // 2)]
    return torch.block_diag(
        *(torch.tensor([[math.cos(a), math.sin(a)], [-math.sin(a), math.cos(a)]], dtype=torch.float64) for a in turns)
    )


def test_sinusoids_are_the_papers() -> None:
    """PE(pos, 2i) = sin(pos / 10000^(2i / d)) and PE(pos, 2i + 1) its cosine, from any start."""
    table = sinusoids(5, 3, 8)
    for row, pos in enumerate((5, 6, 7)):
        for i in range(4):
            angle = pos / 10_000 ** (2 * i / 8)
            assert table[row, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[row, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


@pytest.mark.parametrize("shift", [1, 7, 100])
def test_a_shift_is_one_linear_map(shift: int) -> None:
    """PE(pos + k) is one linear map of PE(pos), the same for all pos: a head can learn "k to the left"."""
    table = sinusoids(0, 1000 + shift, 32).double()
    shifted = table[:1000] @ rotation(shift, 32).T
    error = (shifted - table[shift:]).abs().max().item()
    print(f"\nshift by {shift}: one {32} x {32} rotation, largest error over 1000 positions {error:.1e}")
    assert error < 1e-3  # float32 angles of up to 1000 radians
    assert (table[:1000] - table[shift:]).abs().max() > 0.5


def test_embeddings_are_scaled_to_the_size_of_the_positions() -> None:
    """Embeddings are multiplied by sqrt(d_model), so that tokens do not drown in the sinusoids, whose rms is 0.71."""
    model = Transformer(small_config(dim=256)).eval()
    tokens = torch.arange(3, 20)[None]
    raw = model.source_embedding(tokens)
    embedded = model._embed(tokens, model.source_embedding, 0)
    assert torch.allclose(embedded, raw * 16 + sinusoids(0, 17, 256))
    sizes = [x.square().mean().sqrt().item() for x in (raw, raw * 16, sinusoids(0, 17, 256))]
    print("\nrms: embedding {:.3f}, scaled {:.2f}, positions {:.2f}".format(*sizes))
    assert 0.9 < sizes[1] < 1.1


def test_layer_norm_equals_torchs() -> None:
    """Mean 0 and variance 1 over the channels of each position, then gain and bias."""
    x = torch.randn(3, 5, 16) * 4 + 2
    ours = LayerNorm(16)
    torch.nn.init.normal_(ours.gain)
    torch.nn.init.normal_(ours.bias)
    theirs = torch.nn.functional.layer_norm(x, (16,), ours.gain, ours.bias)
    assert torch.allclose(ours(x), theirs, atol=1e-6)


def test_dropout_keeps_the_mean_in_training_and_does_nothing_in_eval() -> None:
    """Survivors are scaled up by 1 / (1 - rate): the next layer sees the same mean with and without."""
    dropout, x = Dropout(0.25), torch.ones(200, 200)
    dropped = dropout(x)
    assert dropped.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert (dropped == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.02)
    assert torch.equal(dropout.eval()(x), x)


def test_dropout_stands_where_the_paper_has_it() -> None:
    """On the output of each sublayer, before the residual sum, and on embeddings plus positions: 1 + 2N + 3N."""
    model = Transformer(small_config())
    places = [name for name, module in model.named_modules() if isinstance(module, Dropout)]
    assert [name for name in places if not name.endswith("_residual.dropout")] == ["dropout"]
    assert len(places) == 1 + 2 * 2 + 3 * 2


def test_matrices_start_as_xavier_says() -> None:
    """Uniform within sqrt(6 / (fan in + fan out)): signals keep their size forwards and gradients backwards."""
    model = Transformer(small_config(dim=64))
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and "embedding" not in name:
            bound = math.sqrt(6 / sum(weight.shape))
            assert 0.95 * bound < weight.abs().max() <= bound, name
            assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1), name


def test_shared_embeddings_are_one_matrix() -> None:
    """Source, target and output may share one matrix (section 3.4), which then learns from all three uses."""
    shared, separate = Transformer(small_config(share_embeddings=True)), Transformer(small_config())
    assert shared.source_embedding.weight is shared.target_embedding.weight is shared.head.weight
    saved = sum(p.numel() for p in separate.parameters()) - sum(p.numel() for p in shared.parameters())
    assert saved == 2 * 20 * 32


def gradient_norms(norm: str, layers: int) -> tuple[float, float]:
    """Of the feed-forward matrices in the first and the last decoder layer, at initialisation, mean of 4 models."""
    first, last = 0.0, 0.0
    for seed in range(4):
        torch.manual_seed(seed)
        config = small_config(dim=64, encoder_layers=layers, decoder_layers=layers, dropout=0.0, norm=norm)
        model = Transformer(config)
        source, target = torch.randint(3, 20, (2, 16, 12)).unbind()
        torch.autograd.backward(label_smoothed_loss(model(source, target[:, :-1]), target[:, 1:], 0.0))
        grads = [model.get_parameter(f"decoder.{i}.ffn.up.weight").grad for i in (0, layers - 1)]
        assert grads[0] is not None
        assert grads[1] is not None
        first, last = first + grads[0].norm().item() / 4, last + grads[1].norm().item() / 4
    return first, last


def test_post_norm_gradients_fade_towards_the_first_layer_and_pre_norm_gradients_do_not() -> None:
    """Why post-norm needs warmup (Xiong et al. 2020): at initialisation its last layers get most of the gradient."""
    ratios = {}
    for norm in ("post", "pre"):
        first, last = gradient_norms(norm, 12)
        ratios[norm] = last / first
        figures = f"first {first:.4f}, last {last:.4f}, last / first {last / first:.2f}"
        print(f"\n{norm}-norm, 12 layers, |gradient| of the layer: {figures}", end="")
    assert ratios["post"] > 2 * ratios["pre"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dim": 33}, "dim must be even"),
        ({"dim": 0}, "dim must be at least 1"),
        ({"heads": 5}, "heads must divide dim"),
        ({"value_dim": 0}, "d_v must be at least 1"),
        ({"dropout": 1.0}, "dropout must be"),
        ({"source_vocab": 3}, "source_vocab must exceed"),
        ({"norm": "both"}, "norm must be"),
        ({"share_embeddings": True, "source_vocab": 21}, "share_embeddings needs"),
    ],
)
def test_impossible_shapes_are_refused_by_name(changes: dict[str, object], named: str) -> None:
    """The error names the field and the limit."""
    with pytest.raises(ConfigError, match=named):
        small_config(**changes)
