"""The lowering: every target computes what JAX computes, in the operators that it promises."""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from jax import lax

from diptych.export.lowering import TARGETS, Lowered, Program, convert, lower
from diptych.export.tracing import named_leaves
from diptych.jax_model.composites import experts, rotary
from diptych.jax_model.config import CacheDtype
from diptych.jax_model.decoder import Cache, decode, prefill
from diptych.jax_model.rope import Linear, Llama3, LongRope, Rope, Yarn, frequencies
from diptych.jax_model.storage import Form, Storage
from random_models import CONFIGS, LLAMA, random_params

S = 72
TOLERANCE = 1e-4  # float32; the gate at export allows 1e-3 on models a thousand times as large
GOLDEN = Path(__file__).parent / "golden"


def session(lowered: Lowered, params: Any, **options: Any) -> ort.InferenceSession:
    values = {**dict(named_leaves(params)), **lowered.constants}
    for name, value in lowered.model.graph.initializers.items():
        if value.const_value is None:
            value.const_value = ir.Tensor(np.asarray(values[name]), name=name)
    settings = ort.SessionOptions()
    for option, value in options.items():
        setattr(settings, option, value)
    return ort.InferenceSession(
        ir.serde.serialize_model(lowered.model).SerializeToString(), settings, providers=["CPUExecutionProvider"]
    )


@functools.cache
def programs(
    name: str, target: str, cache_dtype: CacheDtype = "float32"
) -> tuple[Any, ort.InferenceSession, ort.InferenceSession]:
    config = CONFIGS[name]
    params = random_params(config, cache_dtype=cache_dtype)
    both = (
        session(lower(program, config, target, S, cache_dtype=cache_dtype), params) for program in ("prefill", "decode")
    )
    return params, *both


def feed(config: Any, cache: Cache, **inputs: Any) -> dict[str, np.ndarray]:
    pasts = {
        f"past_key_values.{i}.{part}": np.asarray(buffers[i])
        for part, buffers in (("key", cache.k), ("value", cache.v))
        for i in range(config.L)
    }
    return {**inputs, **pasts, "past_length": np.asarray(cache.length)}


# How far numbers of a cache may be apart, absolutely and relatively: float32 as logits; of narrower ones the next
# number may be the nearest.
APART = {
    "float32": (TOLERANCE, 0.0),
    "float16": (TOLERANCE, 2.0**-10),
    "int8": (1.0, 0.0),
}
TURNED = 5e-3  # how far logits move with each integer that was rounded the other way: measured 2e-3


def compare(outputs: list[np.ndarray], logits: Any, cache: Cache) -> None:
    """Logits, lengths, and the part of the cache that holds tokens."""
    turned = 0
    for i in range(len(cache.k)):
        for got, want in zip(outputs[2 + 2 * i :], (cache.k[i], cache.v[i]), strict=False):
            assert got.dtype == want.dtype
            for row, length in enumerate(cache.length.tolist()):
                one, other = (np.asarray(x[row, :, :length], np.float32) for x in (got, want))
                atol, rtol = APART[want.dtype.name]
                np.testing.assert_allclose(one, other, atol=atol, rtol=rtol)
                turned += int((one != other).sum()) if want.dtype == np.int8 else 0
    assert turned <= 3, "of some thousand"
    np.testing.assert_allclose(outputs[0], logits, atol=TOLERANCE + TURNED * turned)
    np.testing.assert_array_equal(outputs[1], cache.length)


# Rows, new tokens, tokens already held in each row, and why.
FEW_STEPS = [
    (1, 3, (5,), "a chunk behind others"),
    (1, 65, (0,), "past a power of two, and every window"),
    (2, 9, (0, 0), "right-padded rows"),
]
STEPS = [
    *FEW_STEPS,
    (1, 1, (0,), "one token, nothing held"),
    (1, 2, (0,), "small"),
    (1, 64, (3,), "a power of two, past both windows"),
    (1, 63, (9,), "fills the cache to the last slot"),
    (5, 7, (0, 0, 0, 0, 0), "many rows"),
]


# Sizes are the lowering's affair, which three configurations cover; the others are there for their operators.
SIZED = ("llama", "gemma3", "small_heads")
HELD = [(7, 8), (1,), (S - 1,), (0, 40, S - 1, 1, 12)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("name", "B", "T", "held", "why"),
    [(name, *step) for name in CONFIGS for step in (STEPS if name in SIZED else FEW_STEPS)],
)
def test_prefill(name: str, target: str, B: int, T: int, held: tuple[int, ...], why: str) -> None:
    config = CONFIGS[name]
    params, run, _ = programs(name, target)
    random = np.random.default_rng(T)
    cache = filled(config, held)
    tokens = random.integers(0, config.V, (B, T)).astype(np.int32)
    num_tokens = np.maximum(1, T - np.arange(B)).astype(np.int32)
    positions = np.stack([num_tokens - 1, num_tokens // 2], axis=1).astype(np.int32)
    inputs = {"input_ids": tokens, "num_tokens": num_tokens, "logit_positions": positions}
    got = run.run(None, feed(config, cache, **inputs))
    compare(got, *prefill(config, params, cache, *map(jnp.asarray, (tokens, num_tokens, positions))))


@pytest.mark.parametrize("target", ["onnx", "primitive"])
def test_ragged_chunks_behind_ragged_rows(target: str) -> None:
    """GroupQueryAttention refuses these (batches of several tokens behind a past); the other targets take them."""
    config = CONFIGS["gemma3"]
    params, run, _ = programs("gemma3", target)
    cache = filled(config, (11, 2))
    tokens = np.arange(10, dtype=np.int32).reshape(2, 5)
    num_tokens, positions = np.array([5, 3], np.int32), np.array([[4], [2]], np.int32)
    inputs = {"input_ids": tokens, "num_tokens": num_tokens, "logit_positions": positions}
    got = run.run(None, feed(config, cache, **inputs))
    compare(got, *prefill(config, params, cache, *map(jnp.asarray, (tokens, num_tokens, positions))))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("name", "held"), [(name, held) for name in CONFIGS for held in (HELD if name in SIZED else HELD[:1])]
)
def test_decode(name: str, target: str, held: tuple[int, ...]) -> None:
    config = CONFIGS[name]
    params, _, run = programs(name, target)
    cache = filled(config, held)
    tokens = np.arange(len(held), dtype=np.int32)
    got = run.run(None, feed(config, cache, input_ids=tokens[:, None]))
    compare(got, *decode(config, params, cache, jnp.asarray(tokens)))


# Where attention differs: plain, windows, no rotary in the fused operator, layers without rope, sinks, heads that share
# all, capped scores, norms behind rope.
ATTENTIONS = ("llama", "gemma3", "small_heads", "cohere", "gpt_oss", "deepseek", "olmo", "olmo3")


@pytest.mark.parametrize("cache_dtype", ["int8", "float16"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_narrow_cache(name: str, target: str, cache_dtype: CacheDtype) -> None:
    """A chunk behind others, past both windows, then a step of ragged rows."""
    config, T = CONFIGS[name], 20
    params, run, step = programs(name, target, cache_dtype)
    cache = filled(config, (5,), cache_dtype)
    tokens = np.random.default_rng(T).integers(0, config.V, (1, T)).astype(np.int32)
    num_tokens, positions = np.array([T], np.int32), np.arange(T, dtype=np.int32)[None]
    inputs = {"input_ids": tokens, "num_tokens": num_tokens, "logit_positions": positions}
    got = run.run(None, feed(config, cache, **inputs))
    compare(got, *prefill(config, params, cache, *map(jnp.asarray, (tokens, num_tokens, positions))))

    cache = filled(config, (7, 30), cache_dtype)
    got = step.run(None, feed(config, cache, input_ids=tokens[0, :2, None]))
    compare(got, *decode(config, params, cache, jnp.asarray(tokens[0, :2])))


@pytest.mark.parametrize("cache_dtype", ["int8", "float16"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_narrow_cache_costs_no_node(name: str, cache_dtype: CacheDtype) -> None:
    """The fused graphs write and read it in the operator that they have anyway: in place, and nothing is widened."""
    for program in ("prefill", "decode"):
        kinds = [
            [node.op_type for node in lower(program, CONFIGS[name], "ort", S, cache_dtype=dtype).model.graph]
            for dtype in ("float32", cache_dtype)
        ]
        assert kinds[0] == kinds[1]


def filled(config: Any, held: tuple[int, ...], dtype: CacheDtype = "float32") -> Cache:
    """A cache whose rows hold some tokens' worth of random keys and values."""
    random = np.random.default_rng(len(held))
    size = 40 if dtype == "int8" else 1

    def buffers() -> tuple[jax.Array, ...]:
        shape = (len(held), config.K, S, config.H)
        return tuple(jnp.asarray(size * random.standard_normal(shape), dtype) for _ in config.layers)

    return Cache(buffers(), buffers(), jnp.array(held, jnp.int32))


LEVELS = ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"]


@pytest.mark.parametrize("target", TARGETS)
def test_every_optimisation_level_agrees(target: str) -> None:
    config = CONFIGS["gemma3"]
    params = random_params(config)
    lowered = lower("prefill", config, target, S)
    cache = filled(config, (12,))
    tokens = np.arange(9, dtype=np.int32)[None]
    inputs = {
        "input_ids": tokens,
        "num_tokens": np.array([9], np.int32),
        "logit_positions": np.arange(9, dtype=np.int32)[None],
    }
    results = [
        session(lowered, params, graph_optimization_level=getattr(ort.GraphOptimizationLevel, level)).run(
            ["logits"], feed(config, cache, **inputs)
        )[0]
        for level in LEVELS
    ]
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], atol=TOLERANCE)


def test_the_fused_decode_graph_is_lean() -> None:
    """11 nodes a llama layer; no shape arithmetic and no copies inside the layers of either family but gate and up.

    Attention is norm, qkv, GroupQueryAttention, out; the feed-forward layer norm, gate_up, Split, three for the gate's
    SiLU times up, down.
    """
    for name in ("llama", "gemma3"):
        nodes = layer_nodes(lower("decode", CONFIGS[name], "ort", S), "layers.1/")
        kinds = {node.op_type for node in nodes}
        assert not kinds & {"Expand", "Shape", "Concat", "Transpose", "Cast"}, kinds
        if name == "llama":
            assert len(nodes) == 11


SHIFTED = {f"layers.{i}.mlp.{name}": (Form(4, 32, shifted=True),) for i in range(2) for name in ("gate_up", "down")}


@pytest.mark.parametrize(
    ("target", "storage", "products"),
    [
        *((target, {}, {"MatMul": 2}) for target in TARGETS),
        ("ort", SHIFTED, {"MatMulNBits": 2, "MatMul": 2}),  # the second two are of block means and shifts
        ("onnx", SHIFTED, {"Gemm": 2}),
        ("primitive", SHIFTED, {"Gemm": 2}),
    ],
)
def test_gate_and_up_are_one_product_and_one_split(target: str, storage: Storage, products: dict[str, int]) -> None:
    nodes = layer_nodes(lower("decode", LLAMA, target, S, storage=storage), "layers.1/mlp/")
    kinds = collections.Counter(node.op_type for node in nodes)
    assert {kind: kinds[kind] for kind in (*products, "Split")} == {**products, "Split": 1}


def test_the_fused_graphs_compute_chosen_experts_only() -> None:
    """Matrices of experts go into one operator, as they lie, and nowhere else."""
    for program in ("prefill", "decode"):
        graph = lower(program, CONFIGS["mixture"], "ort", S).model.graph
        for name in ("gate_up", "down"):
            uses = graph.initializers[f"layers.1.mlp.experts.{name}"].uses()
            assert [use.node.op_type for use in uses] == ["MoE"]


EXPERTS, WIDTH, HIDDEN = 5, 16, 12


def expert_values(x: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """What every expert makes of every token [E, rows, D], in float64, one expert at a time."""
    gate, up = (gate_up[:, i::2].astype(np.float64) for i in (0, 1))
    values = []
    for e in range(EXPERTS):
        hidden = x @ gate[e].T
        values.append((hidden / (1 + np.exp(-hidden)) * (x @ up[e].T)) @ down[e].T.astype(np.float64))
    return np.stack(values)


@pytest.mark.parametrize("target", ["jax", *TARGETS])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("B", "T"), [(1, 1), (3, 4)])
@pytest.mark.parametrize(("top_k", "normalised"), [(2, True), (2, False), (EXPERTS, True)])
def test_mixtures_weigh_just_as_many_experts_as_they_should(
    target: str, tied: bool, B: int, T: int, top_k: int, normalised: bool
) -> None:
    """Gathered and dense, against one expert at a time; with a router that prefers none, any may be chosen."""
    random = np.random.default_rng(B * T)
    shapes = (B, T, WIDTH), (B, T, EXPERTS), (EXPERTS, 2 * HIDDEN, WIDTH), (EXPERTS, WIDTH, HIDDEN)
    x, router, gate_up, down = inputs = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
    router *= not tied

    def mixture(x: Any, router: Any, gate_up: Any, down: Any) -> Any:
        return experts(
            x, router, gate_up, down, (), top_k=top_k, normalised=normalised, alpha=1.0, beta=0.0, limit=None
        )

    if target == "jax":
        got = np.asarray(mixture(*map(jnp.asarray, inputs)))
    else:
        run = session(converted(mixture, tuple(inputs), 1, target), {})
        got = run.run(None, {f"x{i}": array for i, array in enumerate(inputs)})[0]
    values = expert_values(x.reshape(B * T, WIDTH), gate_up, down)
    probabilities = np.exp(router.reshape(B * T, EXPERTS).astype(np.float64))
    probabilities /= probabilities.sum(-1, keepdims=True)
    for row, total in enumerate(got.reshape(B * T, WIDTH)):
        weights = np.linalg.lstsq(values[:, row].T, total, rcond=None)[0]
        want = np.sort(probabilities[row])[-top_k:]
        want = want / want.sum() if normalised else want
        np.testing.assert_allclose(np.sort(weights), np.pad(want, (EXPERTS - top_k, 0)), atol=1e-5)
        if not tied:
            assert set(np.argsort(weights)[-top_k:]) == set(np.argsort(probabilities[row])[-top_k:])


def test_standard_targets_use_the_default_domain_only() -> None:
    for target in ("onnx", "primitive"):
        for program in ("prefill", "decode"):
            model = lower(program, LLAMA, target, S).model
            assert {node.domain for node in model.graph} == {""}
            assert dict(model.opset_imports) == {"": TARGETS[target].opset}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_one_block_as_printed(name: str, target: str, request: pytest.FixtureRequest) -> None:
    """The second layer of the decode graph. Rewrite the files with ``pytest --golden`` and read the diff."""
    text = "\n".join(map(printed, layer_nodes(lower("decode", CONFIGS[name], target, S), "layers.1/"))) + "\n"
    path = GOLDEN / f"{name}.{target}.txt"
    if request.config.getoption("--golden"):
        path.write_text(text)
    assert text == path.read_text()


def layer_nodes(lowered: Lowered, prefix: str) -> list[ir.Node]:
    return [node for node in lowered.model.graph if (node.name or "").startswith(prefix)]


def printed(node: ir.Node) -> str:
    outputs = ", ".join(f"{out.name}: {out.dtype}{out.shape}" for out in node.outputs if out.name)
    attributes = ", ".join(f"{name}={attr.value}" for name, attr in sorted(node.attributes.items()))
    inputs = ", ".join(value.name if value is not None and value.name else "-" for value in node.inputs)
    inputs = re.sub(r"(constants\.[\w.]+)\.\w+", r"\1", inputs)  # without the digest of the content
    return f"{outputs} = {node.domain + '.' if node.domain else ''}{node.op_type}({inputs}) {{{attributes}}}"


def test_names_and_shared_constants_agree_between_the_programs() -> None:
    both = [lower(program, LLAMA, "ort", S) for program in ("prefill", "decode")]
    weights = [{n for n, v in one.model.graph.initializers.items() if v.const_value is None} for one in both]
    assert weights[0] == weights[1] == {name for name, _ in named_leaves(random_params(LLAMA))} | set(both[0].constants)
    assert all(np.array_equal(both[1].constants[name], value) for name, value in both[0].constants.items())
    assert not both[0].constants, "rope tables are computed, not stored"


ROPES = {
    "plain": Rope(1e6, 64),
    "linear": Rope(1e4, 64, Linear(8.0)),
    "llama3": Rope(5e5, 64, Llama3(8.0, 1.0, 4.0, 1024)),
    "yarn": Rope(1e6, 64, Yarn(4.0, 2048, 1.1386)),
    "longrope": Rope(1e4, 64, LongRope((1.0,) * 32, tuple(np.linspace(1, 60, 32).tolist()), 4096, 1.19)),
    "interleaved": Rope(1e4, 64, interleaved=True),
}
POSITIONS = 8192  # the default context, where an angle that is not rounded as in training is off by 5e-4


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ROPES)
def test_rope_tables_are_those_of_training(kind: str, target: str) -> None:
    """The float64 cosine and sine of angles rounded to float32, at every position; ones turn into both."""
    rope = ROPES[kind]
    inv_freq, magnitude = frequencies(rope, POSITIONS)

    def turn(x: Any, positions: Any) -> Any:
        return rotary(x, positions, jnp.asarray(inv_freq), heads=1, interleaved=rope.interleaved, magnitude=magnitude)

    R, positions = inv_freq.size, np.arange(POSITIONS, dtype=np.int32)[None]
    x = np.zeros((1, POSITIONS, 2 * R), np.float32)
    first, second = (slice(0, None, 2), slice(1, None, 2)) if rope.interleaved else (slice(0, R), slice(R, None))
    x[..., first] = 1
    run = session(converted(turn, (x, positions), 1, target, POSITIONS), {})
    got = run.run(None, {"x0": x, "x1": positions})[0]
    angle = (positions[0].astype(np.float32)[:, None] * inv_freq).astype(np.float64)
    np.testing.assert_allclose(got[0][:, first], magnitude * np.cos(angle), atol=1e-6)
    np.testing.assert_allclose(got[0][:, second], magnitude * np.sin(angle), atol=1e-6)


@pytest.mark.parametrize("target", ["ort", "onnx"])
@pytest.mark.parametrize(("name", "kinds"), [("llama", 1), ("gemma3", 2)])
@pytest.mark.parametrize("program", ["prefill", "decode"])
def test_rope_tables_are_made_when_a_graph_is_opened(
    program: Program, name: str, kinds: int, target: str, tmp_path: Path
) -> None:
    """A pair for each kind of rope, shared by all layers; none of it is left in what ONNX Runtime runs."""
    lowered = lower(program, CONFIGS[name], target, S)
    operators = [node.op_type for node in lowered.model.graph]
    assert operators.count("Cos") == operators.count("Sin") == kinds
    session(lowered, random_params(CONFIGS[name]), optimized_model_filepath=str(tmp_path / "optimised.onnx"))
    assert not {node.op_type for node in ir.load(tmp_path / "optimised.onnx").graph} & {"Cos", "Sin"}


def test_lowering_twice_gives_the_same_bytes() -> None:
    once, twice = (
        ir.serde.serialize_model(lower("prefill", CONFIGS["gemma3"], "onnx", S).model).SerializeToString(
            deterministic=True
        )
        for _ in range(2)
    )
    assert once == twice


def test_an_unknown_target_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown target 'tflite'; known targets: ort, onnx, primitive"):
        lower("prefill", LLAMA, "tflite", S)


# Functions beside the model: name, function, and example inputs. Each runs on every target, against JAX.
F32 = np.random.default_rng(3).standard_normal((2, 3, 4)).astype(np.float32)
INT = np.array([[4, -7, 2], [0, 9, -3]], np.int32)
FUNCTIONS: list[tuple[str, Callable[..., Any], tuple[np.ndarray, ...]]] = [
    ("abs", jnp.abs, (F32,)),
    ("and", lambda x: (x > 1) & (x < 5), (INT,)),
    ("argmax", lambda x: jnp.argmax(x, -1), (F32,)),
    ("bitwise", lambda x: (x & 6) | 1, (INT,)),
    ("broadcast", lambda x: x + jnp.ones((5, 2, 3, 4)) * x[0, 0, 0], (F32,)),
    ("cast", lambda x: x.astype(jnp.int32), (F32,)),
    ("concatenate", lambda x: jnp.concatenate([x, x * 2], 1), (F32,)),
    ("cumsum", lambda x: jnp.cumsum(x, 1), (F32,)),
    ("einsum, transposed", lambda x: jnp.einsum("bij,bkj->bki", x, x), (F32,)),
    ("einsum, two contractions", lambda x: jnp.einsum("bij,bij->b", x, x), (F32,)),
    ("exp log", lambda x: jnp.log(jnp.exp(x)), (F32,)),
    ("gelu", lambda x: jax.nn.gelu(x, approximate=False), (F32,)),
    ("integer power", lambda x: x**3, (F32,)),
    ("iota", lambda x: x + lax.broadcasted_iota(jnp.float32, x.shape, 1), (F32,)),
    ("max min", lambda x: jnp.maximum(x, 0) + jnp.minimum(x, 0.5), (F32,)),
    ("not equal", lambda x: x != 2, (INT,)),
    ("reductions", lambda x: (jnp.max(x, 1), jnp.min(x, 2), jnp.sum(x, (0, 1)), jnp.prod(x, 0)), (F32,)),
    ("remainder", lambda x: lax.rem(x, jnp.int32(4)), (INT,)),
    ("reshape", lambda x: x.reshape(4, 6), (F32,)),
    ("same value twice", lambda x: (x + 1, x + 1), (F32,)),
    ("input as output", lambda x: x, (F32,)),
    ("slice", lambda x: x[:, 1:3, ::2], (F32,)),
    ("split", lambda x: jnp.split(x, [1, 3], 2), (F32,)),
    ("square, sign, floor, ceil", lambda x: lax.square(x) + jnp.sign(x) + jnp.floor(x) + jnp.ceil(x), (F32,)),
    ("stack", lambda x: jnp.stack([x, -x], 1), (F32,)),
    ("take", lambda x, i: jnp.take(x, i, axis=1, mode="clip"), (F32, np.array([[2, 0], [1, 1]], np.int32))),
    ("take by row", jax.vmap(lambda x, i: jnp.take(x, i, axis=0, mode="clip")), (F32, np.array([[2], [0]], np.int32))),
    ("top k", lambda x: lax.top_k(x, 2), (F32,)),
    ("transpose", lambda x: x.transpose(2, 0, 1), (F32,)),
    ("trigonometry", lambda x: jnp.sin(x) * jnp.cos(x) + jnp.tanh(x), (F32,)),
    (
        "write",
        lambda x, i: x.at[i, i].set(7.0, mode="promise_in_bounds", unique_indices=True),
        (F32, np.array([1, 0], np.int32)),
    ),
    ("where", lambda x: jnp.where(x > 0, x, -2.0), (F32,)),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("name", "function", "inputs"), FUNCTIONS, ids=[case[0] for case in FUNCTIONS])
def test_functions(name: str, function: Callable[..., Any], inputs: tuple[np.ndarray, ...], target: str) -> None:
    want = jax.tree.leaves(jax.jit(function)(*inputs))
    run = session(converted(function, inputs, len(want), target), {})
    got = run.run(None, {f"x{i}": x for i, x in enumerate(inputs)})
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def converted(
    function: Callable[..., Any],
    inputs: tuple[np.ndarray, ...],
    outputs: int,
    target: str = "onnx",
    max_context: int = S,
) -> Lowered:
    names = [f"x{i}" for i in range(len(inputs))], [f"y{i}" for i in range(outputs)]
    return convert("f", lambda _, *args: function(*args), [{}, *inputs], *names, TARGETS[target], max_context)


def test_a_primitive_without_a_rule_is_named_with_its_line() -> None:
    with pytest.raises(
        NotImplementedError, match=r"test_lowering\.py:\d+.* 'fft' of \(float32\[2, 3, 4\]\).*primitives"
    ):
        converted(lambda x: jnp.fft.rfft(x).real, (F32,), 1)


def test_a_form_without_a_rule_is_named_with_its_line() -> None:
    with pytest.raises(NotImplementedError, match=r"test_lowering\.py:\d+.*gather"):
        converted(lambda x, i: x[i, :, i], (F32, np.array([0, 1], np.int32)), 1)
