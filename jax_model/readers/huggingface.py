"""Hugging Face folders: ``config.json``, safetensors in one file or several, tokenizer files."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from diptych.jax_model import tokenizers
from diptych.jax_model.families import MULTIMODAL, Foreign, Multimodal
from diptych.jax_model.readers import TensorInfo, plausible_layers, supported
from diptych.jax_model.readers.files import hashes, map_rows, read_json
from diptych.jax_model.readers.packed import unpack
from diptych.jax_model.readers.safetensors_header import CONVERTERS, Stored, elements, read_header
from diptych.jax_model.readers.tensor_parts import Packed

__all__ = ["CONFIG", "INDEX", "HuggingFaceCheckpoint", "text_config", "weight_files", "with_defaults"]

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# Families whose configuration classes come with the models, as code that we do not run: the class of transformers that
# has the same keys, and defaults of their own.
_ELSEWHERE: dict[str, tuple[str, dict[str, Any]]] = {
    "internlm2": (
        "llama",
        {
            "bias": True,
            "intermediate_size": 11008,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000,
            "vocab_size": 103168,
        },
    ),
}
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


class HuggingFaceCheckpoint:
    """An open Hugging Face folder. See :class:`diptych.jax_model.readers.Checkpoint`."""

    format: Literal["huggingface"] = "huggingface"

    def __init__(self, path: Path) -> None:
        self.path = path
        raw = read_json(_present(path, CONFIG))
        if (whole := MULTIMODAL.get(str(raw.get("model_type")))) is not None:
            raw = raw | text_config(raw, path / CONFIG) | {"model_type": whole.family}
        self.family = supported(raw.get("model_type"), str(path / CONFIG))
        self._places = _places(path) if whole is None else _text_places(_places(path), whole, path)
        self.tensors = {name: TensorInfo(stored.shape, stored.dtype) for name, (_, stored) in self._places.items()}
        self._packed = self._unpack(raw.get("quantization_config"))
        plausible_layers(raw.get("num_hidden_layers"), len(self.tensors), str(path / CONFIG))
        self.config = Foreign(with_defaults(self.family, raw, path / CONFIG), str(path / CONFIG))

    def _unpack(self, settings: object) -> dict[str, Packed]:
        """Put packed tensors in the place of their parts. Raises ValueError on what :func:`unpack` does not know."""
        if settings is None:
            return {}
        if not isinstance(settings, dict):
            raise ValueError(f"{self.path / CONFIG}: 'quantization_config' should be an object, found {settings!r}")
        packed = unpack(Foreign(settings, str(self.path / CONFIG)), self.tensors)
        parts = {part for one in packed.values() for part in one.parts}
        self.tensors = {name: info for name, info in self.tensors.items() if name not in parts}
        for name in packed:
            if name in self.tensors:
                raise ValueError(f"{self.path}: tensor {name!r} is stored both packed and as it is")
        self.tensors |= {name: one.info for name, one in packed.items()}
        return packed

    @functools.cached_property
    def tokenizer(self) -> tokenizers.TokenizerFiles:
        return tokenizers.from_folder(self.path)

    def read(self, name: str, rows: slice | None = None) -> NDArray[np.float32]:
        if name in self._packed:
            return self._packed[name].read(self._raw, rows or slice(None))
        file, stored = self._places[name]
        if stored.dtype not in CONVERTERS:
            known = ", ".join(CONVERTERS)
            raise ValueError(f"{file}: tensor {name!r} is stored as {stored.dtype}; weights may be stored as {known}")
        return map_rows(file, stored.offset, stored.shape, stored.nbytes, CONVERTERS[stored.dtype], rows)

    def _raw(self, name: str) -> NDArray[Any]:
        file, stored = self._places[name]
        return elements(file, stored)

    def provenance(self) -> dict[str, Any]:
        shards = {file for file, _ in self._places.values()}
        others = {self.path / name for name in (CONFIG, INDEX, *tokenizers.SOURCES)}
        return {"format": self.format, "files": hashes({*shards, *(file for file in others if file.is_file())})}


def _present(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        raise FileNotFoundError(f"{folder}: no {name}; a Hugging Face folder has one beside its .safetensors files")
    return folder / name


def text_config(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What a model for several kinds of input says of its part for text."""
    config = raw.get("text_config")
    if not isinstance(config, dict):
        raise ValueError(f"{path}: {raw['model_type']!r} should have a 'text_config', found {config!r}")
    return config


def _text_places(places: Mapping[str, tuple[Path, Stored]], whole: Multimodal, path: Path) -> dict[str, Any]:
    """The tensors of the part for text, under the names that they would have by themselves."""
    own = [name for name in places if not any(fnmatch.fnmatchcase(name, pattern) for pattern in whole.ignored)]
    renamed = {name.replace(whole.infix, "", 1): places[name] for name in own}
    if len(renamed) < len(own):
        raise ValueError(f"{path}: some tensors differ in nothing but {whole.infix!r} in their names")
    return renamed


def with_defaults(family: str, raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The configuration with whatever ``config.json`` leaves out filled in by transformers' class for the family."""
    with _quiet_transformers():
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        try:
            known, defaults = _ELSEWHERE.get(family, (family, {}))
            values: dict[str, Any] = CONFIG_MAPPING[known].from_dict({**defaults, **raw}).to_dict()
        except Exception as error:  # its validators raise whatever they like
            reason = " ".join(str(error).split())
            raise ValueError(f"{path}: transformers refuses this configuration: {reason}") from error
    return values


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without its advice to install PyTorch, and without warnings about what we are about to refuse ourselves."""
    variable = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        from transformers.utils import logging as transformers_logging

        verbosity = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity(logging.ERROR)
        try:
            yield
        finally:
            transformers_logging.set_verbosity(verbosity)
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def _places(folder: Path) -> dict[str, tuple[Path, Stored]]:
    """File and place of every tensor. Raises ValueError on a name that two files hold."""
    places: dict[str, tuple[Path, Stored]] = {}
    for file in _shards(folder):
        for name, stored in read_header(file).items():
            if name in places:
                raise ValueError(f"tensor {name!r} is in both {places[name][0].name} and {file.name} of {folder}")
            places[name] = (file, stored)
    if (folder / INDEX).is_file():
        _check_index(folder, places)
    return places


def weight_files(folder: Path) -> list[str]:
    """The names of the files that hold weights, or a pattern, as far as a folder that still lacks them can say."""
    return sorted(set(_weight_map(folder).values())) if (folder / INDEX).is_file() else [SINGLE, "model-*.safetensors"]


def _shards(folder: Path) -> list[Path]:
    """The files that hold weights: those an index names, else the single file, else every one there is."""
    if (folder / INDEX).is_file():
        names = sorted(set(_weight_map(folder).values()))
        for name in names:
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder}: {INDEX} names {name}, which is not there; download it as well")
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: no .safetensors files; {_instead(folder)}")
    _check_numbers(folder, files)
    return files


def _instead(folder: Path) -> str:
    if any(folder.glob("*.gguf")):
        return "it holds a .gguf file: name that file"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        return "weights pickled by PyTorch are not read; save them again with transformers (safe_serialization=True)"
    return "the weights are missing"


def _weight_map(folder: Path) -> dict[str, str]:
    names = read_json(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ValueError(f"{folder / INDEX}: no 'weight_map' that says which file holds which tensor")
    for name in names.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{folder / INDEX}: {name!r} is no file of this folder")
    return names


def _check_index(folder: Path, places: Mapping[str, tuple[Path, Stored]]) -> None:
    for name, file in _weight_map(folder).items():
        if name not in places or places[name][0].name != file:
            raise ValueError(f"{folder / INDEX}: says that {file} holds {name!r}, but it does not")


def _check_numbers(folder: Path, files: list[Path]) -> None:
    """Raise FileNotFoundError when files are numbered "i of n" and one is missing."""
    numbered = [found.groups() for file in files if (found := _NUMBERED.fullmatch(file.name))]
    for stem, _, count in numbered:
        for i in range(1, min(int(count), len(files) + 1) + 1):
            name = f"{stem}-{i:05d}-of-{count}.safetensors"
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder}: {name} is missing; download it as well")
