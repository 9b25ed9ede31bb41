"""From a text to streamed tokens: a decoder trained from nothing, its folder served, its words on the wire."""

import math
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import LlamaForCausalLM

from segue_client import Client
from segue_model.decoder import Decoder
from segue_model.loaders import load_checkpoint
from segue_model.torch_arrays import state_of
from segue_model.train.__main__ import main
from segue_model.train.text import Corpus

SIZES = ("--vocab", "300", "--dim", "32", "--layers", "2", "--heads", "2", "--kv-heads", "1", "--context", "48")
RECIPE = ("--steps", "120", "--batch", "8", "--rate", "1e-2", "--warmup", "10", "--seed", "3")
SUBJECTS, VERBS = ("the fox", "a crow", "my cat"), ("sees", "hears", "follows")


def stories(sentences: int) -> str:
    """Text with something to learn: who does what to whom, at random, in one fixed grammar."""
    chance = random.Random(5)
    return "".join(
        f"{chance.choice(SUBJECTS)} {chance.choice(VERBS)} {chance.choice(SUBJECTS)}.\n" for _ in range(sentences)
    )


class Trained(NamedTuple):
    folder: Path
    text: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    root, threads = tmp_path_factory.mktemp("trained"), torch.get_num_threads()
    text = root / "stories.txt"
    text.write_text(stories(1500), encoding="utf-8")
    torch.set_num_threads(1)
    assert main(["--text", str(text), "--out", str(root / "fable"), *SIZES, *RECIPE]) == 0
    torch.set_num_threads(threads)
    return Trained(root / "fable", text)


def loaded(folder: Path) -> Decoder:
    """The reference model with what the folder holds."""
    checkpoint = load_checkpoint(folder)
    model = Decoder(checkpoint.config)
    model.load_state_dict(state_of(checkpoint.weights))
    return model


@torch.inference_mode()
def test_the_loss_on_unseen_text_falls_well_below_ln_v(trained: Trained) -> None:
    """A model that knows nothing has a loss of ln V; some seconds of training take this one below a third of it."""
    model = loaded(trained.folder)
    vocab = model.config.vocab_size
    corpus = Corpus.of(trained.text.read_text(encoding="utf-8"), vocab_size=300, context=48)
    windows = corpus.validation_windows(48, 16)
    logits = model(windows[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()
    print(f"\nvalidation loss {loss:.3f} nats, ln {vocab} = {math.log(vocab):.3f}")
    assert loss < math.log(vocab) / 3


@torch.inference_mode()
def test_transformers_reads_the_folder(trained: Trained) -> None:
    """The folder is what it says: transformers computes the same logits from it."""
    theirs = LlamaForCausalLM.from_pretrained(trained.folder).eval()
    tokens = torch.arange(1, 41)[None]
    assert torch.allclose(loaded(trained.folder)(tokens), theirs(tokens).logits, atol=1e-4)


def test_the_folder_is_served_and_streams_what_it_learned(trained: Trained, spawn: Callable[..., object]) -> None:
    """`segue-server --model DIR` serves the folder at once; the stream is the reference model's greedy answer."""
    server = spawn(
        *("--model", trained.folder, "--runner", "torch", "--threads", "1", "--kv-bytes", "16MiB"),
        *("--port", "0", "--admin-port", "0", "--metrics-port", "0"),
    )
    with Client(server.target) as client:
        client.wait_ready(60)
        assert client.model_info().model_id == "fable"
        session = client.create_session()
        with session.stream(text="the fox", max_tokens=24, temperature=0, return_token_ids=True) as turn:
            pieces = list(turn)
        assert len(pieces) > 1
        assert list(turn.token_ids) == greedy(trained.folder, "the fox", 24)
    text = "the fox" + "".join(pieces)
    print(f"\nstreamed in {len(pieces)} pieces: {text!r}")
    words = text.replace(".", " .").split()
    known = {word for phrase in (*SUBJECTS, *VERBS) for word in phrase.split()} | {"."}
    assert set(words[:-1]) <= known  # the last one may be cut
    assert any(first in {"fox", "crow", "cat"} and second in VERBS for first, second in pairwise(words))


@torch.inference_mode()
def greedy(folder: Path, prompt: str, count: int) -> list[int]:
    """Without a cache, without a server."""
    checkpoint, model = load_checkpoint(folder), loaded(folder)
    assert checkpoint.tokenizer is not None
    tokens = checkpoint.tokenizer.encode(prompt)
    start = len(tokens)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[start:]
