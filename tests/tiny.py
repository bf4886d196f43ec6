"""Tiny random checkpoints: Hugging Face folders and their GGUF twins, written without PyTorch.

A checkpoint is a configuration and the shapes of its tensors; every value is a function of the tensor's name and a
seed, so weights are made where they are needed and never stored.  GGUF twins follow llama.cpp's converter: its metadata
keys, its tensor names (the table in the ``gguf`` package), rows of a llama's q and k reordered for interleaved rope,
Gemma norms with the one added.

    tiny.write_huggingface(tiny.llama(), folder)
    tiny.write_gguf(tiny.llama(heads=(12, 2), width=96, head_size=16), path)
"""

from __future__ import annotations

import fnmatch
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

import tiny_tokenizers

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Tiny:
    """A checkpoint to be: what ``config.json`` says, and how its tensors are drawn."""

    config: Mapping[str, Any]
    shapes: Shapes
    seed: int = 0
    norm_mean: float = 1.0  # 0 where the checkpoint stores norm weights minus one
    embed_std: float = 1.0
    tokenizer: tiny_tokenizers.Kind = "byte_level"

    def tensors(self) -> dict[str, np.ndarray]:
        """Every tensor in float32, under its Hugging Face name."""
        return {name: self._draw(name, shape) for name, shape in self.shapes.items()}

    def _draw(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Norms vary around their mean, biases are N(0, 1), matrices keep the scale of what they multiply."""
        seed = zlib.crc32(f"{self.seed}/{name}".encode())
        z = np.random.RandomState(seed).standard_normal(shape)  # a stream that NumPy promises never to change
        if re.search(r"(norm|\bln_).*weight$", name):
            z = self.norm_mean + 0.3 * z
        elif re.search(r"\b(embed_tokens|tok_embeddings|embed_in|wte|wpe)\b", name):
            z = self.embed_std * z
        elif len(shape) > 1 and not name.endswith("bias"):
            z = z / np.sqrt(shape[-1])
        return np.asarray(z, dtype=np.float32)


def _decoder_shapes(config: Mapping[str, Any], norms: Mapping[str, int], *, tied: bool) -> Shapes:
    """Names and shapes of a decoder with gated MLP; ``norms`` are a layer's norms and their sizes."""
    D, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    layer = {
        "self_attn.q_proj": (q, D),
        "self_attn.k_proj": (kv, D),
        "self_attn.v_proj": (kv, D),
        "self_attn.o_proj": (D, q),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
        **{name: (size,) for name, size in norms.items()},
    }
    shapes: Shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes if tied else shapes | {"lm_head.weight": (V, D)}


def llama(
    *,
    heads: tuple[int, int] = (8, 2),
    head_size: int = 8,
    width: int = 64,
    layers: int = 2,
    ffn: int = 128,
    tied: bool = False,
    rope_base: float = 10_000.0,
    positions: int = 256,
    seed: int = 0,
) -> Tiny:
    """A llama; ``heads`` = (query, key/value). transformers insists that the width is a multiple of the query heads."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": head_size,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": ffn,
        "max_position_embeddings": positions,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads[0],
        "num_hidden_layers": layers,
        "num_key_value_heads": heads[1],
        "pad_token_id": 2,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": rope_base,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "vocab_size": len(tiny_tokenizers.BYTE_LEVEL),
    }
    norms = {"input_layernorm": width, "post_attention_layernorm": width}
    return Tiny(config, _decoder_shapes(config, norms, tied=tied), seed)


def gemma3(
    *,
    heads: tuple[int, int] = (4, 1),
    head_size: int = 16,
    width: int = 48,
    layers: int = 8,
    ffn: int = 96,
    window: int = 16,
    pattern: int = 6,
    query_scalar: int | None = None,
    rope_bases: tuple[float, float] = (1_000_000.0, 10_000.0),
    rope_factor: float | None = None,
    tied: bool = True,
    positions: int = 256,
    seed: int = 0,
) -> Tiny:
    """A Gemma 3 text model: every ``pattern``-th layer is global, ``rope_bases`` = (global, local).

    llama.cpp writes neither ``pattern`` nor ``query_scalar`` (None: the head size): a GGUF twin keeps the defaults.
    """
    kinds = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)]
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "final_logit_softcapping": None,
        "head_dim": head_size,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": width,
        "intermediate_size": ffn,
        "layer_types": kinds,
        "max_position_embeddings": positions,
        "model_type": "gemma3_text",
        "num_attention_heads": heads[0],
        "num_hidden_layers": layers,
        "num_key_value_heads": heads[1],
        "pad_token_id": 0,
        "query_pre_attn_scalar": query_scalar or head_size,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": rope_bases[1],
        "rope_scaling": {"factor": rope_factor, "rope_type": "linear"} if rope_factor else None,
        "rope_theta": rope_bases[0],
        "sliding_window": window,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "vocab_size": len(tiny_tokenizers.SENTENCEPIECE),
    }
    norms = {
        "input_layernorm": width,
        "post_attention_layernorm": width,
        "pre_feedforward_layernorm": width,
        "post_feedforward_layernorm": width,
        "self_attn.q_norm": head_size,
        "self_attn.k_norm": head_size,
    }
    shapes = _decoder_shapes(config, norms, tied=tied)
    return Tiny(config, shapes, seed, norm_mean=0.0, embed_std=width**-0.5, tokenizer="sentencepiece")


# What has hidden bugs: head ratios, head sizes other than D / N, tied heads, rope bases and scaling, windows.
VARIANTS: dict[str, Tiny] = {
    "llama": llama(),
    "llama-12-2": llama(heads=(12, 2), head_size=16, width=96, ffn=160),
    "llama-16-8": llama(heads=(16, 8), head_size=16, width=64),
    "llama-6-2": llama(heads=(6, 2), head_size=32, width=96, rope_base=100_000.0),
    "llama-8-8": llama(heads=(8, 8), head_size=16, width=64, tied=True, layers=3),
    "llama-8-1": llama(heads=(8, 1), head_size=8, rope_base=500_000.0),
    "gemma3": gemma3(),
    "gemma3-scaled": gemma3(
        heads=(4, 2), head_size=32, width=64, layers=7, rope_bases=(200_000.0, 2_000.0), rope_factor=8.0, positions=512
    ),
    "gemma3-scalar": gemma3(
        heads=(6, 2), width=96, layers=4, pattern=2, query_scalar=24, rope_bases=(50_000.0, 1_000.0)
    ),
}

GGUF_VARIANTS = tuple(name for name in VARIANTS if name != "gemma3-scalar")


def write_huggingface(tiny: Tiny, folder: str | Path) -> Path:
    """Write ``tiny`` as a Hugging Face folder and return its path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in {"config.json": tiny.config, **tiny_tokenizers.huggingface_files(tiny.tokenizer)}.items():
        (folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    save_file(tiny.tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_gguf(tiny: Tiny, path: str | Path, types: Mapping[str, str] | None = None) -> Path:
    """Write ``tiny`` as a GGUF file and return its path. Raises KeyError for a family it does not know.

    All is float32, but for tensors whose GGUF name matches a pattern in ``types``, as ``{"*.attn_v.weight": "Q8_0"}``.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "gemma3_text": gguf.MODEL_ARCH.GEMMA3}[tiny.config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _write_parameters(writer, tiny.config, arch)
    tiny_tokenizers.write_gguf(writer, tiny.tokenizer)
    names = gguf.get_tensor_name_map(arch, tiny.config["num_hidden_layers"])
    for name, value in tiny.tensors().items():
        stored, value = _gguf_name(names, name), _gguf_value(tiny, name, value)
        found = next((kind for pattern, kind in (types or {}).items() if fnmatch.fnmatchcase(stored, pattern)), "F32")
        kind = gguf.GGMLQuantizationType[found]
        writer.add_tensor(stored, gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(names: gguf.TensorNameMap, name: str) -> str:
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise KeyError(f"llama.cpp has no name for {name!r}")
    return found


def _gguf_value(tiny: Tiny, name: str, value: np.ndarray) -> np.ndarray:
    """What llama.cpp's converter stores for a tensor."""
    if name.endswith("norm.weight"):
        return value + np.float32(1.0 - tiny.norm_mean)
    kind = {"q_proj.weight": "attention", "k_proj.weight": "key_value"}.get(name.rpartition("self_attn.")[2])
    if kind is None or tiny.config["model_type"] != "llama":
        return value
    halves = value.reshape(tiny.config[f"num_{kind}_heads"], 2, -1, value.shape[1])
    return halves.swapaxes(1, 2).reshape(value.shape)


def _write_parameters(writer: gguf.GGUFWriter, config: Mapping[str, Any], arch: gguf.MODEL_ARCH) -> None:
    D, N, H = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(N)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if arch == gguf.MODEL_ARCH.LLAMA:
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(H)
    if arch != gguf.MODEL_ARCH.LLAMA or H * N != D:  # older files of a llama leave the sizes out where they follow
        writer.add_key_length(H)
        writer.add_value_length(H)
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    if config.get("rope_local_base_freq", 10_000.0) != 10_000.0:  # files older than the key mean the default
        writer.add_rope_freq_base_swa(config["rope_local_base_freq"])
    if config["rope_scaling"]:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
