"""The model that is served, as the service describes it: no weights, only what callers may know and defaults."""

from collections.abc import Mapping
from dataclasses import dataclass

from segue_model.checkpoint import Checkpoint
from segue_model.config import DecoderConfig
from segue_model.sampling import Sampling
from segue_server.prompts import Prompts
from segue_server.requests import SamplingParams
from segue_server.views import ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Everything about the model that a turn or an answer needs."""

    config: DecoderConfig
    model_id: str
    fingerprint: str  # of the weights, the tokenizer and the RoPE settings that KV belongs to
    prompts: Prompts
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    default_sampling: SamplingParams
    weight_dtype: str
    weight_bytes: int
    parameter_count: int
    kv_dtype: str
    kv_bytes_per_token: int
    max_context_tokens: int  # the smaller of the model's, the configured and what the pool holds

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        *,
        fingerprint: str,
        kv_dtype: str,
        kv_bytes_per_token: int,
        max_context_tokens: int,
    ) -> "ServedModel":
        return cls(
            config=checkpoint.config,
            model_id=checkpoint.model_id,
            fingerprint=fingerprint,
            prompts=Prompts(checkpoint.tokenizer, checkpoint.chat_template),
            eos_token_ids=frozenset(checkpoint.eos_token_ids),
            bos_token_id=checkpoint.bos_token_id,
            default_sampling=_default_sampling(checkpoint.default_sampling),
            weight_dtype=checkpoint.weight_dtype,
            weight_bytes=checkpoint.weight_bytes,
            parameter_count=checkpoint.config.parameter_count,
            kv_dtype=kv_dtype,
            kv_bytes_per_token=kv_bytes_per_token,
            max_context_tokens=max_context_tokens,
        )

    def info(self) -> ModelInfo:
        config = self.config
        return ModelInfo(
            model_id=self.model_id,
            fingerprint=self.fingerprint,
            layer_count=config.layers,
            head_count=config.heads,
            kv_head_count=config.kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            max_context_tokens=self.max_context_tokens,
            eos_token_ids=tuple(sorted(self.eos_token_ids)),
            bos_token_id=self.bos_token_id,
            rope_theta=config.rope_theta,
            weight_dtype=self.weight_dtype,
            weight_bytes=self.weight_bytes,
            parameter_count=self.parameter_count,
            kv_bytes_per_token=self.kv_bytes_per_token,
            default_sampling=self.default_sampling,
            has_chat_template=self.prompts.template is not None,
        )


def _default_sampling(given: Mapping[str, float]) -> SamplingParams:
    """A checkpoint's own recommendation over the field's usual defaults."""
    plain = Sampling()
    top_k = given.get("top_k", 0)
    return SamplingParams(
        temperature=given.get("temperature", plain.temperature),
        top_p=given.get("top_p", plain.top_p),
        top_k=int(top_k) if top_k else None,
        min_p=given.get("min_p", plain.min_p),
        repetition_penalty=given.get("repetition_penalty", plain.repetition_penalty),
        frequency_penalty=plain.frequency_penalty,
        presence_penalty=plain.presence_penalty,
        logit_bias={},
    )
