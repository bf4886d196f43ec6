"""From stored tensors to our tree: every parameter filled once, every tensor used once, or an error that names them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from einops import rearrange
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save_file

import tiny
from diptych.jax_model import params
from diptych.jax_model.config import Layer
from diptych.jax_model.families import FAMILIES
from diptych.jax_model.families.table import Filling, Parameter, Source, expand
from diptych.jax_model.readers import Checkpoint, open_checkpoint
from diptych.jax_model.rope import Linear, Rope, frequencies
from reference import families

Tensors = dict[str, NDArray[np.float32]]
LLAMA, GEMMA = tiny.VARIANTS["llama-12-2"], tiny.VARIANTS["gemma3"]
FORMATS = ["huggingface", "gguf"]


class Unread:
    """A checkpoint whose tensors must not be read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __getattr__(self, name: str) -> Any:
        assert name != "read", "a tensor was read before names and shapes were checked"
        return getattr(self._checkpoint, name)


def huggingface(model: tiny.Tiny, tensors: Tensors, path: Path) -> Checkpoint:
    folder = tiny.write_huggingface(model, path / "folder")
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder)


def as_gguf(model: tiny.Tiny, tensors: Tensors, path: Path) -> Checkpoint:
    """``tensors`` have GGUF's names and layouts."""
    file = path / "model.gguf"
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "gemma3_text": gguf.MODEL_ARCH.GEMMA3}[model.config["model_type"]]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    tiny._write_parameters(writer, model.config, arch)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_checkpoint(file)


def stored(model: tiny.Tiny, format: str, path: Path) -> Tensors:
    """Every tensor as the format stores it."""
    if format == "huggingface":
        return model.tensors()
    checkpoint = open_checkpoint(tiny.write_gguf(model, path / "source.gguf"))
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def write(model: tiny.Tiny, tensors: Tensors, format: str, path: Path) -> Checkpoint:
    return (huggingface if format == "huggingface" else as_gguf)(model, tensors, path)


def values(checkpoint: Checkpoint) -> Tensors:
    return {path: value for path, value, _ in params.stream(checkpoint, params.configure(checkpoint))}


# --------------------------------------------------------------------------------------------------------- every value


def expected(model: tiny.Tiny) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Our tree out of Hugging Face's tensors, spelled out."""
    tensors, config = model.tensors(), model.config
    one = 1.0 if config["model_type"].startswith("gemma") else 0.0
    yield "embed", tensors["model.embed_tokens.weight"]
    for i in range(config["num_hidden_layers"]):
        theirs, ours = f"model.layers.{i}.", f"layers.{i}."
        qkv = [tensors[f"{theirs}self_attn.{kind}_proj.weight"].T for kind in "qkv"]
        yield ours + "attn.qkv", np.concatenate(qkv, axis=1)
        yield ours + "attn.out", tensors[theirs + "self_attn.o_proj.weight"].T
        gate, up, down = (tensors[f"{theirs}mlp.{kind}_proj.weight"].T for kind in ("gate", "up", "down"))
        yield ours + "mlp.gate_up", np.concatenate([gate, up], axis=1)
        yield ours + "mlp.down", down
        yield ours + "attn_norm", tensors[theirs + "input_layernorm.weight"] + np.float32(one)
        if one:
            yield ours + "attn.q_norm", tensors[theirs + "self_attn.q_norm.weight"] + np.float32(one)
            yield ours + "attn.k_norm", tensors[theirs + "self_attn.k_norm.weight"] + np.float32(one)
            yield ours + "attn_post_norm", tensors[theirs + "post_attention_layernorm.weight"] + np.float32(one)
            yield ours + "mlp_norm", tensors[theirs + "pre_feedforward_layernorm.weight"] + np.float32(one)
            yield ours + "mlp_post_norm", tensors[theirs + "post_feedforward_layernorm.weight"] + np.float32(one)
        else:
            yield ours + "mlp_norm", tensors[theirs + "post_attention_layernorm.weight"]
    yield "final_norm", tensors["model.norm.weight"] + np.float32(one)
    if "lm_head.weight" in tensors:
        yield "head", tensors["lm_head.weight"].T


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", tiny.GGUF_VARIANTS)
def test_every_value_lands_where_it_belongs(name: str, format: str, tmp_path: Path) -> None:
    """The un-permutation of a llama's q and k for (8,2), (12,2), (16,8), (6,2), (8,8) and (8,1) heads included."""
    model = tiny.VARIANTS[name]
    writer = tiny.write_huggingface if format == "huggingface" else tiny.write_gguf
    found = values(open_checkpoint(writer(model, tmp_path / "a.gguf")))
    wanted = dict(expected(model))
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("model", [LLAMA, GEMMA], ids=["llama", "gemma3"])
def test_the_tables_read_backwards(model: tiny.Tiny, format: str, tmp_path: Path) -> None:
    """Our values, split and rearranged by the reversed layouts, are the stored tensors again: all of them."""
    checkpoint = write(model, stored(model, format, tmp_path), format, tmp_path)
    config = params.configure(checkpoint)
    found, again, sizes = values(checkpoint), {}, config.sizes()
    for parameter in expand(FAMILIES[config.family].table, config):
        filling, start = parameter.huggingface if format == "huggingface" else parameter.gguf, 0
        assert filling is not None and filling.join is None
        for source in filling.sources:
            left, right = source.layout.split("->")
            letters = set(left.replace("(", " ").replace(")", " ").split())
            size = math.prod(checkpoint.tensors[source.name].shape)
            width = size // math.prod(parameter.shape(config)[:-1])
            part = found[parameter.path][..., start : start + width] - np.float32(source.offset)
            start += width
            again[source.name] = rearrange(part, f"{right} -> {left}", **{name: sizes[name] for name in letters})
    assert again.keys() == checkpoint.tensors.keys()
    for name, value in again.items():
        np.testing.assert_allclose(value, checkpoint.read(name), rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", tiny.VARIANTS)
def test_abstract_promises_what_loading_keeps(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny.write_huggingface(tiny.VARIANTS[name], tmp_path))
    config = params.configure(checkpoint)
    promised, loaded = params.abstract(config), params.load(checkpoint)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), loaded) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), promised
    )
    in_order = [parameter.path for parameter in expand(FAMILIES[config.family].table, config)]
    assert list(params.flatten(loaded)) == list(params.flatten(promised)) == in_order
    assert params.flatten(params.abstract(config, "bfloat16"))["embed"].dtype == jnp.bfloat16


@pytest.mark.parametrize("format", FORMATS)
def test_a_stream_says_what_each_value_was_made_of(format: str, tmp_path: Path) -> None:
    checkpoint = write(LLAMA, stored(LLAMA, format, tmp_path), format, tmp_path)
    sources = {path: names for path, _, names in params.stream(checkpoint, params.configure(checkpoint))}
    first = {
        "huggingface": [f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "qkv"],
        "gguf": [f"blk.0.attn_{kind}.weight" for kind in "qkv"],
    }
    assert sources["layers.0.attn.qkv"] == first[format]
    assert sorted(name for names in sources.values() for name in names) == sorted(checkpoint.tensors)


# -------------------------------------------------------------------------------------------------------- exactly once

MISFITS: dict[str, tuple[Any, str]] = {
    "a tensor missing": (
        lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"),
        r"missing tensors: 'model\.layers\.1\.mlp\.up_proj\.weight' \(for layers\.1\.mlp\.gate_up\)$",
    ),
    "a packed tensor missing": (
        lambda tensors: tensors.pop("model.layers.0.self_attn.k_proj.weight"),
        r"missing tensors: 'model\.layers\.0\.self_attn\.k_proj\.weight' \(for layers\.0\.attn\.qkv\)$",
    ),
    "a tensor too many": (
        lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": np.zeros((2, 2), np.float32)}),
        r"no parameter uses: 'model\.layers\.2\.mlp\.up_proj\.weight'$",
    ),
    "a bias": (
        lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(2, np.float32)}),
        r"q_proj\.bias' \(the configuration says that there are no biases\)$",
    ),
    "a transposed tensor": (
        lambda tensors: tensors.update({"lm_head.weight": np.ascontiguousarray(tensors["lm_head.weight"].T)}),
        r"wrong shape: 'lm_head\.weight' \(96, 97\), expected \(97, 96\)$",
    ),
    "no head": (lambda tensors: tensors.pop("lm_head.weight"), r"missing tensors: 'lm_head\.weight' \(for head\)$"),
    "no layer": (
        lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1" in name],
        r"missing tensors: .*, … \(9 in all\)$",
    ),
    "two things at once": (
        lambda tensors: tensors.update({"model.norm.bias": tensors.pop("model.norm.weight")}),
        r"missing tensors: 'model\.norm\.weight'.*; tensors that no parameter uses: 'model\.norm\.bias'",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_named_before_anything_is_read(name: str, tmp_path: Path) -> None:
    change, problem = MISFITS[name]
    tensors = LLAMA.tensors()
    change(tensors)
    checkpoint = huggingface(LLAMA, tensors, tmp_path)
    with pytest.raises(ValueError, match=problem) as raised:
        params.stream(Unread(checkpoint), params.configure(checkpoint))
    assert str(checkpoint.path) in str(raised.value)
    assert "'llama'" in str(raised.value)


GROUPED = "model.layers.0.attention.wqkv.weight"
# Parts of the tensor that do not make it up, and what is said of it.
INEXACT: dict[str, tuple[Callable[[tuple[Source, ...]], tuple[Source, ...]], str]] = {
    "a part missing": (lambda sources: sources[:2], "of which a part is not used"),
    "a part twice": (lambda sources: (*sources, sources[0]), "used more than once"),
    "the whole and a part": (lambda sources: (replace(sources[0], part=None), sources[1]), "used more than once"),
}


def test_a_tensor_taken_in_parts_is_one_source(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny.write_huggingface(families.load("internlm2"), tmp_path))
    sources = {path: names for path, _, names in params.stream(checkpoint, params.configure(checkpoint))}
    assert sources["layers.0.attn.qkv"] == [GROUPED]
    assert sorted(name for names in sources.values() for name in names) == sorted(checkpoint.tensors)


def test_what_an_internlm2_leaves_out(tmp_path: Path) -> None:
    """The defaults are its own, not Llama's: with biases, which lie as the rows of their weights do."""
    model = families.load("internlm2")
    left_out = {"bias", "rms_norm_eps", "rope_theta", "max_position_embeddings"}
    config = {key: value for key, value in model.config.items() if key not in left_out}
    config["rope_scaling"] = {"type": "linear", "factor": 4.0}
    biases = {
        f"model.layers.{i}.attention.{name}.bias": (size,)
        for i in range(2)
        for name, size in (("wqkv", 160), ("wo", 96))
    }
    checkpoint = open_checkpoint(tiny.write_huggingface(tiny.Tiny(config, {**model.shapes, **biases}), tmp_path))
    found = params.configure(checkpoint)
    assert (found.norm_eps, found.max_positions) == (1e-6, 2048)
    assert found.layers == (Layer(Rope(10_000.0, 16, Linear(4.0))),) * 2
    stored, loaded = checkpoint.read("model.layers.1.attention.wqkv.bias"), params.load(checkpoint)["layers"][1]["attn"]
    heads = stored.reshape(2, 5, 16)  # three queries, a key, a value for each of two
    order = [heads[0, 0], heads[0, 1], heads[0, 2], heads[1, 0], heads[1, 1], heads[1, 2]]
    order += [heads[0, 3], heads[1, 3], heads[0, 4], heads[1, 4]]
    np.testing.assert_array_equal(loaded["qkv_bias"], np.concatenate(order))
    np.testing.assert_array_equal(loaded["out_bias"], checkpoint.read("model.layers.1.attention.wo.bias"))


@pytest.mark.parametrize("name", INEXACT)
def test_parts_should_make_up_their_tensor(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, problem = INEXACT[name]
    family = FAMILIES["internlm2"]

    def changed(row: Parameter) -> Parameter:
        whole = not row.path.endswith("attn.qkv")
        return row if whole else replace(row, huggingface=Filling(change(row.huggingface.sources)))

    monkeypatch.setitem(FAMILIES, "internlm2", replace(family, table=tuple(map(changed, family.table))))
    checkpoint = open_checkpoint(tiny.write_huggingface(families.load("internlm2"), tmp_path))
    with pytest.raises(ValueError, match=rf"{problem}: '{re.escape(GROUPED)}'"):
        params.stream(checkpoint, params.configure(checkpoint))


def test_frequencies_in_a_file_are_used_or_refused(tmp_path: Path) -> None:
    """How a GGUF file carries llama3 scaling: a divisor for every pair. Not every architecture knows of it."""
    divisors = {"rope_freqs.weight": np.arange(1, LLAMA.config["head_dim"] // 2 + 1, dtype=np.float32)}
    config = params.configure(as_gguf(LLAMA, stored(LLAMA, "gguf", tmp_path) | divisors, tmp_path))
    rope = config.layers[0].rope
    assert rope is not None
    scaled, plain = (frequencies(one, config.max_positions)[0] for one in (rope, replace(rope, scaling=None)))
    np.testing.assert_allclose(scaled * divisors["rope_freqs.weight"], plain, rtol=1e-6)
    with pytest.raises(ValueError, match=r"does not know what gemma3\.rope\.factors means"):
        as_gguf(GEMMA, stored(GEMMA, "gguf", tmp_path) | divisors, tmp_path)


def test_a_buffer_that_follows_from_the_configuration_is_left_out(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    checkpoint = huggingface(LLAMA, LLAMA.tensors() | {name: np.ones(8, np.float32)}, tmp_path)
    assert params.load(checkpoint)


# ---------------------------------------------------------------------------------------------------------------- tied

TIED = tiny.llama(tied=True)
NAMES = {
    "huggingface": ("model.embed_tokens.weight", "lm_head.weight"),
    "gguf": ("token_embd.weight", "output.weight"),
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kept", ["embedding", "head", "both"])
def test_a_tied_matrix_may_be_stored_under_either_name_or_both(kept: str, format: str, tmp_path: Path) -> None:
    embed, head = NAMES[format]
    tensors = stored(TIED, format, tmp_path)
    matrix = tensors.pop(embed)
    tensors |= dict.fromkeys({"embedding": [embed], "head": [head], "both": [embed, head]}[kept], matrix)
    checkpoint = write(TIED, tensors, format, tmp_path)
    assert params.configure(checkpoint).tied
    found = values(checkpoint)
    assert "head" not in found
    np.testing.assert_array_equal(found["embed"], matrix)
    sources = {path: names for path, _, names in params.stream(checkpoint, params.configure(checkpoint))}
    assert sources["embed"] == [head if kept == "head" else embed]


@pytest.mark.parametrize("format", FORMATS)
def test_a_tied_matrix_stored_under_neither_name_is_missed_under_both(format: str, tmp_path: Path) -> None:
    embed, head = NAMES[format]
    tensors = stored(TIED, format, tmp_path)
    del tensors[embed]
    with pytest.raises(ValueError, match=f"missing tensors: '{embed}' or '{head}'"):
        values(write(TIED, tensors, format, tmp_path))


def test_two_different_matrices_of_a_tied_folder_are_refused(tmp_path: Path) -> None:
    tensors = TIED.tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["lm_head.weight"][-1, -1] += 1e-3
    with pytest.raises(ValueError, match=r"ties 'model\.embed_tokens\.weight' and 'lm_head\.weight'.*differ"):
        values(huggingface(TIED, tensors, tmp_path))


def test_two_matrices_of_a_tied_folder_must_have_one_shape(tmp_path: Path) -> None:
    tensors = TIED.tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][:-1].copy()
    with pytest.raises(ValueError, match="differ in shape"):
        values(huggingface(TIED, tensors, tmp_path))


def test_two_different_matrices_of_a_gguf_are_embedding_and_head(tmp_path: Path) -> None:
    tensors = stored(TIED, "gguf", tmp_path)
    tensors["output.weight"] = tensors["token_embd.weight"] * 2
    checkpoint = as_gguf(TIED, tensors, tmp_path)
    assert not params.configure(checkpoint).tied
    np.testing.assert_array_equal(values(checkpoint)["head"], tensors["output.weight"].T)


# ------------------------------------------------------------------------------------------------------ paths and files


def trees(depth: int) -> st.SearchStrategy[dict[str, Any]]:
    name = st.text("abc_", min_size=1, max_size=4)
    leaf = st.integers()
    children = leaf if depth == 0 else leaf | trees(depth - 1)
    return st.dictionaries(name, children, min_size=1, max_size=3)


@given(tree=trees(2), layers=st.lists(trees(1), min_size=1, max_size=12))
def test_flatten_and_unflatten_are_inverse(tree: dict[str, Any], layers: list[dict[str, Any]]) -> None:
    whole = tree | {"layers": layers}
    leaves = params.flatten(whole)
    assert params.unflatten(leaves) == whole
    assert params.flatten(params.unflatten(leaves)) == leaves


@pytest.mark.parametrize(
    ("leaves", "problem"),
    [
        ({"layers.0.a": 1, "layers.2.a": 1}, "layer 1 is missing"),
        ({"a": 1, "a.b": 2}, "'a.b' lies below another"),
        ({"a.b": 2, "a": 1}, "'a' lies above another"),
    ],
)
def test_paths_that_make_no_tree_are_refused(leaves: dict[str, int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        params.unflatten(leaves)


def test_an_artifacts_weights_come_back_without_its_constants(tmp_path: Path) -> None:
    checkpoint = huggingface(GEMMA, GEMMA.tensors(), tmp_path)
    leaves = {path: np.ascontiguousarray(value) for path, value in values(checkpoint).items()}
    save_file({**leaves, "constants.rope": np.zeros(3, np.float32)}, tmp_path / "weights.safetensors")
    again = params.read_safetensors(tmp_path / "weights.safetensors", params.configure(checkpoint))
    assert jax.tree.all(jax.tree.map(np.array_equal, again, params.load(checkpoint)))


# -------------------------------------------------------------------------------------------------------- real models


def test_smollm2_through_a_folder_is_the_same_bit_for_bit(smollm2_gguf: Path, tmp_path: Path) -> None:
    """The folder is written here, with a permutation that is not the table's."""
    source = open_checkpoint(smollm2_gguf)
    config = params.configure(source)
    tensors: Tensors = {}
    for parameter in expand(FAMILIES[config.family].table, config):
        assert parameter.gguf is not None
        for piece, ours in zip(parameter.gguf.sources, parameter.huggingface.sources, strict=True):
            value = source.read(piece.name)
            heads = {"attn_q": config.N, "attn_k": config.K}.get(piece.name.split(".")[-2])
            if heads:
                value = value.reshape(heads, config.H // 2, 2, config.D).swapaxes(1, 2).reshape(value.shape)
            tensors[ours.name] = value
    names = {
        "hidden_size": config.D,
        "intermediate_size": config.F,
        "max_position_embeddings": config.max_positions,
        "num_attention_heads": config.N,
        "num_hidden_layers": config.L,
        "num_key_value_heads": config.K,
        "rope_theta": 100_000.0,
        "vocab_size": config.V,
    }
    folder = tiny.write_huggingface(tiny.Tiny({**tiny.llama(tied=True).config, **names, "head_dim": 64}, {}), tmp_path)
    save_file(tensors, folder / "model.safetensors")
    del tensors
    copy = open_checkpoint(folder)
    assert params.configure(copy) == config
    pairs = zip(params.stream(source, config), params.stream(copy, config), strict=True)
    for (path, left, _), (other, right, _) in pairs:
        assert path == other
        np.testing.assert_array_equal(left.view(np.uint32), right.view(np.uint32), err_msg=path)
    (folder / "model.safetensors").unlink()  # half a gigabyte


def test_gemma_fits_its_table(gemma3_gguf: Path) -> None:
    checkpoint = open_checkpoint(gemma3_gguf)
    config = params.configure(checkpoint)
    assert (config.V, config.D, config.F, config.N, config.K, config.H, config.L) == (262144, 640, 2048, 4, 1, 256, 18)
    assert config.attn_scale == 1 / 16
    assert [i for i, layer in enumerate(config.layers) if layer.window is None] == [5, 11, 17]
    bases = {(layer.window, layer.rope and layer.rope.base) for layer in config.layers}
    assert bases == {(None, 1_000_000.0), (512, 10_000.0)}
    params.stream(checkpoint, config)
