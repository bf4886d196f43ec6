"""Write a Llama of a billion random parameters as a Hugging Face folder: what speed and memory are measured on.

    python tools/bench/random_llama.py build/random-llama-1b

It has the shape of Llama 3.2 1B, and no tokenizer. Speed does not depend on the values, and package indices carry no
model of this size. The same seed gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from diptych.export.weights import Spec, write

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_ROWS = 1024  # of a matrix that are drawn at a time


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Llama, by Hugging Face's names."""
    D, F, H = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    N, K = config["num_attention_heads"] * H, config["num_key_value_heads"] * H
    layer = {
        "self_attn.q_proj": (N, D),
        "self_attn.k_proj": (K, D),
        "self_attn.v_proj": (K, D),
        "self_attn.o_proj": (D, N),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
        "input_layernorm": (D,),
        "post_attention_layernorm": (D,),
    }
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], D)}
    for i in range(config["num_hidden_layers"]):
        found |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    found["model.norm.weight"] = (D,)
    return found if config["tie_word_embeddings"] else found | {"lm_head.weight": (config["vocab_size"], D)}


def make(folder: Path, config: Mapping[str, Any] = CONFIG, seed: int = 0) -> None:
    """Write the folder; in memory there is one tensor at a time, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    specs = {name: Spec("bfloat16", shape) for name, shape in shapes(config).items()}
    partial = folder / "model.safetensors.partial"
    write(partial, specs, _values(specs, np.random.default_rng(seed)))
    partial.replace(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _values(specs: Mapping[str, Spec], random: np.random.Generator) -> Iterator[tuple[str, NDArray[Any]]]:
    """Norms of one, matrices that keep the size of what comes in."""
    for name, spec in specs.items():
        value = np.ones(spec.shape, ml_dtypes.bfloat16)
        for start in range(0, spec.shape[0] if len(spec.shape) == 2 else 0, _ROWS):
            rows = value[start : start + _ROWS]
            rows[:] = random.standard_normal(rows.shape, np.float32) * np.float32(spec.shape[1] ** -0.5)
        yield name, value


def main() -> int:
    parser = argparse.ArgumentParser(description="Write a Llama of a billion random parameters.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if (folder / "config.json").exists():
        print(f"{folder} is there already", file=sys.stderr)
    else:
        make(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
