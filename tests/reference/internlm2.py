"""InternLM2 (arXiv:2403.17297) is not among transformers' models, but it is a llama under other names.

``wqkv`` holds, for every key/value head, the rows of the query heads that share it, then the key's, then the value's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tiny import Shapes, Tiny

_NAMES = {
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def shapes(config: Mapping[str, Any]) -> Shapes:
    """The tensors of a checkpoint as published."""
    D, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    N, K = config["num_attention_heads"], config["num_key_value_heads"]
    layer = {
        "attention.wqkv": ((N + 2 * K) * (D // N), D),
        "attention.wo": (D, D),
        "feed_forward.w1": (F, D),
        "feed_forward.w3": (F, D),
        "feed_forward.w2": (D, F),
        "attention_norm": (D,),
        "ffn_norm": (D,),
    }
    result: Shapes = {"model.tok_embeddings.weight": (V, D), "model.norm.weight": (D,), "output.weight": (V, D)}
    for i in range(config["num_hidden_layers"]):
        result |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return result


def as_llama(checkpoint: Tiny) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Configuration and tensors of the llama that computes the same."""
    config = {**checkpoint.config, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    stored = checkpoint.tensors()
    tensors = {
        "model.embed_tokens.weight": stored["model.tok_embeddings.weight"],
        "model.norm.weight": stored["model.norm.weight"],
        "lm_head.weight": stored["output.weight"],
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        tensors |= {f"{layer}.{ours}.weight": stored[f"{layer}.{theirs}.weight"] for theirs, ours in _NAMES.items()}
        parts = _split(stored[f"{layer}.attention.wqkv.weight"], config)
        tensors |= {f"{layer}.self_attn.{name}_proj.weight": part for name, part in parts.items()}
    return config, tensors


def _split(wqkv: np.ndarray, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    D, N, K = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    groups = wqkv.reshape(K, N // K + 2, D // N, D)
    parts = {"q": groups[:, :-2], "k": groups[:, -2], "v": groups[:, -1]}
    return {name: np.ascontiguousarray(part.reshape(-1, D)) for name, part in parts.items()}
