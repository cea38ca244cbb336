"""A plain attention backend and tiny models for the model tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from radixkv.model.attention import AttentionBackend, AttentionMetadata
from radixkv.model.decoder import Decoder
from radixkv.model.kv_pool import KVPool

BLOCK_SIZE = 4
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"


class DenseAttention(AttentionBackend):
    """Gathers each sequence through its block table and calls torch's attention on it."""

    def plan(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata

    def run(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        metadata = self._metadata
        slots = torch.from_numpy(metadata.slot_mapping)
        self.pool.k_slots[layer][slots] = key
        self.pool.v_slots[layer][slots] = value
        out = torch.empty_like(query)
        for i in range(metadata.num_seqs):
            start, stop = (int(x) for x in metadata.query_start_loc[i : i + 2])
            length = int(metadata.seq_lens[i])
            num_blocks = -(-length // self.pool.block_size)
            blocks = torch.from_numpy(metadata.block_tables[i][:num_blocks]).long()
            k, v = (
                pool[layer][blocks].flatten(0, 1)[:length].transpose(0, 1)
                for pool in (self.pool.k, self.pool.v)
            )
            rows = torch.arange(length - (stop - start), length)
            mask = torch.arange(length)[None, :] <= rows[:, None]
            out[start:stop] = functional.scaled_dot_product_attention(
                query[start:stop].transpose(0, 1)[None],
                k[None],
                v[None],
                attn_mask=mask,
                scale=self.scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
        return out


class Stepper:
    """Feeds token chunks of several sequences through a decoder, with blocks in scattered order."""

    def __init__(self, decoder: Decoder, num_seqs: int, max_len: int, *, seed: int = 0) -> None:
        config = decoder.config
        per_seq = -(-max_len // BLOCK_SIZE)
        pool = KVPool(
            config.num_layers,
            num_seqs * per_seq,
            BLOCK_SIZE,
            config.num_kv_heads,
            config.head_dim,
            decoder.dtype,
        )
        self.decoder = decoder
        self.attention = DenseAttention(
            pool,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
        )
        order = np.random.default_rng(seed).permutation(num_seqs * per_seq).astype(np.int32)
        self.tables = tuple(order.reshape(num_seqs, per_seq))
        self.lens = [0] * num_seqs

    def step(self, chunks: Sequence[Sequence[int]], *, last_only: bool = False) -> torch.Tensor:
        """Append one chunk to each sequence; logits of all new rows, or of each one's last."""
        starts = np.cumsum([0, *map(len, chunks)]).astype(np.int32)
        positions, slots = [], []
        for table, old, chunk in zip(self.tables, self.lens, chunks, strict=True):
            pos = np.arange(old, old + len(chunk))
            positions.append(pos)
            slots.append(table[pos // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + pos % BLOCK_SIZE)
        self.lens = [old + len(chunk) for old, chunk in zip(self.lens, chunks, strict=True)]
        self.attention.plan(
            AttentionMetadata(
                query_start_loc=starts,
                seq_lens=np.array(self.lens, dtype=np.int32),
                block_tables=self.tables,
                slot_mapping=np.concatenate(slots),
            )
        )
        rows = torch.from_numpy(starts[1:].astype(np.int64)) - 1
        if not last_only:
            rows = torch.arange(int(starts[-1]))
        ids = torch.tensor([t for chunk in chunks for t in chunk], dtype=torch.int64)
        with torch.inference_mode():
            return self.decoder.forward(
                ids, torch.from_numpy(np.concatenate(positions)), self.attention, rows
            )


TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
"""Arguments of a transformers config small enough for any test."""


def tiny_hf_model(family: str, **options: Any) -> Any:
    """Return a random transformers model whose norms and biases are random too, in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(TINY | options))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, 0.3)
            else:
                parameter.normal_(0.0, 0.15)
    return model


def round_parameters(model: Any) -> None:
    """Round a model's parameters to bf16, in fp32, but not its RoPE frequencies as `to` would."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()


def byte_level_vocab() -> tuple[list[str], list[str]]:
    """Return the tokens and merges of a byte-level BPE of 97 tokens: three special, some merges."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merges = ["h e", "l l", "he ll", "hell o", "Ċ Ċ"]
    merged = [merge.replace(" ", "") for merge in merges]
    letters = [chr(c) for c in range(0x21, 0x7F)]
    chosen = ["Ġ", "Ċ", *letters][: 97 - len(specials) - len(merged)]
    return specials + chosen + merged, merges


def write_gguf(
    path: Path, model: Any, *, pre: str = "smollm", tensors: dict[str, Any] | None = None
) -> None:
    """Write a tiny transformers model as llama.cpp's converter would; `tensors` are extra ones."""
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    config, family = model.config, model.config.model_type
    writer = GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    tokens, merges = byte_level_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.float().numpy()
        gguf_name = _gguf_name(name)
        if family == "llama" and gguf_name.split(".")[-2] in ("attn_q", "attn_k"):
            heads = values.shape[0] // config.head_dim
            halves = values.reshape(heads, 2, config.head_dim // 2, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        if gguf_name == "token_embd.weight":
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, values)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    parts = {
        "model.layers.": "blk.",
        "model.embed_tokens.": "token_embd.",
        "model.norm.": "output_norm.",
        "lm_head.": "output.",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for theirs, ours in parts.items():
        name = name.replace(theirs, ours)
    return name
