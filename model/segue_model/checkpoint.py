"""What every loader returns, whatever file it read: one set of names, so that forward code stays plain."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from segue_model.arrays import Weights
from segue_model.chat import ChatTemplate
from segue_model.config import DecoderConfig
from segue_model.tokenizer import Tokenizer


class CheckpointError(ValueError):
    """A model file is damaged, hostile or not supported. Says what was found and, where it helps, what is supported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model ready to be built.

    Weights carry the names of `Decoder.state_dict()`, with RoPE in split halves:

        embed.weight                          (vocab, dim)
        layers.{i}.attention_norm.weight      (dim,)
        layers.{i}.attention.wq.weight        (heads * head_dim, dim)      .bias with qkv_bias
        layers.{i}.attention.wk.weight        (kv_heads * head_dim, dim)   .bias with qkv_bias
        layers.{i}.attention.wv.weight        (kv_heads * head_dim, dim)   .bias with qkv_bias
        layers.{i}.attention.q_norm.weight    (head_dim,)                  with qk_norm
        layers.{i}.attention.k_norm.weight    (head_dim,)                  with qk_norm
        layers.{i}.attention.wo.weight        (dim, heads * head_dim)
        layers.{i}.ffn_norm.weight            (dim,)
        layers.{i}.ffn.gate.weight            (ffn_dim, dim)
        layers.{i}.ffn.up.weight              (ffn_dim, dim)
        layers.{i}.ffn.down.weight            (dim, ffn_dim)
        norm.weight                           (dim,)
        head.weight                           (vocab, dim)                 absent with tie_embeddings
    """

    config: DecoderConfig
    weights: Weights  # lazily read where the format allows
    model_id: str
    tokenizer: Tokenizer | None = None  # Meta checkpoints and bare weights may have none
    chat_template: ChatTemplate | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    weight_dtype: str = ""  # as stored, such as "Q4_1" or "BF16"
    weight_bytes: int = 0  # as stored
    default_sampling: Mapping[str, float] = field(default_factory=dict)  # from generation_config.json
