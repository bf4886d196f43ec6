"""Orbax checkpoints: ours there and back, and the trees that MaxText and Gemma publish, saved from any topology."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from numpy.typing import NDArray

import tiny
from diptych.cli import main
from diptych.export.artifact import assemble
from diptych.export.convert import convert
from diptych.jax_model import params
from diptych.jax_model.readers import open_checkpoint

Tensors = Mapping[str, NDArray[Any]]
Tree = dict[str, Any]

LLAMA = tiny.llama(heads=(6, 2), head_size=16, width=96, layers=3)
LLAMA3_SCALING = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}  # fmt: skip
LLAMA31 = replace(LLAMA, config={**LLAMA.config, "rope_scaling": LLAMA3_SCALING})
GEMMA3 = tiny.gemma3(heads=(4, 2), layers=14, width=64, ffn=96)  # two blocks of six, and two layers that remain
GEMMA3_SMALL = tiny.gemma3(heads=(4, 2), layers=3, width=64, ffn=96)
GEMMA2 = replace(
    GEMMA3_SMALL,
    config={**GEMMA3_SMALL.config, "model_type": "gemma2", "attn_logit_softcapping": 50.0},
    shapes={
        name: shape for name, shape in GEMMA3_SMALL.shapes.items() if "q_norm" not in name and "k_norm" not in name
    },
)
GEMMA1 = replace(
    GEMMA2,
    config={**GEMMA2.config, "model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"},
    shapes={name: shape for name, shape in GEMMA2.shapes.items() if "feedforward" not in name},
)
GEMMA3_MHA = tiny.gemma3(heads=(4, 4), layers=2, width=64, ffn=96)


# -------------------------------------------------------------------------------------------------------- their trees


def maxtext(model: tiny.Tiny, *, scan: bool) -> Tree:
    """The model as MaxText keeps it."""
    tensors, config = model.tensors(), model.config
    gemma = config["model_type"] != "llama"
    L, D, H = config["num_hidden_layers"], config["hidden_size"], config["head_dim"]
    one = np.float32(gemma)
    turned = bool(config.get("rope_scaling")) and not gemma

    def heads(name: str, i: int) -> NDArray[Any]:
        kernel = tensors[f"model.layers.{i}.self_attn.{name}_proj.weight"].T.reshape(D, -1, H)
        if turned and name in "qk":  # halves become neighbours
            kernel = np.stack([kernel[..., : H // 2], kernel[..., H // 2 :]], axis=-1).reshape(kernel.shape)
        return kernel / np.float32(H**0.5) if name == "q" and not gemma else kernel

    def layer(i: int) -> Tree:
        at = f"model.layers.{i}"
        attention: Tree = {
            long: {"kernel": heads(short, i)} for long, short in (("query", "q"), ("key", "k"), ("value", "v"))
        }
        attention["out"] = {"kernel": tensors[f"{at}.self_attn.o_proj.weight"].T.reshape(-1, H, D)}
        norms = {"pre_self_attention_layer_norm": "input_layernorm"}
        norms |= {"post_self_attention_layer_norm": "post_attention_layernorm"}
        if gemma:
            norms = {"pre_self_attention_norm": "input_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
            norms |= {
                "post_self_attention_norm": "post_attention_layernorm",
                "pre_ffw_norm": "pre_feedforward_layernorm",
            }
            for name in ("query", "key"):
                attention[f"{name}_norm"] = {"scale": tensors[f"{at}.self_attn.{name[0]}_norm.weight"] + one}
        mlp = {
            new: {"kernel": tensors[f"{at}.mlp.{old}_proj.weight"].T}
            for new, old in (("wi_0", "gate"), ("wi_1", "up"), ("wo", "down"))
        }
        scales = {new: {"scale": tensors[f"{at}.{old}.weight"] + one} for new, old in norms.items()}
        return {"self_attention": attention, "mlp": mlp, **scales}

    layers = [layer(i) for i in range(L)]
    decoder: Tree = {"decoder_norm": {"scale": tensors["model.norm.weight"] + one}}
    if not scan:
        decoder |= {f"layers_{i}": layer for i, layer in enumerate(layers)}
    elif gemma:
        whole = L - L % 6
        decoder["layers"] = {f"layers_{j}": stacked(layers[j:whole:6]) for j in range(6)}
        decoder["layers_remainder"] = {f"layers_{j}": layer for j, layer in enumerate(layers[whole:])}
    else:
        decoder["layers"] = stacked(layers)
    if "lm_head.weight" in tensors:
        decoder["logits_dense"] = {"kernel": tensors["lm_head.weight"].T}
    embedding = tensors["model.embed_tokens.weight"] * (np.float32(D**0.5) if gemma else np.float32(1))
    return {"params": {"params": {"token_embedder": {"embedding": embedding}, "decoder": decoder}}}


def stacked(layers: list[Tree]) -> Tree:
    tree: Tree = jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *layers)
    return tree


def gemma(model: tiny.Tiny, *, transposed: bool = True) -> Tree:
    """The model as Gemma's own repository publishes it: names with slashes, arrays below them."""
    tensors, config = model.tensors(), model.config
    D, H = config["hidden_size"], config["head_dim"]
    tree: Tree = {
        "transformer/embedder": {"input_embedding": tensors["model.embed_tokens.weight"]},
        "transformer/final_norm": {"scale": tensors["model.norm.weight"]},
    }
    for i in range(config["num_hidden_layers"]):
        old, new = f"model.layers.{i}", f"transformer/layer_{i}"
        q, k, v = (tensors[f"{old}.self_attn.{name}_proj.weight"].reshape(-1, H, D).swapaxes(1, 2) for name in "qkv")
        if q.shape == k.shape:
            tree[f"{new}/attn/qkv_einsum"] = {"w": np.stack([q, k, v])}
        else:
            tree |= {f"{new}/attn/q_einsum": {"w": q}, f"{new}/attn/kv_einsum": {"w": np.stack([k, v])}}
        tree[f"{new}/attn/attn_vec_einsum"] = {"w": tensors[f"{old}.self_attn.o_proj.weight"].T.reshape(-1, H, D)}
        gating = np.stack([tensors[f"{old}.mlp.{name}_proj.weight"] for name in ("gate", "up")])
        tree[f"{new}/mlp/gating_einsum"] = {"w": gating if transposed else gating.swapaxes(1, 2)}
        tree[f"{new}/mlp/linear"] = {"w": tensors[f"{old}.mlp.down_proj.weight"].T}
        norms: tuple[tuple[str, str], ...] = (
            ("attn/_query_norm", "self_attn.q_norm"),
            ("attn/_key_norm", "self_attn.k_norm"),
            ("pre_attention_norm", "input_layernorm"),
            ("post_attention_norm", "post_attention_layernorm"),
            ("pre_ffw_norm", "pre_feedforward_layernorm"),
            ("post_ffw_norm", "post_feedforward_layernorm"),
        )
        if config["model_type"] == "gemma":
            norms = (norms[2], ("pre_ffw_norm", "post_attention_layernorm"))
        for theirs, name in norms:
            if f"{old}.{name}.weight" in tensors:
                tree[f"{new}/{theirs}"] = {"scale": tensors[f"{old}.{name}.weight"]}
    return tree


TREES: dict[str, tuple[tiny.Tiny, Callable[[], Tree], float]] = {  # with the relative difference that rounding makes
    "maxtext, scanned": (LLAMA, lambda: maxtext(LLAMA, scan=True), 0.0),
    "maxtext, one by one": (LLAMA, lambda: maxtext(LLAMA, scan=False), 0.0),
    "maxtext, rope turns neighbours": (LLAMA31, lambda: maxtext(LLAMA31, scan=True), 0.0),
    "maxtext, train state": (
        LLAMA, lambda: {**maxtext(LLAMA, scan=True), "step": np.int32(7), "opt_state": {"mu": np.ones(3)}}, 0.0,
    ),
    "maxtext gemma3, blocks and a remainder": (GEMMA3, lambda: maxtext(GEMMA3, scan=True), 3e-7),
    "maxtext gemma3, one by one": (GEMMA3_SMALL, lambda: maxtext(GEMMA3_SMALL, scan=False), 3e-7),
    "gemma": (GEMMA3_SMALL, lambda: gemma(GEMMA3_SMALL), 0.0),
    "gemma, nested": (GEMMA3_SMALL, lambda: nested(gemma(GEMMA3_SMALL)), 0.0),
    "gemma, gate the other way round": (GEMMA3_SMALL, lambda: gemma(GEMMA3_SMALL, transposed=False), 0.0),
    "gemma, the first": (GEMMA1, lambda: gemma(GEMMA1, transposed=False), 0.0),
    "gemma, the second": (GEMMA2, lambda: gemma(GEMMA2, transposed=False), 0.0),
    "gemma, q, k and v in one": (GEMMA3_MHA, lambda: gemma(GEMMA3_MHA), 0.0),
}  # fmt: skip


def nested(flat: Tree) -> Tree:
    """As Gemma's library keeps it in memory: no slashes, no ``w`` below the MLP's names."""
    tree: Tree = {}
    for name, arrays in flat.items():
        *parents, last = name.split("/")[1:]
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = arrays["w"] if "/mlp/" in name else arrays
    return tree


def save(tree: Tree, folder: Path, model: tiny.Tiny) -> Path:
    """The tree as an item of a step, with Hugging Face's configuration beside the steps."""
    ocp.PyTreeCheckpointer().save(folder.absolute() / "0" / "items", tree)
    (folder / "config.json").write_text(json.dumps(model.config))
    return folder


def values(source: Path) -> dict[str, NDArray[np.float32]]:
    return {path: np.asarray(leaf) for path, leaf in params.flatten(params.load(open_checkpoint(source))).items()}


def assert_equal(found: Tensors, expected: Tensors, rtol: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol=rtol, atol=rtol, err_msg=path)


@pytest.mark.parametrize("name", TREES)
def test_published_trees(name: str, tmp_path: Path) -> None:
    model, tree, rtol = TREES[name]
    expected = tiny.write_huggingface(model, tmp_path / "huggingface")
    found = save(tree(), tmp_path / "orbax", model)
    assert params.configure(open_checkpoint(found)) == params.configure(open_checkpoint(expected))
    assert_equal(values(found), values(expected), rtol)


@pytest.mark.parametrize("layout", ["maxtext", "gemma"])
def test_the_part_for_text_of_a_model_with_eyes(layout: str, tmp_path: Path) -> None:
    """Its configuration is nested and has more tokens than the tree: Hugging Face pads the vocabulary."""
    expected = tiny.write_huggingface(GEMMA3_SMALL, tmp_path / "huggingface")
    if layout == "maxtext":
        tree = maxtext(GEMMA3_SMALL, scan=False)
        tree["params"]["params"]["vision_encoder"] = {"Gemma3VisionEncoderLayer_0": {"embedding": np.ones(3)}}
    else:
        eyes = {"SigLiPFromPatches_0/siglip_encoder": {"pos_embedding": np.ones(3)}}
        tree = gemma(GEMMA3_SMALL) | eyes
        tree["transformer/embedder"]["mm_input_projection"] = {"w": np.ones((2, 2))}
    V = GEMMA3_SMALL.config["vocab_size"]
    config = {"model_type": "gemma3", "text_config": {**GEMMA3_SMALL.config, "vocab_size": V + 64}}
    found = save(tree, tmp_path / "orbax", replace(GEMMA3_SMALL, config=config))
    assert params.configure(open_checkpoint(found)) == params.configure(open_checkpoint(expected))
    assert_equal(values(found), values(expected), 3e-7)


def drop(tree: Tree) -> None:
    del tree["params"]["params"]["decoder"]["layers"]["mlp"]["wi_1"]


def add(tree: Tree) -> None:
    tree["params"]["params"]["decoder"]["layers"]["mlp"]["wi_2"] = {"kernel": np.ones((2, 3, 2))}


def add_layers(tree: Tree) -> None:
    decoder = tree["params"]["params"]["decoder"]
    decoder["layers"] = jax.tree.map(lambda leaf: np.concatenate([leaf, leaf], axis=1), decoder["layers"])


def flatten_heads(tree: Tree) -> None:
    kernel = tree["params"]["params"]["decoder"]["layers"]["self_attention"]["key"]
    kernel["kernel"] = kernel["kernel"].reshape(96, 3, 32)


def rename(tree: Tree) -> None:
    tree["params"]["params"]["embedder"] = tree["params"]["params"].pop("token_embedder")


def as_integers(tree: Tree) -> None:
    embedder = tree["params"]["params"]["token_embedder"]
    embedder["embedding"] = embedder["embedding"].astype(np.int32)


# A change of MaxText's tree, and words of the error.
DAMAGE: dict[Callable[[Tree], None], str] = {
    drop: "missing mlp.up_proj.weight",
    add: "no parameter uses decoder.layers.mlp.wi_2.kernel",
    add_layers: "no parameter uses model.layers.3.",
    flatten_heads: "decoder.layers.self_attention.key.kernel should have axes",
    rename: "token_embedder convert",
    as_integers: "token_embedder.embedding int32 bfloat16",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_does_not_fit_is_named(damage: Callable[[Tree], None], tmp_path: Path) -> None:
    tree = maxtext(LLAMA, scan=True)
    damage(tree)
    save(tree, tmp_path, LLAMA)
    with pytest.raises(ValueError) as error:
        values(tmp_path)
    assert [word for word in DAMAGE[damage].split() if word not in str(error.value)] == []


def test_a_tree_of_a_family_without_a_table_is_refused(tmp_path: Path) -> None:
    model = replace(LLAMA, config={**LLAMA.config, "model_type": "qwen2"})
    save(maxtext(LLAMA, scan=True), tmp_path, model)
    with pytest.raises(ValueError, match=r"maxtext.*'qwen2'.*supported: gemma3_text, llama"):
        open_checkpoint(tmp_path)


def test_without_a_configuration(tmp_path: Path) -> None:
    (save(maxtext(LLAMA, scan=True), tmp_path, LLAMA) / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no config\.json.*diptych convert"):
        open_checkpoint(tmp_path)


# ---------------------------------------------------------------------------------------------------------------- ours


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_huggingface(LLAMA, tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(source, tmp_path_factory.mktemp("orbax") / "model")


def test_there_and_back(source: Path, converted: Path) -> None:
    before, after = open_checkpoint(source), open_checkpoint(converted)
    assert (after.format, after.family) == ("orbax", "llama")
    assert params.configure(after) == params.configure(before)
    assert after.tokenizer.files == before.tokenizer.files
    assert_equal(values(converted), values(source))
    again = {path: (value, names) for path, value, names in params.stream(after, params.configure(after))}
    assert [names for _, names in again.values()] == [[path] for path in again]


@pytest.mark.parametrize("place", ["default", ".", "steps", "steps/12"])
def test_where_a_checkpoint_may_be_opened(
    place: str, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The item, its folder, a step, the parent of the steps, of which the last counts; relative, as everybody types."""
    monkeypatch.chdir(tmp_path)
    if place.startswith("steps"):
        shutil.copytree(converted, "steps/12")
        shutil.copytree(converted / "default", "steps/9/default")
        Path("steps/9/config.json").write_text("{}")
        Path("steps/100.orbax-checkpoint-tmp-1").mkdir()
        opened = Path(place)
    else:
        shutil.copytree(converted, "model")
        opened = Path("model", place)
    assert_equal(values(opened), values(converted))


def test_saved_from_eight_devices(source: Path, tmp_path: Path) -> None:
    """In a process with eight devices, every matrix over all of them; there and here no optimiser is imported."""
    code = f"""
import sys, jax, numpy as np, orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from diptych.jax_model import params
from diptych.jax_model.readers import open_checkpoint
mesh = Mesh(np.array(jax.devices()), ("x",))
def spread(leaf):
    return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec("x") if leaf.shape[0] % 8 == 0 else PartitionSpec()))
tree = jax.tree.map(spread, params.load(open_checkpoint({str(source)!r})))
ocp.PyTreeCheckpointer().save({str(tmp_path / "default")!r}, tree)
print(len(tree["layers"][0]["attn"]["out"].sharding.device_set), "optax" in sys.modules)
"""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    printed = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment, cwd="/")
    assert printed.split() == ["8", "False"]
    config = params.configure(open_checkpoint(source))
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    assert_equal(values(tmp_path), values(source))


def test_reading_and_writing_imports_no_optimiser(source: Path, tmp_path: Path) -> None:
    code = f"""
import sys
from diptych.export.convert import convert
from diptych.jax_model import params
from diptych.jax_model.readers import open_checkpoint
params.load(open_checkpoint(convert({str(source)!r}, {str(tmp_path / "new")!r})))
print("orbax.checkpoint" in sys.modules, "optax" in sys.modules)
"""
    printed = subprocess.check_output([sys.executable, "-c", code], text=True, cwd="/")
    assert printed.split() == ["True", "False"]


def test_the_command_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["convert", str(source), "-o", str(tmp_path / "new"), "--to", "orbax", "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(tmp_path / "new"), "format": "orbax"}
    assert main(command) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "nothing"), "-o", str(tmp_path / "other")]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_an_artifact_is_a_source(source: Path, tmp_path: Path) -> None:
    assert main(["export", str(source), "-o", str(tmp_path / "artifact"), "--no-verify", "--max-context", "32"]) == 0
    artifact = open_checkpoint(tmp_path / "artifact")
    assert artifact.format == "artifact"
    assert params.configure(artifact) == params.configure(open_checkpoint(source), 32)
    assert_equal(values(tmp_path / "artifact"), values(source))
    assert_equal(values(convert(tmp_path / "artifact", tmp_path / "orbax")), values(source))


def test_an_orbax_checkpoint_is_exported_and_proved(converted: Path, tmp_path: Path) -> None:
    assert main(["export", str(converted), "-o", str(tmp_path / "artifact"), "--max-context", "32"]) == 0
    manifest = json.loads((tmp_path / "artifact" / "manifest.json").read_text())
    assert manifest["source"]["format"] == "orbax"
    assert {"config.json", "default/_METADATA"} <= manifest["source"]["files"].keys()
    assert manifest["verification"]["status"] == "passed"
    assert manifest["tensors"]["layers.0.attn.qkv"]["sources"] == ["layers.0.attn.qkv"]


def test_what_was_interrupted_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr("diptych.export.convert.write_text", fail)  # the tree is there already
    with pytest.raises(OSError, match="no space"):
        convert(source, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    with assemble(tmp_path / "new") as folder:
        (folder / "default").mkdir()
    assert (tmp_path / "new" / "default").is_dir()
