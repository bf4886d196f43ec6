"""GGUF twins: a file with the weights of a Hugging Face folder, as llama.cpp's converter writes it, loads the same.

Names come from the ``gguf`` package; what the converter does to values and which metadata it writes is restated here,
independently of the tables under test.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import MODEL_ARCH
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from diptych.jax_model.config import Config
from diptych.jax_model.families import FAMILIES
from diptych.jax_model.families.table import expand, shape_of
from diptych.jax_model.params import configure, flatten, load
from diptych.jax_model.readers import open_checkpoint
from diptych.jax_model.rope import frequencies

Transform = Callable[[str, np.ndarray, Mapping[str, Any]], np.ndarray]


def unchanged(name: str, value: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    return value


def reordered(name: str, value: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Rows of q and k, weights and biases: the two halves of a head are interleaved."""
    for projection, heads in ((".q_proj.", "num_attention_heads"), (".k_proj.", "num_key_value_heads")):
        if projection in name:
            halves = value.reshape(config[heads], 2, -1, *value.shape[1:])
            return halves.swapaxes(1, 2).reshape(value.shape)
    return value


def squeezed(name: str, value: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Older converters dropped axes of size one."""
    return value.squeeze()


@dataclass(frozen=True)
class Twin:
    """``keys`` are those of ``config.json`` beyond the sizes, ``metadata`` those under the architecture's prefix."""

    arch: MODEL_ARCH
    family: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    transform: Transform = unchanged
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        sizes = {
            "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
            "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 5e4,
        }  # fmt: skip
        return {"model_type": self.family, **sizes, **self.keys}


def factors(config: Mapping[str, Any]) -> np.ndarray:
    """What llama3 scaling divides frequencies by, computed one pair at a time."""
    scaling, H, divisors = config["rope_scaling"], 16, []
    for i in range(0, H, 2):
        turns = scaling["original_max_position_embeddings"] * config["rope_theta"] ** (-i / H) / (2 * np.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(divisors, np.float32)


LLAMA3 = {
    "rope_theta": 500.0,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip
YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0}}
YARN_METADATA = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_beta_fast": 16.0,
}  # fmt: skip
BIASES = {"attention_bias": True, "mlp_bias": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EXPERTS_METADATA = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}
SHARED = {"shared_expert_intermediate_size": 40, "hidden_size": 96}
SHARED_METADATA = {"expert_shared_feed_forward_length": 40}

TWINS = {
    "llama-biases": Twin(MODEL_ARCH.LLAMA, "llama", BIASES, transform=reordered),
    "llama-linear": Twin(
        MODEL_ARCH.LLAMA,
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        reordered,
    ),
    "llama-llama3": Twin(
        MODEL_ARCH.LLAMA, "llama", LLAMA3, transform=reordered, extra={"rope_freqs.weight": factors(LLAMA3)}
    ),
    "llama-yarn": Twin(MODEL_ARCH.LLAMA, "llama", YARN, YARN_METADATA, reordered),
    "mixtral": Twin(
        MODEL_ARCH.LLAMA,
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"expert_count": 4, "expert_used_count": 2},
        reordered,
    ),
    "smollm3": Twin(MODEL_ARCH.SMOLLM3, "smollm3", {"num_hidden_layers": 5}, transform=reordered),
    "qwen2": Twin(MODEL_ARCH.QWEN2, "qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": Twin(MODEL_ARCH.QWEN2, "qwen2", YARN, YARN_METADATA),
    "qwen2_moe": Twin(MODEL_ARCH.QWEN2MOE, "qwen2_moe", {**EXPERTS, **SHARED}, {**EXPERTS_METADATA, **SHARED_METADATA}),
    "qwen2_moe-squeezed": Twin(
        MODEL_ARCH.QWEN2MOE, "qwen2_moe", {**EXPERTS, **SHARED}, {**EXPERTS_METADATA, **SHARED_METADATA}, squeezed
    ),
    "qwen3": Twin(MODEL_ARCH.QWEN3, "qwen3"),
    "qwen3_moe": Twin(MODEL_ARCH.QWEN3MOE, "qwen3_moe", {**EXPERTS, "norm_topk_prob": True}, EXPERTS_METADATA),
    "seed_oss": Twin(MODEL_ARCH.SEED_OSS, "seed_oss", {"attention_out_bias": False, "tie_word_embeddings": True}),
    "ernie4_5": Twin(MODEL_ARCH.ERNIE4_5, "ernie4_5", {"use_bias": True}),
    "hunyuan": Twin(
        MODEL_ARCH.HUNYUAN_DENSE,
        "hunyuan_v1_dense",
        {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0}},
        {"rope.freq_base": 1e4 * 50.0 ** (16 / 14), "rope.scaling.type": "none", "rope.scaling.factor": 1.0},
    ),
}


def checkpoint(twin: Twin, folder: Path) -> tuple[Path, Path]:
    """The folder and the file."""
    placeholders: tiny.Shapes = {f"placeholder.{i}": (1,) for i in range(twin.config["num_hidden_layers"])}
    empty = tiny.write_huggingface(tiny.Tiny(twin.config, placeholders), folder / "config")
    config = configure(open_checkpoint(empty))
    model = tiny.Tiny(twin.config, dict(stored(config)))
    return tiny.write_huggingface(model, folder / "hf"), write_gguf(twin, model, folder / "twin.gguf")


def stored(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of a Hugging Face folder, as the family's table has them."""
    for parameter in expand(FAMILIES[config.family].table, config):
        sizes, filling = config.sizes(parameter.layer), parameter.huggingface
        for source in filling.sources:
            layout, skip = (filling.join, 1) if filling.join else (source.layout, 0)
            yield source.name, shape_of(layout.split("->")[0], sizes)[skip:]


def write_gguf(twin: Twin, model: tiny.Tiny, path: Path) -> Path:
    config, arch = twin.config, gguf.MODEL_ARCH_NAMES[twin.arch]
    writer = gguf.GGUFWriter(path, arch)
    common = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "rope.freq_base": config["rope_theta"],
    }  # fmt: skip
    for key, value in {**common, **twin.metadata}.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
        add[type(value)](f"{arch}.{key}", value)  # type: ignore[operator]
    names = gguf.get_tensor_name_map(twin.arch, config["num_hidden_layers"])
    for name, value in stacked(model.tensors()).items():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found, f"llama.cpp has no name for {name!r}"
        writer.add_tensor(found, np.ascontiguousarray(twin.transform(name, value, config)))
    for name, value in twin.extra.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stacked(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The experts of a layer in one tensor, under the name that the converter gives it."""
    result: dict[str, Any] = {}
    for name, value in tensors.items():
        if found := re.fullmatch(r"(.*\.experts)\.\d+\.(\w+\.weight)", name):
            merged = f"{found[1]}.{found[2]}"
            merged = re.sub(r"model\.(.*)block_sparse_moe", r"\1feed_forward", merged)
            result.setdefault(merged, []).append(value)
        else:
            result[name] = value
    return {name: np.stack(value) if isinstance(value, list) else value for name, value in result.items()}


@pytest.mark.parametrize("name", TWINS)
def test_twins_are_equal(name: str, tmp_path: Path) -> None:
    one, other = map(open_checkpoint, checkpoint(TWINS[name], tmp_path))
    assert_same_configuration(configure(one), configure(other))
    first, second = flatten(load(one)), flatten(load(other))
    assert first.keys() == second.keys()
    for path, value in first.items():
        np.testing.assert_array_equal(value, second[path], err_msg=path)


def assert_same_configuration(one: Config, other: Config) -> None:
    """Equal, but for how the same rope is described."""
    assert dataclasses.replace(one, layers=()) == dataclasses.replace(other, layers=())
    for first, second in zip(one.layers, other.layers, strict=True):
        assert dataclasses.replace(first, rope=None) == dataclasses.replace(second, rope=None)
        assert (first.rope is None) == (second.rope is None)
        if first.rope is not None and second.rope is not None:
            assert first.rope.interleaved == second.rope.interleaved
            (inv_freq, magnitude), (again, same) = (
                frequencies(rope, config.max_positions) for rope, config in ((first.rope, one), (second.rope, other))
            )
            np.testing.assert_allclose(inv_freq, again, rtol=1e-6)
            assert magnitude == pytest.approx(same)


@given(st.data())
@settings(max_examples=8, deadline=None)
def test_every_expert_lands_in_its_place(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Rows of the gate and of what it multiplies alternate, expert by expert."""
    family = data.draw(st.sampled_from(["mixtral", "qwen3_moe"]))
    folder, _ = checkpoint(TWINS[family], tmp_path_factory.mktemp("experts"))
    one = open_checkpoint(folder)
    e, m, i = (data.draw(st.integers(0, size - 1)) for size in (4, 24, 2))
    block, names = {
        "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
        "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    }[family]
    gate, up, down = (one.read(f"model.layers.{i}.{block}.experts.{e}.{name}.weight") for name in names)
    experts = load(one)["layers"][i]["mlp"]["experts"]
    np.testing.assert_array_equal(experts["gate_up"][e, 2 * m], gate[m])
    np.testing.assert_array_equal(experts["gate_up"][e, 2 * m + 1], up[m])
    np.testing.assert_array_equal(experts["down"][e], down)
