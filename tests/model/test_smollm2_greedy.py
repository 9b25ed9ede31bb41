"""Greedy decoding of the embedded SmolLM2 equals transformers, token for token, in float32.

The reference reads each finished answer in one forward without a cache. When its argmax after every prefix is the token
we chose, its own greedy decoding would have chosen the same tokens: by induction, the prefixes are the same.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from segue_model.cache import KVCache
from segue_model.chat import encode_chat
from segue_model.checkpoint import Checkpoint
from segue_model.decoder import Decoder
from segue_model.loaders import find_embedded_model, load_checkpoint
from segue_model.runner.base import PAGE_TOKENS, Slice
from segue_model.runner.torch_runner import TorchRunner
from segue_model.torch_arrays import state_of, weights_of

NEW_TOKENS = 32
CLOSE_CALL = 1e-3  # logits; where the reference's two best are closer, float32 rounding may decide
PLAIN_PROMPTS = (
    "The capital of France is",
    "Roses are red,",
    "SELECT name, age FROM users WHERE",
    "¿Cómo estás?",
    "   two  spaces\tand tab",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics are:\n1.",
    "Dear Sir or Madam,\n\nI am",
    '{"name": "Ada", "born":',
    "Once upon a time, in a village by the sea,",
    "Dear Sir or Madam,\n\nI am writing to",
    "¿Cómo estás? Muy bien,",
)
QUESTIONS = (
    "Explain gravity to a child.",
    "Why is the sky blue?",
    "Tell me a short joke.",
    "What is the capital of Italy?",
    "Write a haiku about rain.",
    "Who wrote Hamlet, and when?",
    "😀 What does it mean?",
    "Translate 'hello' into French.",
)
INNER_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}


class Choice(NamedTuple):
    """What the reference would say next."""

    token: int
    margin: float  # logits between its best and its second


class Reference:
    """transformers' model, which reads the same answer only once."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._model = model
        self._read: dict[tuple[int, ...], list[Choice]] = {}

    def choices(self, prompt: list[int], answer: list[int]) -> list[Choice]:
        """Its choice after the prompt, and after each token of the answer but the last."""
        tokens = (*prompt, *answer[:-1])
        if tokens not in self._read:
            self._read[tokens] = self._compute(tokens, len(answer))
        return self._read[tokens]

    @torch.no_grad()
    def _compute(self, tokens: tuple[int, ...], count: int) -> list[Choice]:
        logits = self._model(torch.tensor([tokens]), use_cache=False, logits_to_keep=count).logits[0]
        best = logits.topk(2)
        margins = best.values[:, 0] - best.values[:, 1]
        return [Choice(*pair) for pair in zip(best.indices[:, 0].tolist(), margins.tolist(), strict=True)]


@dataclass(frozen=True)
class Setup:
    checkpoint: Checkpoint
    weights: dict[str, torch.Tensor]  # dequantised once
    prompts: list[list[int]]
    reference: Reference


def transformers_name(name: str) -> str:
    if name == "embed.weight":
        return "model.embed_tokens.weight"
    if name == "norm.weight":
        return "model.norm.weight"
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{INNER_NAMES[rest.removesuffix('.weight')]}.weight"


def build_reference(checkpoint: Checkpoint, weights: dict[str, torch.Tensor]) -> LlamaForCausalLM:
    config = checkpoint.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.max_context_tokens,
            rms_norm_eps=config.rms_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=True,
        )
    )
    state = {transformers_name(name): weight for name, weight in weights.items()}
    state["lm_head.weight"] = weights["embed.weight"]
    model.load_state_dict(state, strict=True)
    return model


def encode_prompts(checkpoint: Checkpoint) -> list[list[int]]:
    tokenizer, template = checkpoint.tokenizer, checkpoint.chat_template
    assert tokenizer is not None
    assert template is not None
    plain = [tokenizer.encode(text) for text in PLAIN_PROMPTS]
    chats = [encode_chat(template, tokenizer, [{"role": "user", "content": text}], True) for text in QUESTIONS]
    return plain + chats


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Steps this small are slower on two threads than on one when the machine does other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def setup(one_thread: None) -> Setup:
    checkpoint = load_checkpoint(find_embedded_model())
    weights = state_of(checkpoint.weights)
    reference = Reference(build_reference(checkpoint, weights))
    return Setup(checkpoint, weights, encode_prompts(checkpoint), reference)


@torch.no_grad()
def decoder_answers(setup: Setup) -> list[list[int]]:
    """The reference decoder with its contiguous cache: all prompts in one batch, which is always at one position.

    The beginning that all prompts are long enough for comes at once, then token after token; where a prompt still goes
    on its own token is taken, and the decoder's choice behind its end.
    """
    decoder = Decoder(setup.checkpoint.config)
    decoder.load_state_dict(setup.weights, strict=True)
    shortest, longest = min(map(len, setup.prompts)), max(map(len, setup.prompts))
    cache = KVCache(decoder.config, longest + NEW_TOKENS, batch=len(setup.prompts))
    sequences = [prompt[:shortest] for prompt in setup.prompts]
    while cache.pos < longest + NEW_TOKENS - 1:
        fresh = torch.tensor([sequence[cache.pos :] for sequence in sequences])  # (B, T)
        choices = decoder(fresh, cache)[:, -1].argmax(-1).tolist()
        for sequence, prompt, choice in zip(sequences, setup.prompts, choices, strict=True):
            at = len(sequence)
            sequence.append(prompt[at] if at < len(prompt) else choice)
    return [
        sequence[len(prompt) : len(prompt) + NEW_TOKENS]
        for sequence, prompt in zip(sequences, setup.prompts, strict=True)
    ]


def runner_answers(setup: Setup) -> list[list[int]]:
    """The paged runner: all prompts in one ragged batch, then all decode steps together."""
    pages_each = -(-(max(map(len, setup.prompts)) + NEW_TOKENS) // PAGE_TOKENS)
    count = len(setup.prompts)
    runner = TorchRunner(setup.checkpoint.config, weights_of(setup.weights), num_pages=pages_each * count)
    tables = [list(range(i * pages_each, (i + 1) * pages_each)) for i in range(count)]
    sequences = [list(prompt) for prompt in setup.prompts]
    computed = [0] * count
    for _ in range(NEW_TOKENS):
        batch = [Slice(seq[at:], at, table) for seq, at, table in zip(sequences, computed, tables, strict=True)]
        computed = [len(sequence) for sequence in sequences]
        for sequence, logits in zip(sequences, runner.forward(batch), strict=True):
            assert logits is not None
            sequence.append(int(logits[-1].argmax()))
    return [sequence[-NEW_TOKENS:] for sequence in sequences]


def differences(setup: Setup, answers: list[list[int]]) -> list[str]:
    """Where the reference would choose another token by a clear margin; close calls are only printed."""
    clear: list[str] = []
    for prompt, answer in zip(setup.prompts, answers, strict=True):
        for step, (ours, choice) in enumerate(zip(answer, setup.reference.choices(prompt, answer), strict=True)):
            if ours != choice.token:
                found = f"prompt {prompt[:4]}.. step {step}: {ours} for {choice.token}, margin {choice.margin:.1e}"
                print(found)
                clear += [found] if choice.margin > CLOSE_CALL else []
    return clear


@pytest.mark.parametrize("generate", [decoder_answers, runner_answers])
def test_greedy_answers_equal_transformers(setup: Setup, generate: Callable[[Setup], list[list[int]]]) -> None:
    answers = generate(setup)
    assert len(answers) == 20
    assert all(len(answer) == NEW_TOKENS for answer in answers)
    assert differences(setup, answers) == []
    print(f"{generate.__name__}: {len(answers) * NEW_TOKENS} greedy tokens equal those of transformers")


def test_the_comparison_sees_one_wrong_token(setup: Setup) -> None:
    """The oracle has teeth: another token than the reference's choice is reported."""
    one = replace(setup, prompts=setup.prompts[:1])
    right = setup.reference.choices(one.prompts[0], [0])[0]
    assert differences(one, [[right.token]]) == []
    assert right.margin > CLOSE_CALL
    assert len(differences(one, [[right.token + 1]])) == 1
