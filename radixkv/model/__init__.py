"""The model room: weights, decoder, tokenizer, KV pool and attention backends.

Start at `loader.load_model`, which turns a name into a `LoadedModel`. `decoder.Decoder` computes
logits for a flat batch and reaches K and V through an `attention.AttentionBackend` alone.
"""

from radixkv.model.config import ModelConfig
from radixkv.model.loader import LoadedModel, load_model

__all__ = ["LoadedModel", "ModelConfig", "load_model"]
