"""A GGUF model in several parts, as llama.cpp writes and names them, is read as the one file that they are."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import tiny
from diptych.jax_model.params import configure, stream
from diptych.jax_model.readers import open_checkpoint

MODEL = tiny.VARIANTS["llama-8-8"]
COUNT = 3


def write(source: Path, target: Path, changed: dict[str, Any] | None = None, **options: Any) -> list[Path]:
    """A copy of a GGUF file with other metadata, or in parts: the gguf package names them. Returns the files."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture, **options)
    values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith(("GGUF.", "split."))}
    kinds = {key: field.types for key, field in reader.fields.items()}
    for key, value in (values | (changed or {})).items():
        if key == "general.architecture" or value is None:
            continue
        kind, *inner = kinds.get(key, [gguf.GGUFValueType.get_type(value)])
        writer.add_key_value(key, value, kind, sub_type=inner[-1] if inner else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(target.parent.glob(f"{target.stem}*.gguf"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(MODEL, tmp_path_factory.mktemp("whole") / "tiny.gguf")


@pytest.fixture
def parts(whole: Path, tmp_path: Path) -> list[Path]:
    size = -(-len(gguf.GGUFReader(whole).tensors) // COUNT)
    files = write(whole, tmp_path / "tiny.gguf", split_max_tensors=size)
    assert [file.name for file in files] == [f"tiny-0000{i + 1}-of-0000{COUNT}.gguf" for i in range(COUNT)]
    return files


@pytest.mark.parametrize("named", range(COUNT))
def test_any_part_opens_the_whole(named: int, parts: list[Path], whole: Path) -> None:
    one, other = open_checkpoint(parts[named]), open_checkpoint(whole)
    config = configure(one)
    assert config == configure(other)
    for (path, left, _), (same, right, _) in zip(stream(one, config), stream(other, config), strict=True):
        assert path == same
        np.testing.assert_array_equal(left, right, err_msg=path)
    assert one.tokenizer.files == other.tokenizer.files
    assert one.provenance()["files"].keys() == {file.name for file in parts}


def test_the_first_part_may_hold_metadata_only(whole: Path, tmp_path: Path) -> None:
    first, *_ = write(whole, tmp_path / "tiny.gguf", split_max_tensors=20, small_first_shard=True)
    assert not gguf.GGUFReader(first).tensors
    assert open_checkpoint(first).tensors == open_checkpoint(whole).tensors


def test_a_model_in_one_part_is_one_file(whole: Path, tmp_path: Path) -> None:
    (file,) = write(whole, tmp_path / "tiny.gguf", {"split.count": 1, "split.no": 0})
    assert open_checkpoint(file).tensors == open_checkpoint(whole).tensors


# What is done to three parts, which of them is then opened, and what is said.
DAMAGE: dict[str, tuple[Callable[[list[Path]], object], int, type[Exception], str]] = {
    "a part is missing": (lambda parts: parts[1].unlink(), 0, FileNotFoundError, "tiny-00002-of-00003.gguf is missing"),
    "the first is missing": (lambda parts: parts[0].unlink(), 2, FileNotFoundError, "tiny-00001-of-00003.gguf is miss"),
    "a part twice": (
        lambda parts: shutil.copy(parts[1], parts[2]), 0, ValueError, "should be part 3 of 3, but says it is 2 of 3"
    ),
    "another name": (
        lambda parts: parts[0].rename(parts[0].with_name("m.gguf")), 0, ValueError, "one of 3 parts of a model"
    ),
    "a part of another model": (
        lambda parts: shutil.copy(parts[0].with_name("other.gguf"), parts[2]), 0, ValueError, "it is 0 of 1"
    ),
    "cut short": (
        lambda parts: parts[2].write_bytes(parts[2].read_bytes()[:-64]), 0, ValueError, "00003-of-00003.*cut short"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_parts_that_do_not_fit_are_refused(case: str, parts: list[Path], whole: Path) -> None:
    shutil.copy(whole, parts[0].with_name("other.gguf"))
    damage, opened, error, problem = DAMAGE[case]
    damage(parts)
    path = parts[opened] if parts[opened].exists() else parts[opened].with_name("m.gguf")
    with pytest.raises(error, match=problem):
        open_checkpoint(path)


def test_tensors_that_no_part_holds_are_missed(parts: list[Path]) -> None:
    data = parts[0].read_bytes()
    key = b"split.tensors.count"
    at = data.index(key) + len(key) + 4
    promised = int.from_bytes(data[at : at + 4], "little") + 1
    parts[0].write_bytes(data[:at] + promised.to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(ValueError, match=f"should hold {promised} tensors, found {promised - 1}"):
        open_checkpoint(parts[1])


def test_a_count_that_is_no_number_is_refused(whole: Path, tmp_path: Path) -> None:
    (file,) = write(whole, tmp_path / "tiny.gguf", {"split.count": "three"})
    with pytest.raises(ValueError, match=r"'split\.count' should be a number, found 'three'"):
        open_checkpoint(file)
