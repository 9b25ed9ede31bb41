"""A trained model in a folder: model.safetensors and config.json."""

import json
from dataclasses import asdict, fields
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_model
from safetensors.torch import save as to_bytes

from segue_model.checkpoint import CheckpointError
from segue_model.config import ConfigError
from segue_model.loaders.fields import Fields, read_json
from segue_model.seq2seq.config import TransformerConfig
from segue_model.seq2seq.transformer import Transformer

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"


def save(model: Transformer, folder: Path) -> None:
    """Write the folder, made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _CONFIG).write_text(json.dumps(asdict(model.config), indent=2) + "\n", encoding="utf-8")
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}  # shared ones once
    (folder / _WEIGHTS).write_bytes(to_bytes(parameters))


def load(folder: Path) -> Transformer:
    """Read what `save` wrote, in eval mode. Raises CheckpointError for what is missing, damaged or does not fit."""
    settings = read_json(folder / _CONFIG)
    try:
        model = Transformer(_config(settings))
        load_model(model, str(folder / _WEIGHTS))
    except ConfigError as error:
        raise CheckpointError(f"{settings.source}: {error}") from error
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder / _WEIGHTS}: {error}") from error
    return model.eval()


def _config(settings: Fields) -> TransformerConfig:
    unknown = sorted(settings.values.keys() - {field.name for field in fields(TransformerConfig)})
    if unknown:
        raise ConfigError(f"{', '.join(unknown)} is no field of TransformerConfig")
    settings.refuse("norm", "post", "pre")
    optional = {name: settings.integer(name) for name in ("key_dim", "value_dim") if settings.has(name)}
    return TransformerConfig(
        source_vocab=settings.integer("source_vocab"),
        target_vocab=settings.integer("target_vocab"),
        dim=settings.integer("dim"),
        heads=settings.integer("heads"),
        encoder_layers=settings.integer("encoder_layers"),
        decoder_layers=settings.integer("decoder_layers"),
        dropout=settings.number("dropout", above=-1.0),
        norm="pre" if settings.text("norm") == "pre" else "post",
        share_embeddings=settings.boolean("share_embeddings"),
        **optional,
    )
