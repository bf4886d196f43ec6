"""GGUF files as transformers models, by a mapping of our own that shares nothing with the project's readers.

transformers can read GGUF files too, but only what it knows: it leaves out a Gemma's rope scaling, local rope base and
query scale where they are not the defaults (5.24).  For the two real models it agrees bit for bit with this mapping.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LLAMA_NAMES = _NAMES | {"ffn_norm": "post_attention_layernorm"}
_GEMMA_NAMES = _NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def load(path: Path) -> PreTrainedModel:
    """The float32 model of a llama or gemma3 file, attention computed step by step. Raises KeyError for others."""
    reader = gguf.GGUFReader(path)
    read = _metadata(reader)
    build = {"llama": _llama, "gemma3": _gemma3}[read("general.architecture")]
    tied = not any(tensor.name == "output.weight" for tensor in reader.tensors)
    model, names, value = build(read, len(read("tokenizer.ggml.tokens")), tied)
    state = {_name(tensor.name, names): value(tensor.name, _floats(tensor)) for tensor in reader.tensors}
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    loaded: PreTrainedModel = model.float().eval()
    return loaded


def _metadata(reader: gguf.GGUFReader) -> Callable[..., Any]:
    """A function from a key to its value; ``{arch}`` stands for the architecture, a second argument for absence."""
    arch = reader.fields["general.architecture"].contents()

    def read(key: str, *default: Any) -> Any:
        field = reader.fields.get(key.format(arch=arch))
        if field is None and default:
            return default[0]
        return reader.fields[key.format(arch=arch)].contents()

    return read


def _floats(tensor: gguf.ReaderTensor) -> torch.Tensor:
    """Dequantised; ggml counts dimensions from the innermost."""
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(np.array(values, np.float32).reshape([int(n) for n in reversed(tensor.shape)]))


def _name(name: str, names: dict[str, str]) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if layer:
        return f"model.layers.{layer[1]}.{names[layer[2]]}.weight"
    return f"{names[name.removesuffix('.weight')]}.weight"


def _sizes(read: Callable[..., Any], vocabulary: int, tied: bool) -> dict[str, Any]:
    D, N = read("{arch}.embedding_length"), read("{arch}.attention.head_count")
    return {
        "vocab_size": vocabulary,
        "hidden_size": D,
        "intermediate_size": read("{arch}.feed_forward_length"),
        "num_hidden_layers": read("{arch}.block_count"),
        "num_attention_heads": N,
        "num_key_value_heads": read("{arch}.attention.head_count_kv", N),
        "head_dim": read("{arch}.attention.key_length", D // N),
        "max_position_embeddings": read("{arch}.context_length"),
        "rms_norm_eps": read("{arch}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": tied,
        "attn_implementation": "eager",
    }


def _llama(read: Callable[..., Any], vocabulary: int, tied: bool) -> Any:
    rope = {"rope_type": "default", "rope_theta": read("{arch}.rope.freq_base", 10_000.0)}
    config = LlamaConfig(**_sizes(read, vocabulary, tied), rope_parameters=rope)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}

    def value(name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Rows of q and k come as (head, pair, which of the two); rotate_half wants (head, which of the two, pair)."""
        count = heads.get(name.split(".")[-2])
        if count is None:
            return tensor
        rows, columns = tensor.shape
        return tensor.view(count, rows // count // 2, 2, columns).transpose(1, 2).reshape(rows, columns)

    return LlamaForCausalLM(config), _LLAMA_NAMES, value


def _gemma3(read: Callable[..., Any], vocabulary: int, tied: bool) -> Any:
    """What is absent has llama.cpp's fixed values: every sixth layer is global, the local rope base is 10000."""
    sizes = _sizes(read, vocabulary, tied)
    full = {"rope_type": "default", "rope_theta": read("{arch}.rope.freq_base")}
    if read("{arch}.rope.scaling.type", None) == "linear":
        full |= {"rope_type": "linear", "factor": read("{arch}.rope.scaling.factor")}
    local = {"rope_type": "default", "rope_theta": read("{arch}.rope.freq_base_swa", 10_000.0)}
    layers = range(1, sizes["num_hidden_layers"] + 1)
    config = Gemma3TextConfig(
        **sizes,
        sliding_window=read("{arch}.attention.sliding_window"),
        layer_types=["sliding_attention" if i % 6 else "full_attention" for i in layers],
        rope_parameters={"full_attention": full, "sliding_attention": local},
        query_pre_attn_scalar=sizes["head_dim"],  # llama.cpp makes an exception for 62 layers (27B): D / N
    )

    def value(name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Norms are final scales here and one less in transformers."""
        return tensor - 1.0 if name.endswith("norm.weight") else tensor

    return Gemma3ForCausalLM(config), _GEMMA_NAMES, value
