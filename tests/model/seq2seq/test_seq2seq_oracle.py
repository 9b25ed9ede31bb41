"""An independent witness: the same weights in torch.nn.Transformer."""

import warnings
from typing import Literal

import pytest
import torch
from torch import nn

from segue_model.seq2seq import Attention, Transformer, TransformerConfig, causal_mask, padding_mask, sinusoids
from segue_model.seq2seq.layers import FeedForward, LayerNorm

Norm = Literal["post", "pre"]
SOURCE = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 0, 0, 0, 0], [15, 16, 17, 18, 19, 0, 0]])
TARGET = torch.tensor([[1, 9, 8, 7, 6], [1, 5, 0, 0, 0], [1, 17, 16, 15, 0]])


def our_model(norm: Norm) -> Transformer:
    model = Transformer(
        TransformerConfig(
            source_vocab=20, target_vocab=20, dim=32, heads=4, encoder_layers=3, decoder_layers=2, norm=norm
        )
    )
    for parameter in model.parameters():  # gains and biases too, so that none can be forgotten
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.5, 0.5)
    return model.eval()


@torch.no_grad()
def torchs_model(ours: Transformer) -> nn.Transformer:
    """torch's layers with our weights. In post-norm the paper has no norm after the last layer, which torch adds."""
    config, pre = ours.config, ours.config.norm == "pre"
    sizes = (config.dim, config.heads, config.ffn_dim, config.dropout)
    with warnings.catch_warnings(action="ignore"):  # of a fast path that norm_first rules out
        encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(*sizes, batch_first=True, norm_first=pre),
            config.encoder_layers,
            nn.LayerNorm(config.dim) if pre else None,
            enable_nested_tensor=False,
        )
        decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(*sizes, batch_first=True, norm_first=pre),
            config.decoder_layers,
            nn.LayerNorm(config.dim) if pre else None,
        )
        theirs = nn.Transformer(*sizes[:2], custom_encoder=encoder, custom_decoder=decoder, batch_first=True)
    for mine, other in zip(ours.encoder, encoder.layers, strict=True):
        copy_attention(mine.attention, other.self_attn)
        copy_ffn(mine.ffn, other)
        copy_norms([mine.attention_residual.norm, mine.ffn_residual.norm], [other.norm1, other.norm2])
    for mine, other in zip(ours.decoder, decoder.layers, strict=True):
        copy_attention(mine.self_attention, other.self_attn)
        copy_attention(mine.cross_attention, other.multihead_attn)
        copy_ffn(mine.ffn, other)
        norms = [mine.self_residual.norm, mine.cross_residual.norm, mine.ffn_residual.norm]
        copy_norms(norms, [other.norm1, other.norm2, other.norm3])
    if pre:
        copy_norms([ours.encoder_norm, ours.decoder_norm], [encoder.norm, decoder.norm])
    return theirs.eval()


def copy_attention(ours: Attention, theirs: nn.MultiheadAttention) -> None:
    theirs.in_proj_weight.copy_(torch.cat((ours.wq.weight, ours.wk.weight, ours.wv.weight)))
    theirs.in_proj_bias.zero_()
    theirs.out_proj.weight.copy_(ours.wo.weight)
    theirs.out_proj.bias.zero_()


def copy_ffn(ours: FeedForward, theirs: nn.Module) -> None:
    theirs.linear1.load_state_dict(ours.up.state_dict())
    theirs.linear2.load_state_dict(ours.down.state_dict())


def copy_norms(ours: list[LayerNorm], theirs: list[nn.LayerNorm]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        other.weight.copy_(mine.gain)
        other.bias.copy_(mine.bias)


def embed(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return table[tokens] * table.shape[1] ** 0.5 + sinusoids(0, tokens.shape[1], table.shape[1])


@pytest.mark.parametrize("norm", ["post", "pre"])
@torch.no_grad()
def test_equal_to_torchs_transformer(norm: Norm) -> None:
    """The same weights in torch.nn.Transformer give the same output to 1e-5, with padding and both kinds of norm."""
    ours = our_model(norm)
    theirs = torchs_model(ours)
    source_padding, target_padding = (padding_mask(tokens)[:, 0, 0] for tokens in (SOURCE, TARGET))
    hidden = theirs(
        embed(SOURCE, ours.source_embedding.weight),
        embed(TARGET, ours.target_embedding.weight),
        tgt_mask=causal_mask(0, TARGET.shape[1]),
        src_key_padding_mask=source_padding,
        tgt_key_padding_mask=target_padding,
        memory_key_padding_mask=source_padding,
    )
    difference = (ours(SOURCE, TARGET) - hidden @ ours.head.weight.T)[~target_padding].abs().max().item()
    print(f"\n{norm}-norm: largest difference of the logits {difference:.1e}")
    assert difference < 1e-5


def test_only_linear_and_embedding_layers_are_used() -> None:
    """Everything else in the model is bare tensor operations."""
    kinds = {type(module) for module in our_model("pre").modules()}
    borrowed = {kind for kind in kinds if kind.__module__.startswith("torch.")}
    assert borrowed == {nn.Linear, nn.Embedding, nn.ModuleList}
