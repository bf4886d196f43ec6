"""LoRA adapters merged while reading, against the same sum written out in NumPy."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import test_family_twins as twins
import tiny
from diptych.cli import main
from diptych.jax_model import params
from diptych.jax_model.readers import open_checkpoint
from reference import families

Tensors = dict[str, NDArray[Any]]

MODEL = tiny.llama(heads=(6, 2), head_size=32, width=96)
LAYERS = MODEL.config["num_hidden_layers"]
CHANGED = [f"model.layers.{i}.{name}" for i in range(LAYERS) for name in ("self_attn.q_proj", "self_attn.k_proj")]
CHANGED += [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")]
CHANGED += ["model.layers.0.mlp.up_proj", "model.layers.0.self_attn.o_proj", "lm_head"]  # up alone, there
PLAIN = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 12, "bias": "none", "use_dora": False,
    "modules_to_save": None, "rank_pattern": {}, "target_modules": ["q_proj"], "init_lora_weights": True,
}  # fmt: skip


def adapter(
    folder: Path,
    config: dict[str, Any],
    ranks: Callable[[str], int] = lambda _: 4,
    seed: int = 0,
    dtype: Any = np.float32,
) -> Path:
    """A folder as PEFT saves it, with random matrices of the given ranks."""
    random, shapes, tensors = np.random.default_rng(seed), MODEL.shapes, {}
    for module in CHANGED:
        out, into = shapes[f"{module}.weight"]
        prefix = f"base_model.model.{module}.lora"
        tensors[f"{prefix}_A.weight"] = random.normal(0, 0.2, (ranks(module), into)).astype(dtype)
        tensors[f"{prefix}_B.weight"] = random.normal(0, 0.2, (out, ranks(module))).astype(dtype)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(folder: Path, scale: Callable[[str], float], into: Tensors) -> Tensors:
    """Independent of the code: ``into`` with the folder's matrices added."""
    tensors = load_file(folder / "adapter_model.safetensors")
    result = dict(into)
    for module in CHANGED:
        a, b = (tensors[f"base_model.model.{module}.lora_{side}.weight"].astype(np.float64) for side in "AB")
        result[f"{module}.weight"] = into[f"{module}.weight"] + scale(module) * np.einsum("or,ri->oi", b, a)
    return result


def assert_merged(source: Path, adapters: list[tuple[Path, float]], expected: Tensors, path: Path) -> None:
    """What is loaded with the adapters is what is loaded from a checkpoint that holds the sum."""
    folder = tiny.write_huggingface(MODEL, path)
    save_file({name: value.astype(np.float32) for name, value in expected.items()}, folder / "model.safetensors")
    found = params.flatten(params.load(open_checkpoint(source, adapters)))
    wanted = params.flatten(params.load(open_checkpoint(folder)))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def rank_of(module: str) -> int:
    return 2 if module.endswith("k_proj") else 8 if module == "model.layers.1.self_attn.q_proj" else 4


def alpha_of(module: str) -> float:
    return 3.0 if ".mlp." in module else 12.0


PATTERNS = {"rank_pattern": {"k_proj": 2, r"layers\.1\.self_attn\.q_proj": 8}, "alpha_pattern": {".*mlp.*": 3}}
# What the configuration says beside PLAIN, the ranks, and the scale.
SCALES: dict[str, tuple[dict[str, Any], Callable[[str], int], Callable[[str], float]]] = {
    "alpha over rank": ({}, lambda _: 4, lambda _: 12 / 4),
    "rank-stabilised": ({"use_rslora": True}, lambda _: 4, lambda _: 12 / math.sqrt(4)),
    "patterns": (PATTERNS, rank_of, lambda module: alpha_of(module) / rank_of(module)),
    "patterns, rank-stabilised": (
        {**PATTERNS, "use_rslora": True}, rank_of, lambda module: alpha_of(module) / math.sqrt(rank_of(module)),
    ),
    "fractional alpha": ({"lora_alpha": 0.5}, lambda _: 4, lambda _: 0.5 / 4),
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_huggingface(MODEL, tmp_path_factory.mktemp("source") / "model")


@pytest.mark.parametrize("name", SCALES)
def test_scales(name: str, source: Path, tmp_path: Path) -> None:
    more, ranks, scale = SCALES[name]
    folder = adapter(tmp_path / "adapter", PLAIN | more, ranks)
    assert_merged(source, [(folder, 1.0)], merged(folder, scale, MODEL.tensors()), tmp_path / "merged")


def test_several_adapters_with_weights(source: Path, tmp_path: Path) -> None:
    one = adapter(tmp_path / "one", PLAIN)
    other = adapter(tmp_path / "other", PLAIN | {"lora_alpha": 2, "r": 3}, lambda _: 3, seed=1, dtype=np.float16)
    expected = merged(one, lambda _: 0.25 * 12 / 4, MODEL.tensors())
    expected = merged(other, lambda _: -1.5 * 2 / 3, expected)
    assert_merged(source, [(one, 0.25), (other, -1.5)], expected, tmp_path / "merged")


def test_into_a_gguf_file(tmp_path: Path) -> None:
    """Its rows of q and k stand in another order, and so must their changes."""
    folder = adapter(tmp_path / "adapter", PLAIN)
    gguf = tiny.write_gguf(MODEL, tmp_path / "model.gguf")
    assert_merged(gguf, [(folder, 1.0)], merged(folder, lambda _: 3.0, MODEL.tensors()), tmp_path / "merged")


def test_a_tensor_that_fills_a_parameter_in_parts(tmp_path: Path) -> None:
    """InternLM2's queries, keys and values, which a GGUF file has apart: there no adapter fits."""
    model, module = families.load("internlm2"), "model.layers.1.attention.wqkv"
    name, random = f"{module}.weight", np.random.default_rng(0)
    a, b = (random.normal(0, 0.2, shape).astype(np.float32) for shape in ((4, 96), (model.shapes[name][0], 4)))
    folder = tmp_path / "adapter"
    folder.mkdir()
    prefix = f"base_model.model.{module}.lora"
    save_file({f"{prefix}_A.weight": a, f"{prefix}_B.weight": b}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(PLAIN))
    tensors = model.tensors()
    source = tiny.write_huggingface(model, tmp_path / "source")
    sum_of_both = tiny.write_huggingface(model, tmp_path / "sum")
    save_file({**tensors, name: tensors[name] + 3 * (b @ a)}, sum_of_both / "model.safetensors")
    found = params.flatten(params.load(open_checkpoint(source, [(folder, 1.0)])))
    for path, value in params.flatten(params.load(open_checkpoint(sum_of_both))).items():
        np.testing.assert_allclose(found[path], value, rtol=1e-5, atol=1e-5, err_msg=path)
    _, gguf = twins.checkpoint(twins.TWINS["internlm2"], tmp_path)
    with pytest.raises(ValueError, match=r"wqkv\.weight', which is no weight of its own"):
        open_checkpoint(gguf, [(folder, 1.0)])


def test_no_adapter_and_weight_zero_change_nothing(source: Path, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", PLAIN)
    plain = params.flatten(params.load(open_checkpoint(source)))
    for adapters in ([], [(folder, 0.0)]):
        found = params.flatten(params.load(open_checkpoint(source, adapters)))
        assert all(np.array_equal(found[name], plain[name]) for name in plain)


def test_weights_stored_input_first(tmp_path: Path) -> None:
    """A module of the kind that GPT-2 has keeps its weight as [in, out]."""
    config = {
        "model_type": "gpt2", "vocab_size": 40, "n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 32,
        "tie_word_embeddings": True,
    }  # fmt: skip
    shapes = {"wte.weight": (40, 16), "wpe.weight": (32, 16), "ln_f.weight": (16,), "ln_f.bias": (16,)}
    for part, (into, out) in {
        "attn.c_attn": (16, 48),
        "attn.c_proj": (16, 16),
        "mlp.c_fc": (16, 64),
        "mlp.c_proj": (64, 16),
    }.items():
        shapes |= {f"h.0.{part}.weight": (into, out), f"h.0.{part}.bias": (out,)}
    for norm in ("ln_1", "ln_2"):
        shapes |= {f"h.0.{norm}.weight": (16,), f"h.0.{norm}.bias": (16,)}
    random = np.random.default_rng(0)
    tensors = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    model, folder = tmp_path / "model", tmp_path / "adapter"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    save_file(tensors, model / "model.safetensors")  # stored without its head's prefix, which the adapter has
    folder.mkdir()
    a, b = random.standard_normal((4, 16)).astype(np.float32), random.standard_normal((48, 4)).astype(np.float32)
    prefix = "base_model.model.transformer.h.0.attn.c_attn.lora"
    save_file({f"{prefix}_A.weight": a, f"{prefix}_B.weight": b}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(PLAIN | {"fan_in_fan_out": True}))
    found = open_checkpoint(model, [(folder, 1.0)]).read("h.0.attn.c_attn.weight")
    np.testing.assert_allclose(found, tensors["h.0.attn.c_attn.weight"] + 3.0 * (b @ a).T, rtol=1e-5, atol=1e-5)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {  # what the configuration says, None: it does not; words of the error
    "no alpha": ({"lora_alpha": None}, "lora_alpha"),
    "no rank": ({"r": None}, "'r'"),
    "alpha of zero": ({"lora_alpha": 0}, "lora_alpha positive"),
    "another rank": ({"r": 8}, "rank 8 4"),
    "another rank by pattern": ({"rank_pattern": {"o_proj": 2}}, "o_proj rank 2 4"),
    "broken pattern": ({"alpha_pattern": {"(": 2}}, "alpha_pattern"),
    "pattern of no number": ({"alpha_pattern": {"q_proj": "2"}}, "alpha_pattern q_proj float"),
    "another kind": ({"peft_type": "LOHA"}, "LOHA"),
    "magnitudes": ({"use_dora": True}, "use_dora"),
    "biases": ({"bias": "all"}, "bias"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    "layers replicated": ({"layer_replication": [[0, 1]]}, "layer_replication"),
    "weights changed at first": ({"init_lora_weights": "pissa"}, "pissa"),
    "something of the future": ({"use_magic": True}, "use_magic"),
    "inputs and outputs exchanged": ({"fan_in_fan_out": True}, "shape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_plain_is_refused_by_name(name: str, source: Path, tmp_path: Path) -> None:
    change, words = REFUSED[name]
    config = {key: value for key, value in (PLAIN | change).items() if value is not None}
    folder = adapter(tmp_path / "adapter", config)
    with pytest.raises(ValueError) as error:
        open_checkpoint(source, [(folder, 1.0)])
    assert [word for word in [str(folder), *words.split()] if word not in str(error.value)] == []


Q = "base_model.model.model.layers.0.self_attn.q_proj"


def without_b(tensors: Tensors) -> None:
    del tensors[f"{Q}.lora_B.weight"]


def magnitude(tensors: Tensors) -> None:
    tensors[f"{Q}.lora_magnitude_vector"] = np.ones(4, np.float32)


def embedding(tensors: Tensors) -> None:
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = np.ones((4, 40), np.float32)


def unknown_module(tensors: Tensors) -> None:
    for side in "AB":
        tensors[f"base_model.model.model.layers.9.self_attn.q_proj.lora_{side}.weight"] = tensors[
            f"{Q}.lora_{side}.weight"
        ]


def wider(tensors: Tensors) -> None:
    tensors[f"{Q}.lora_A.weight"] = np.ones((4, 97), np.float32)


def nothing(tensors: Tensors) -> None:
    tensors.clear()


@pytest.mark.parametrize(
    ("damage", "words"),
    {
        without_b: "layers.0.self_attn.q_proj A without",
        magnitude: "lora_magnitude_vector",
        embedding: "lora_embedding_A",
        unknown_module: "layers.9.self_attn.q_proj",
        wider: "layers.0.self_attn.q_proj (192, 97) (192, 96)",
        nothing: "no tensors",
    }.items(),
)
def test_every_tensor_of_an_adapter_is_used(
    damage: Callable[[Tensors], None], words: str, source: Path, tmp_path: Path
) -> None:
    folder = adapter(tmp_path / "adapter", PLAIN)
    tensors = load_file(folder / "adapter_model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError) as error:
        open_checkpoint(source, [(folder, 1.0)])
    assert [word for word in [str(folder), *words.split()] if word not in str(error.value)] == []


def test_the_head_of_a_tied_model_is_no_weight_of_its_own(tmp_path: Path) -> None:
    tied = tiny.llama(heads=(6, 2), head_size=32, width=96, tied=True)
    source = tiny.write_huggingface(tied, tmp_path / "model")
    with pytest.raises(ValueError, match=r"'lm_head\.weight', which is no weight of its own"):
        open_checkpoint(source, [(adapter(tmp_path / "adapter", PLAIN), 1.0)])


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_named(missing: str, source: Path, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", PLAIN)
    (folder / missing).unlink()
    with pytest.raises(FileNotFoundError, match=missing):
        open_checkpoint(source, [(folder, 1.0)])


def test_checkpoints_of_ours_take_none(source: Path, tmp_path: Path) -> None:
    assert main(["convert", str(source), "-o", str(tmp_path / "orbax")]) == 0
    with pytest.raises(ValueError, match="adapters name the tensors of Hugging Face's layout"):
        open_checkpoint(tmp_path / "orbax", [(adapter(tmp_path / "adapter", PLAIN), 1.0)])


def test_the_command_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An artifact with an adapter says so, agrees with that sum and not with the model alone."""
    folder, artifact = adapter(tmp_path / "adapter", PLAIN), tmp_path / "artifact"
    export = ["export", str(source), "-o", str(artifact), "--max-context", "32", "--adapter"]
    assert main([*export, f"{folder}=0.5"]) == 0
    manifest = json.loads((artifact / "manifest.json").read_text())
    (entry,) = manifest["source"]["adapters"]
    assert (entry["name"], entry["weight"]) == ("adapter", 0.5)
    assert entry["files"].keys() == {"adapter_config.json", "adapter_model.safetensors"}
    verify = ["verify", str(artifact), "--source", str(source), "--steps", "4"]
    assert main([*verify, "--adapter", f"{folder}=0.5"]) == 0
    assert main(verify) == 1
    assert main(["verify", str(artifact), "--adapter", str(folder)]) == 2
    capsys.readouterr()
    assert main([*export, f"{folder}=much", "--force"]) == 2
    assert "'much' is no number" in capsys.readouterr().err
