"""Reading checkpoints: both formats say the same, and whatever is damaged is refused in words."""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

import tiny
from diptych.jax_model import params
from diptych.jax_model.readers import Checkpoint, open_checkpoint
from diptych.jax_model.readers.gguf_header import read_header
from diptych.jax_model.readers.safetensors_header import read_header as read_safetensors_header

FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
SMALL = tiny.llama(heads=(2, 1), head_size=4, width=8, layers=1, ffn=8)


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(SMALL, tmp_path_factory.mktemp("gguf") / "small.gguf")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write_huggingface(SMALL, tmp_path / "model")


def use(checkpoint: Checkpoint) -> None:
    """Everything that an export asks of a checkpoint."""
    for _ in params.stream(checkpoint, params.configure(checkpoint)):
        pass
    assert checkpoint.tokenizer.files and checkpoint.provenance()


# ------------------------------------------------------------------------------------------------- both formats agree


@pytest.mark.parametrize("name", tiny.GGUF_VARIANTS)
def test_a_gguf_file_and_its_folder_are_the_same_model(name: str, tmp_path: Path) -> None:
    from_gguf = open_checkpoint(tiny.write_gguf(tiny.VARIANTS[name], tmp_path / "a.gguf"))
    from_folder = open_checkpoint(tiny.write_huggingface(tiny.VARIANTS[name], tmp_path / "a"))
    config = params.configure(from_gguf)
    assert config == params.configure(from_folder)
    pairs = zip(params.stream(from_gguf, config), params.stream(from_folder, config), strict=True)
    for (path, left, _), (other, right, _) in pairs:
        assert path == other
        np.testing.assert_array_equal(left.view(np.uint32), right.view(np.uint32), err_msg=path)


@pytest.mark.parametrize("variant", ["llama", "gemma3"])
def test_reading_says_what_is_there(variant: str, tmp_path: Path) -> None:
    model = tiny.VARIANTS[variant]
    checkpoint = open_checkpoint(str(tiny.write_huggingface(model, tmp_path / "a")))
    assert (checkpoint.format, checkpoint.family) == ("huggingface", model.config["model_type"])
    assert {name: info.shape for name, info in checkpoint.tensors.items()} == model.shapes
    for name, value in model.tensors().items():
        np.testing.assert_array_equal(checkpoint.read(name), value)
        if value.ndim > 1:
            np.testing.assert_array_equal(checkpoint.read(name, slice(3, 7)), value[3:7])


@pytest.mark.parametrize(("dtype", "code"), [(np.float16, "F16"), (ml_dtypes.bfloat16, "BF16"), (np.float32, "F32")])
def test_every_float_of_a_folder_becomes_float32_exactly(dtype: Any, code: str, tmp_path: Path) -> None:
    folder = tiny.write_huggingface(SMALL, tmp_path)
    stored = {name: value.astype(dtype) for name, value in SMALL.tensors().items()}
    (folder / "model.safetensors").write_bytes(save(stored))
    checkpoint = open_checkpoint(folder)
    for name, value in stored.items():
        assert checkpoint.tensors[name].dtype == code
        np.testing.assert_array_equal(checkpoint.read(name), value.astype(np.float32))


def test_bfloat16_beyond_float16_is_exact(tmp_path: Path) -> None:
    folder = tiny.write_huggingface(SMALL, tmp_path)
    values = np.array([1e38, -3e-39, np.inf, -np.inf, np.nan, -0.0, 65536, 1e-40], ml_dtypes.bfloat16)
    tensors = {**SMALL.tensors(), "model.norm.weight": values}
    (folder / "model.safetensors").write_bytes(save(tensors))
    np.testing.assert_array_equal(open_checkpoint(folder).read("model.norm.weight"), values.astype(np.float32))


def readable() -> list[gguf.GGMLQuantizationType]:
    """Every type that the gguf package can dequantise."""
    found = []
    for kind, (_, nbytes) in gguf.GGML_QUANT_SIZES.items():
        with contextlib.suppress(NotImplementedError):
            gguf.dequantize(np.zeros((1, nbytes), np.uint8), kind)
            found.append(kind)
    return found


def blocks_of(kind: gguf.GGMLQuantizationType, shape: tuple[int, int]) -> np.ndarray:
    """Normal numbers in blocks or, where the gguf package cannot make them, bytes that as float16 are all finite."""
    random = np.random.RandomState(0)
    try:
        return np.asarray(gguf.quantize(random.standard_normal(shape).astype(np.float32), kind))
    except NotImplementedError:
        return random.randint(0, 60, gguf.quant_shape_to_byte_shape(shape, kind)).astype(np.uint8)


def test_all_kinds_of_blocks_are_readable() -> None:
    """Of those that llama.cpp's files hold: only what the gguf package has no numbers for is left out."""
    names = {kind.name for kind in readable()}
    assert names >= {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"}
    assert names >= {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "IQ4_NL", "IQ4_XS"}
    assert names >= {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"}


@pytest.mark.parametrize("kind", readable(), ids=lambda kind: kind.name)
def test_blocks_mean_what_the_gguf_package_says(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    block = gguf.GGML_QUANT_SIZES[kind][0]
    shape = (40, 3 * block)
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    tiny._write_parameters(writer, SMALL.config, gguf.MODEL_ARCH.LLAMA)
    blocks = blocks_of(kind, shape)
    writer.add_tensor("output.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(path)
    assert checkpoint.tensors["output.weight"].dtype == kind.name
    assert checkpoint.tensors["output.weight"].shape == shape
    meant = gguf.dequantize(blocks, kind).reshape(shape)
    assert np.isfinite(meant).all() and meant.any()
    np.testing.assert_array_equal(checkpoint.read("output.weight"), meant)


def test_a_tensor_of_many_chunks_is_read_whole_and_once(tmp_path: Path) -> None:
    folder = tiny.write_huggingface(SMALL, tmp_path)
    big = np.arange(5_000_003, dtype=np.float32)
    wide = big[:5_000_000].reshape(2_500, 2_000)
    save_file({**SMALL.tensors(), "long": big, "wide": wide}, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    np.testing.assert_array_equal(checkpoint.read("long"), big)
    np.testing.assert_array_equal(checkpoint.read("wide", slice(600, None)), wide[600:])
    tracemalloc.start()
    checkpoint.read("wide")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * wide.nbytes


# ----------------------------------------------------------------------------------------------------- GGUF's header


def packages_view(path: Path) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], str, int, int]]]:
    reader = gguf.GGUFReader(path)
    metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    tensors = {
        tensor.name: (
            tuple(int(size) for size in reversed(tensor.shape)),
            tensor.tensor_type.name,
            int(tensor.data_offset),
            int(tensor.n_bytes),
        )
        for tensor in reader.tensors
    }
    return metadata, tensors


@pytest.mark.parametrize("variant", ["llama", "gemma3"])
def test_our_header_reader_and_the_packages_agree(variant: str, tmp_path: Path) -> None:
    path = tiny.write_gguf(tiny.VARIANTS[variant], tmp_path / "a.gguf")
    header, (metadata, tensors) = read_header(path), packages_view(path)
    assert header.tensors.keys() == tensors.keys()
    for name, stored in header.tensors.items():
        assert (stored.shape, stored.type.name, stored.offset, stored.nbytes) == tensors[name]
    assert header.metadata.keys() == metadata.keys()
    for key, value in header.metadata.items():
        if isinstance(value, float):  # ours is the shortest double that names the float32
            assert np.float32(value) == np.float32(metadata[key])
        else:
            assert value == metadata[key], key


def test_float32_settings_are_the_numbers_that_were_meant(small_gguf: Path) -> None:
    assert params.configure(open_checkpoint(small_gguf)).norm_eps == 1e-5


class Gguf:
    """A GGUF file in parts, to put together wrongly."""

    def __init__(self) -> None:
        self.magic, self.version = b"GGUF", 3
        self.pairs = [self.pair("general.architecture", 8, self.string("llama"))]
        self.infos = [self.info("a", [4], 0, 0)]
        self.counts: tuple[int | None, int | None] = (None, None)
        self.data = bytes(16)

    @staticmethod
    def string(text: str | bytes) -> bytes:
        raw = text.encode() if isinstance(text, str) else text
        return struct.pack("<Q", len(raw)) + raw

    def pair(self, key: str | bytes, kind: int, value: bytes) -> bytes:
        return self.string(key) + struct.pack("<I", kind) + value

    def info(self, name: str | bytes, dimensions: list[int], kind: int, offset: int) -> bytes:
        sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        return self.string(name) + sizes + struct.pack("<IQ", kind, offset)

    def write(self, path: Path) -> Path:
        tensors, pairs = (
            len(parts) if count is None else count
            for count, parts in zip(self.counts, (self.infos, self.pairs), strict=True)
        )
        head = self.magic + struct.pack("<IQQ", self.version, tensors, pairs) + b"".join([*self.pairs, *self.infos])
        path.write_bytes(head + bytes(-len(head) % 32) + self.data)
        return path


def changed(**parts: Any) -> Callable[[Gguf], None]:
    return lambda file: vars(file).update(parts)


def add_pair(key: str | bytes, kind: int, value: bytes) -> Callable[[Gguf], None]:
    return lambda file: file.pairs.append(file.pair(key, kind, value))


def add_info(name: str | bytes, dimensions: list[int], kind: int = 0, offset: int = 0) -> Callable[[Gguf], None]:
    return lambda file: file.infos.append(file.info(name, dimensions, kind, offset))


ARRAY, STRING, U32, BOOL = 9, 8, 4, 7
DAMAGE: dict[str, tuple[Callable[[Gguf], None], str]] = {
    "another format": (changed(magic=b"GGML"), "no GGUF file: it begins with b'GGML'"),
    "version 1": (changed(version=1), "version 1; little-endian versions 2 and 3"),
    "version 99": (changed(version=99), "version 99"),
    "big-endian": (changed(version=3 << 24), "big-endian"),
    "more tensors than bytes": (changed(counts=(2**60, None)), "list of tensors .* cut short"),
    "all tensors there can be": (changed(counts=(2**64 - 1, None)), "list of tensors"),
    "one tensor too many": (changed(counts=(2, None)), "damaged|unknown|dimensions"),
    "more metadata than bytes": (changed(counts=(None, 2**63)), "metadata .* cut short"),
    "a string without end": (add_pair("k", STRING, struct.pack("<Q", 2**62)), "ends behind the end of the file"),
    "an array without end": (add_pair("k", ARRAY, struct.pack("<IQ", U32, 2**61)), "cannot fit"),
    "strings without end": (add_pair("k", ARRAY, struct.pack("<IQ", STRING, 2**40)), "cannot fit"),
    "an array of arrays": (add_pair("k", ARRAY, struct.pack("<IQ", ARRAY, 1)), "unknown type 9"),
    "an unknown type": (add_pair("k", 77, b""), "unknown type 77"),
    "a half truth": (add_pair("k", BOOL, b"\x02"), "neither 0 nor 1"),
    "a key twice": (add_pair("general.architecture", STRING, Gguf.string("x")), "'general.architecture' occurs twice"),
    "a key that is no text": (add_pair(b"\xff", BOOL, b"\x01"), "no UTF-8"),
    "an odd alignment": (add_pair("general.alignment", U32, struct.pack("<I", 24)), "power of two, found 24"),
    "no alignment": (add_pair("general.alignment", U32, struct.pack("<I", 0)), "power of two, found 0"),
    "alignment in words": (add_pair("general.alignment", STRING, Gguf.string("32")), "power of two, found '32'"),
    "a tensor twice": (add_info("a", [4]), "tensor 'a' occurs twice"),
    "a name that is no text": (add_info(b"\xff\xfe", [4]), "no UTF-8"),
    "no dimensions": (add_info("b", []), "0 dimensions"),
    "nine dimensions": (add_info("b", [1] * 9), "9 dimensions"),
    "a dimension of 0": (add_info("b", [0]), r"cannot have the shape \(0,\)"),
    "a dimension of 2^42+1": (add_info("b", [2**42 + 1]), "should end at byte .* cut short"),
    "dimensions that overflow": (add_info("b", [2**33, 2**33]), "should end at byte"),
    "half a block": (add_info("b", [33], kind=2), r"Q4_0 cannot have the shape \(33,\): rows are blocks of 32"),
    "an unknown quantisation": (add_info("b", [4], kind=9999), "type 9999"),
    "an offset of 2^63": (add_info("b", [4], offset=2**63), "should end at byte"),
    "an odd offset": (add_info("b", [4], offset=8), "no multiple of the file's alignment"),
    "two tensors in one place": (add_info("b", [2]), "overlap"),
    "data cut short": (changed(data=bytes(15)), "should end at byte .* cut short"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_gguf_is_refused_in_words(name: str, tmp_path: Path) -> None:
    damage, problem = DAMAGE[name]
    file = Gguf()
    read_header(file.write(tmp_path / "good.gguf"))
    damage(file)
    path = file.write(tmp_path / "bad.gguf")
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=problem) as raised:
            open_checkpoint(path)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert str(path) in str(raised.value)
    assert f"{path.stat().st_size} bytes" in str(raised.value)
    assert peak < 2_000_000


@pytest.mark.parametrize("percent", [0, 1, 10, 50, 99])
def test_a_gguf_cut_short_is_refused(percent: int, small_gguf: Path, tmp_path: Path) -> None:
    whole = small_gguf.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: len(whole) * percent // 100])
    with pytest.raises(ValueError, match=r"cut short|empty"):
        open_checkpoint(path)


def test_the_real_file_cut_short_is_refused(smollm2_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    with smollm2_gguf.open("rb") as file:
        path.write_bytes(file.read(smollm2_gguf.stat().st_size // 10))
    with pytest.raises(ValueError, match=r"should end at byte .* cut short"):
        open_checkpoint(path)


@given(data=st.data())
@FUZZ
def test_a_mutated_gguf_loads_or_raises_valueerror(data: st.DataObject, small_gguf: Path, tmp_path: Path) -> None:
    raw = bytearray(small_gguf.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        new = data.draw(st.binary(max_size=9) | st.sampled_from([b"\0" * 8, b"\xff" * 8, b"\x01\0\0\0\0\0\0\x80"]))
        raw[at : at + data.draw(st.integers(0, 9))] = new
    path = tmp_path / "mutated.gguf"
    path.write_bytes(raw)
    with contextlib.suppress(ValueError):
        use(open_checkpoint(path))


VALUES = st.one_of(
    st.integers(0, 2**32 - 1).map(lambda n: (U32, struct.pack("<I", n))),
    st.floats(width=32).map(lambda x: (6, struct.pack("<f", x))),
    st.booleans().map(lambda b: (BOOL, bytes([b]))),
    st.text(max_size=8).map(lambda text: (STRING, Gguf.string(text))),
    st.lists(st.integers(0, 9)).map(lambda ns: (ARRAY, struct.pack(f"<IQ{len(ns)}I", U32, len(ns), *ns))),
    st.lists(st.text(max_size=3)).map(
        lambda ts: (ARRAY, struct.pack("<IQ", STRING, len(ts)) + b"".join(map(Gguf.string, ts)))
    ),
)


@given(data=st.data())
@FUZZ
def test_metadata_of_any_type_load_or_raise_valueerror(data: st.DataObject, small_gguf: Path, tmp_path: Path) -> None:
    """Like the test before, but every file is well formed: it is the meaning that is wrong."""
    header = read_header(small_gguf)
    key = data.draw(st.sampled_from(sorted(header.metadata)))
    kind, value = data.draw(VALUES)
    raw = small_gguf.read_bytes()
    found = Gguf.string(key)
    start = raw.index(found)
    following = [at for other in header.metadata if (at := raw.find(Gguf.string(other))) > start]
    end = min(following, default=raw.index(Gguf.string("token_embd.weight")))
    first = header.tensors["token_embd.weight"]
    data_start = min(stored.offset for stored in header.tensors.values())
    body = raw[:start] + found + struct.pack("<I", kind) + value + raw[end:data_start].rstrip(b"\0")
    assert first.offset >= data_start
    path = tmp_path / "other.gguf"
    path.write_bytes(body + bytes(-len(body) % 32) + raw[data_start:])
    with contextlib.suppress(ValueError):
        use(open_checkpoint(path))


def write_metadata(path: Path, architecture: str, **values: Any) -> Path:
    """A llama's GGUF file with other metadata: None leaves a key out."""
    source = tiny.write_gguf(SMALL, path.with_suffix(".whole"))
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, architecture)
    kept = {key: field for key, field in reader.fields.items() if not key.startswith(("GGUF.", "general.arch"))}
    for key, field in kept.items():
        if key not in values:
            writer.add_key_value(
                key, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
            )
    for key, value in values.items():
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


REFUSED_METADATA: dict[str, tuple[dict[str, Any], str]] = {
    "experts without a number to choose": ({"llama.expert_count": 8}, "no 'expert_used_count'"),
    "a key nobody knows": ({"llama.logit_scale": 0.5}, "llama.logit_scale"),
    "no layers": ({"llama.block_count": None}, "no 'block_count'"),
    "too many layers": ({"llama.block_count": 2_000_000_000}, "claims 2000000000 layers"),
    "no heads": ({"llama.attention.head_count": 0}, "'attention.head_count' should be positive"),
    "heads per layer": ({"llama.attention.head_count": [2, 2]}, "'attention.head_count' should be of type int"),
    "heads that cannot be shared": ({"llama.attention.head_count_kv": 3}, "2 query heads cannot be shared out among 3"),
    "partial rope": ({"llama.rope.dimension_count": 2}, "'rope.dimension_count' is 2"),
    "values of another width": ({"llama.attention.value_length": 2}, "'attention.value_length' is 2"),
    "half of yarn": (
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0},
        r"no 'rope\.scaling\.original_context_length'",
    ),
    "a made-up scaling": (
        {"llama.rope.scaling.type": "new", "llama.rope.scaling.factor": 4.0},
        "'new' is not supported",
    ),
    "a factor missing": ({"llama.rope.scaling.type": "linear"}, "no 'rope.scaling.factor'"),
    "a part of a model": ({"split.count": 3}, "one of 3 parts"),
}


@pytest.mark.parametrize("name", REFUSED_METADATA)
def test_metadata_that_mean_something_else_are_refused(name: str, tmp_path: Path) -> None:
    values, problem = REFUSED_METADATA[name]
    path = write_metadata(tmp_path / "a.gguf", "llama", **values)
    with pytest.raises(ValueError, match=problem) as raised:
        use(open_checkpoint(path))
    assert str(path) in str(raised.value)


def test_missing_optional_metadata_mean_what_llama_cpp_takes_them_for(tmp_path: Path) -> None:
    absent = dict.fromkeys(("llama.rope.freq_base", "llama.rope.dimension_count", "llama.vocab_size"))
    whole = params.configure(open_checkpoint(tiny.write_gguf(SMALL, tmp_path / "whole.gguf")))
    bare = params.configure(open_checkpoint(write_metadata(tmp_path / "bare.gguf", "llama", **absent)))
    assert bare == whole
    assert {layer.rope and layer.rope.base for layer in bare.layers} == {10_000.0}


def test_head_count_kv_is_the_head_count_where_it_is_absent(tmp_path: Path) -> None:
    path = write_metadata(tmp_path / "a.gguf", "llama", **{"llama.attention.head_count_kv": None})
    config = params.configure(open_checkpoint(path))
    assert config.K == config.N == SMALL.config["num_attention_heads"]


def test_gemma_without_pattern_and_local_base_has_every_sixth_layer_global(tmp_path: Path) -> None:
    config = params.configure(open_checkpoint(tiny.write_gguf(tiny.gemma3(layers=13), tmp_path / "a.gguf")))
    assert [i for i, layer in enumerate(config.layers) if layer.window is None] == [5, 11]
    assert {layer.rope and layer.rope.base for layer in config.layers if layer.window} == {10_000.0}


@pytest.mark.parametrize("architecture", ["llama4", "clip", "mamba", "bert"])
def test_an_unsupported_architecture_is_refused_by_name(architecture: str, tmp_path: Path) -> None:
    path = write_metadata(tmp_path / "a.gguf", architecture)
    with pytest.raises(ValueError, match=f"architecture '{architecture}' is not supported.*gemma3, .*llama"):
        open_checkpoint(path)
    folder = tiny.write_huggingface(SMALL, tmp_path / "folder")
    config = {**SMALL.config, "model_type": architecture}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"architecture '{architecture}' is not supported.*gemma3_text, .*llama"):
        open_checkpoint(folder)


# --------------------------------------------------------------------------------------------- Hugging Face folders


def shard(folder: Path, *, index: bool) -> list[Path]:
    """Replace the single file by three shards."""
    tensors = list(SMALL.tensors().items())
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    files = []
    for i in range(3):
        file = folder / f"model-{i + 1:05d}-of-00003.safetensors"
        part = dict(tensors[i::3])
        save_file(part, file)
        files.append(file)
        weight_map |= dict.fromkeys(part, file.name)
    if index:
        text = json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)
    return files


@pytest.mark.parametrize("index", [True, False])
def test_shards_are_one_checkpoint(index: bool, folder: Path) -> None:
    shard(folder, index=index)
    checkpoint = open_checkpoint(folder)
    for name, value in SMALL.tensors().items():
        np.testing.assert_array_equal(checkpoint.read(name), value)
    names = checkpoint.provenance()["files"]
    assert {f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)} < names.keys()


@pytest.mark.parametrize("index", [True, False])
def test_a_missing_shard_is_named(index: bool, folder: Path) -> None:
    shard(folder, index=index)[1].unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00003\.safetensors"):
        open_checkpoint(folder)


def test_a_single_file_goes_before_others(folder: Path) -> None:
    save_file({"somewhere.else": np.zeros(2, np.float32)}, folder / "consolidated.safetensors")
    assert open_checkpoint(folder).tensors.keys() == SMALL.shapes.keys()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
BAD_SHARDS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a pointer": (lambda raw: POINTER, "Git LFS pointer.*git lfs pull"),
    "half": (lambda raw: raw[: len(raw) // 2], "cut short"),
    "all but a byte": (lambda raw: raw[:-1], "cut short"),
    "in its header": (lambda raw: raw[:100], "header should be .* cut short"),
    "three bytes": (lambda raw: raw[:3], "cut short"),
    "nothing": (lambda raw: b"", "the file is empty"),
    "a huge header": (lambda raw: struct.pack("<Q", 2**60) + raw[8:], "header should be 1152921504606846976 bytes"),
    "a web page": (lambda raw: b"<!DOCTYPE html><html>sign in</html>", "web page"),
    "a byte too many": (lambda raw: raw + b"\0", "longer than its header says"),
    "no JSON": (lambda raw: raw[:8] + b"x" * 40 + raw[48:], "no JSON"),
}


@pytest.mark.parametrize("name", BAD_SHARDS)
def test_a_damaged_shard_is_refused_in_words(name: str, folder: Path) -> None:
    damage, problem = BAD_SHARDS[name]
    file = shard(folder, index=True)[2]
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=problem) as raised:
        open_checkpoint(folder)
    assert str(file) in str(raised.value)
    assert f"{file.stat().st_size} bytes" in str(raised.value)


def test_a_header_larger_than_any_real_one_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 2**32))
        file.truncate(2**32 + 100)
    tracemalloc.start()
    with pytest.raises(ValueError, match="more than any real one"):
        read_safetensors_header(path)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


BAD_HEADERS: dict[str, tuple[Any, str]] = {
    "no object": ([1, 2], "no JSON object"),
    "no description": ({"a": 1}, "'a' is described by 1"),
    "no dtype": ({"a": {"shape": [1], "data_offsets": [0, 4]}}, "'a' is described"),
    "an unknown dtype": ({"a": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}, "'a' is described"),
    "a negative size": ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "'a' is described"),
    "a size in words": ({"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}, "'a' is described"),
    "one offset": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, "'a' is described"),
    "too few bytes": ({"a": {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 4]}}, "cannot take 4 bytes"),
    "a gap": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "overlap or leave a gap"),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_a_wrong_safetensors_header_is_refused(name: str, tmp_path: Path) -> None:
    header, problem = BAD_HEADERS[name]
    text = json.dumps(header).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(ValueError, match=problem):
        read_safetensors_header(path)


def test_a_tensor_twice_in_a_header_is_refused(tmp_path: Path) -> None:
    entry = '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    text = f'{{"a": {entry}, "a": {entry}}}'.encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    with pytest.raises(ValueError, match="'a' occurs twice"):
        read_safetensors_header(path)


def test_a_deeply_nested_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", 200_000) + b"[" * 200_000)
    with pytest.raises(ValueError, match="no JSON"):
        read_safetensors_header(path)


@given(data=st.data())
@FUZZ
def test_a_mutated_shard_loads_or_raises_valueerror(data: st.DataObject, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if not folder.exists():
        tiny.write_huggingface(SMALL, folder)
    raw = bytearray(save(SMALL.tensors()))
    header = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, header))
        raw[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    (folder / "model.safetensors").write_bytes(raw)
    with contextlib.suppress(ValueError):
        checkpoint = open_checkpoint(folder)
        for name in checkpoint.tensors:
            checkpoint.read(name)


def put_config(**values: Any) -> Callable[[Path], Any]:
    return lambda folder: (folder / "config.json").write_text(json.dumps({**SMALL.config, **values}))


def put_index(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text)


def rename(old: str, new: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / old).rename(folder / new)


BAD_FOLDERS: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "no configuration": (lambda f: (f / "config.json").unlink(), FileNotFoundError, "no config.json"),
    "an empty configuration": (lambda f: (f / "config.json").write_text(""), ValueError, "empty"),
    "half a configuration": (lambda f: (f / "config.json").write_text('{"a": '), ValueError, "no JSON"),
    "a list of configurations": (lambda f: (f / "config.json").write_text("[]"), ValueError, "no JSON object"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), FileNotFoundError, "weights are missing"),
    "pickles": (rename("model.safetensors", "pytorch_model.bin"), FileNotFoundError, "pickled by PyTorch"),
    "a GGUF file inside": (rename("model.safetensors", "model.gguf"), FileNotFoundError, "name that file"),
    "no family": (put_config(model_type=None), ValueError, "architecture None is not supported"),
    "a family that is no word": (put_config(model_type=["llama"]), ValueError, "not supported"),
    "a size in words": (put_config(hidden_size="many"), ValueError, "transformers refuses.*hidden_size"),
    "no heads": (put_config(num_attention_heads=0), ValueError, "num_attention_heads|transformers refuses"),
    "a flood of layers": (put_config(num_hidden_layers=10**9), ValueError, "claims 1000000000 layers"),
    "biases": (put_config(attention_bias=True), ValueError, r"missing tensors: .*q_proj\.bias"),
    "another activation": (put_config(hidden_act="relu"), ValueError, "'hidden_act' is 'relu'"),
    "a misspelt setting": (
        put_config(rope_scaling={"rope_type": "yarn", "factor": 2.0, "beta_fats": 16.0}),
        ValueError,
        "'yarn' needs .*beta_fats",
    ),
    "a made-up scaling": (put_config(rope_scaling={"rope_type": "new", "factor": 2.0}), ValueError, "'new' is not"),
    "quantised weights": (put_config(quantization_config={"bits": 4}), ValueError, "quantised already"),
    "an index without a map": (put_index("{}"), ValueError, "no 'weight_map'"),
    "an index that leaves the folder": (put_index('{"weight_map": {"a": "../b"}}'), ValueError, "no file of this"),
    "an index of numbers": (put_index('{"weight_map": {"a": 1}}'), ValueError, "no file of this"),
    "an index that is wrong": (put_index('{"weight_map": {"a": "model.safetensors"}}'), ValueError, "but it does not"),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_a_wrong_folder_is_refused_in_words(name: str, folder: Path) -> None:
    damage, kind, problem = BAD_FOLDERS[name]
    use(open_checkpoint(folder))
    damage(folder)
    with pytest.raises(kind, match=problem) as raised:
        use(open_checkpoint(folder))
    assert str(folder) in str(raised.value)


def test_integers_are_no_weights(folder: Path) -> None:
    tensors = {**SMALL.tensors(), "model.norm.weight": np.ones(8, np.int32)}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' is stored as I32; weights may be stored as F32, F16"):
        use(open_checkpoint(folder))


def test_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    first, *_ = shard(folder, index=False)
    save_file(SMALL.tensors(), folder / "more.safetensors")
    with pytest.raises(ValueError, match=f"in both .*{first.name} and more.safetensors|in both"):
        open_checkpoint(folder)


def test_omitted_settings_are_the_familys_defaults(tmp_path: Path) -> None:
    model = tiny.gemma3()
    folder = tiny.write_huggingface(model, tmp_path)
    whole = params.configure(open_checkpoint(folder))
    omitted = {"layer_types", "rope_theta", "rope_local_base_freq", "hidden_activation", "rms_norm_eps"}
    brief = {key: value for key, value in model.config.items() if key not in omitted}
    (folder / "config.json").write_text(json.dumps(brief))
    assert params.configure(open_checkpoint(folder)) == whole


def test_links_to_the_folder_and_to_files_are_followed(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "snapshots"
    cache.mkdir()
    for file in folder.iterdir():
        (cache / file.name).symlink_to(file)
    (tmp_path / "link").symlink_to(cache)
    use(open_checkpoint(tmp_path / "link"))


# ---------------------------------------------------------------------------------------------------------- anything


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.gguf: no such file or folder"):
        open_checkpoint(tmp_path / "nowhere.gguf")
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        open_checkpoint(tmp_path)


def test_a_safetensors_file_asks_for_its_folder(folder: Path) -> None:
    with pytest.raises(ValueError, match="name the folder"):
        open_checkpoint(folder / "model.safetensors")


def test_provenance_names_files_with_size_and_hash(small_gguf: Path) -> None:
    entry = open_checkpoint(small_gguf).provenance()["files"]["small.gguf"]
    assert entry["bytes"] == small_gguf.stat().st_size
    assert entry["sha256"] == hashlib.sha256(small_gguf.read_bytes()).hexdigest()
