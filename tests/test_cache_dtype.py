"""A cache of int8 or float16: how its scales are made, what it costs, and that rows behave as with float32."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import onnx_ir as ir
import pytest

import tiny
from diptych.export.lowering import TARGETS
from diptych.export.parity import verify
from diptych.export.pipeline import export
from diptych.jax_model.calibrate import scales_of_cache
from diptych.jax_model.composites import quantize_cached
from diptych.jax_model.config import CACHE_SCALES, Config
from diptych.jax_model.decoder import Cache, prefill
from diptych.jax_model.params import cache_scales
from diptych.runtime import Manifest, load
from random_models import CONFIGS, LLAMA, random_params
from test_parity import edit_graph, failed

TOKENS = np.random.default_rng(7).integers(3, 97, 300).tolist()
BYTES = {"fp32": 4, "fp16": 2, "int8": 1}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.llama(heads=(4, 2), head_size=16, positions=512)
    return tiny.write_huggingface(model, tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def narrow(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(source, tmp_path_factory.mktemp("int8") / "artifact", kv_dtype="int8", verify=False).path


# --------------------------------------------------------------------------------------------------------------- scales


def test_numbers_are_rounded_to_the_nearest_step_and_clipped() -> None:
    steps = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 126.6, 200.0, -200.0], np.float32)
    scale = np.full((1, 8), 0.25, np.float32)
    found = quantize_cached(jnp.asarray(steps * 0.25)[None, None], jnp.asarray(scale))
    assert np.asarray(found).ravel().tolist() == [0, 2, 2, 0, -2, 127, 127, -128]


def held(config: Config, params: Any, tokens: list[int]) -> Cache:
    count = jnp.array([len(tokens)], jnp.int32)
    cache: Cache = Cache.zeros(config, 1, len(tokens))
    _, cache = prefill(config, params, cache, jnp.array([tokens]), count, count[:, None] - 1)
    return cache


@pytest.mark.parametrize("name", ["llama", "cohere", "gpt_oss", "deepseek", "olmo3", "phi", "glm4"])
def test_scales_reach_every_key_and_value_of_the_text(name: str) -> None:
    config, tokens = CONFIGS[name], TOKENS[:40]
    params = random_params(config)
    scales = scales_of_cache(config, params, tokens)
    assert list(scales) == cache_scales(config, "int8")
    cache = held(config, params, tokens)
    for i in range(config.L):
        for leaf, part in zip(CACHE_SCALES, (cache.k[i], cache.v[i]), strict=True):
            largest, scale = np.abs(np.asarray(part)).max((0, 2)), scales[f"layers.{i}.attn.{leaf}"]
            assert scale.shape == largest.shape and (scale > 0).all()
            assert (127 * scale >= 1.249 * largest).all()
            if leaf == "v_scale" and name == "llama":  # other starts of the text give other values, but not much larger
                assert (127 * scale <= 4 * largest).all()


def test_scales_of_keys_hold_at_later_positions() -> None:
    """A token's key at another place is the same pair of numbers, turned further: slow pairs, too."""
    params = random_params(LLAMA)
    one_layer = replace(LLAMA, layers=LLAMA.layers[:1])
    params = {**params, "layers": params["layers"][:1]}
    scale = scales_of_cache(one_layer, params, TOKENS[:24])["layers.0.attn.k_scale"]
    later = held(one_layer, params, (TOKENS[:24] * 11)[:256])
    assert (np.abs(np.asarray(later.k[0])).max((0, 2)) <= 127 * scale).all()


def test_keys_that_are_not_finite_are_refused() -> None:
    params = random_params(LLAMA)
    params["layers"][1]["attn"]["qkv"] = params["layers"][1]["attn"]["qkv"] * jnp.inf
    with pytest.raises(ValueError, match=r"layers\.1\.attn\.k_scale: keys or values are not finite"):
        scales_of_cache(LLAMA, params, TOKENS[:8])


def test_a_cache_of_integers_needs_scales() -> None:
    tokens, count = jnp.array([[5, 6]]), jnp.array([2])
    with pytest.raises(ValueError, match="a cache of int8 and parameters with 0 scales of it do not go together"):
        prefill(LLAMA, random_params(LLAMA), Cache.zeros(LLAMA, 1, 4, "int8"), tokens, count, count[:, None] - 1)


# ------------------------------------------------------------------------------------------------------------ artifacts


@pytest.mark.parametrize("kv_dtype", ["int8", "fp16"])
@pytest.mark.parametrize("target", TARGETS)
def test_an_artifact_is_verified_and_says_what_its_cache_costs(
    target: str, kv_dtype: str, source: Path, tmp_path: Path
) -> None:
    report = export(source, tmp_path / "artifact", target=target, kv_dtype=kv_dtype)
    assert report.certificate is not None and report.certificate.status == "passed"
    names = [check.name for check in report.certificate.checks]
    assert names[-4:] == ["cache.kl", "cache.greedy", "shipped.kl", "shipped.greedy"]
    assert {"prose", "code", "question"} <= report.cache["quality"].keys()
    assert all(score["kl"] < 1e-3 for score in report.cache["quality"].values())  # measured 2e-5
    assert verify(report.path, source=source, steps=2).status == "passed"


@pytest.mark.parametrize("kv_dtype", ["int8", "fp16"])
@pytest.mark.parametrize("target", TARGETS)
def test_rows_grow_fork_and_rewind(target: str, kv_dtype: str, source: Path, tmp_path: Path) -> None:
    """Two rows past the first capacity: what one holds, a copy and a second reading of it give again."""
    model = load(export(source, tmp_path / "artifact", target=target, kv_dtype=kv_dtype, verify=False).path)
    rows = model.session(rows=2)
    assert {array.itemsize for array in rows.cache.values()} == {BYTES[kv_dtype]}
    rows.prefill(0, TOKENS[:200])
    want = rows.prefill(0, TOKENS[200:280])  # past a capacity of 256
    rows.fork(0, 1)
    again = rows.decode([TOKENS[280]] * 2)
    np.testing.assert_array_equal(again[0], again[1])
    rows.rewind(0, 200)
    np.testing.assert_allclose(rows.prefill(0, TOKENS[200:280]), want, atol=2e-5)
    np.testing.assert_allclose(rows.decode([TOKENS[280]], rows=[0]), again[:1], atol=2e-5)
    rows.rewind(1, 0)
    np.testing.assert_allclose(rows.prefill(1, TOKENS[:280]), want, atol=2e-2)  # in other chunks: rounded after another


def test_scales_are_parameters_of_both_graphs_and_of_no_source(narrow: Path) -> None:
    graphs = [ir.load(narrow / f"{program}.onnx").graph for program in ("prefill", "decode")]
    for graph in graphs:
        for node in graph:
            if node.op_type == "GroupQueryAttention":
                names = [value.name for value in node.inputs[12:] if value is not None]
                layer = str(node.name).split("/")[0]
                assert names == [f"{layer}.attn.k_scale", f"{layer}.attn.v_scale"]
    tensors = Manifest.open(narrow).data["tensors"]
    assert [path for path, entry in tensors.items() if path.endswith("k_scale") and not entry["sources"]]


def test_wrong_scales_are_found(narrow: Path, tmp_path: Path) -> None:
    """Values clipped to next to nothing: what float32 arithmetic cannot show, the probabilities do."""
    artifact = tmp_path / "artifact"
    shutil.copytree(narrow, artifact)

    def clip(model: ir.Model) -> None:
        steps = ir.tensor(np.full((2, 16), 1e-5, np.float32), name="steps")
        wrong = model.graph.initializers["steps"] = ir.Value(name="steps", const_value=steps)
        for node in model.graph:
            if node.op_type == "GroupQueryAttention":
                node.replace_input_with(13, wrong)

    for program in ("prefill", "decode"):
        edit_graph(artifact, program, clip)
    assert "shipped.kl" in failed(verify(artifact, steps=2))


def test_an_artifact_with_scales_is_a_source_again(narrow: Path, tmp_path: Path) -> None:
    report = export(narrow, tmp_path / "again", kv_dtype="fp16", verify=False)
    assert report.cache["dtype"] == "float16"


def test_without_a_tokenizer_a_warning_says_what_the_scales_are_of(source: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((source / name).read_bytes())
    report = export(bare, tmp_path / "artifact", kv_dtype="int8", verify=False)
    assert any("scales of the int8 cache were made for arbitrary tokens" in warning for warning in report.warnings)


def test_an_unknown_type_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown kv_dtype 'int4'; known: fp32, fp16, int8"):
        export(source, tmp_path / "artifact", kv_dtype="int4")
    assert not list(tmp_path.iterdir())


def test_beside_integer_weights(source: Path, tmp_path: Path) -> None:
    """Both take the text: inputs weigh errors of the weights, keys and values decide the steps of the cache."""
    report = export(source, tmp_path / "artifact", quantize="int4", kv_dtype="int8")
    assert report.certificate is not None and report.certificate.status == "passed"
    assert report.quantization is not None and "against_float" in report.quantization["quality"]
    assert {"prose", "code"} <= report.cache["quality"].keys()
