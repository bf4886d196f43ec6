"""LoRA (Hu et al. 2021, arXiv:2106.09685): low-rank changes of matrices, merged while a checkpoint is read.

An adapter is a folder as PEFT writes it: ``adapter_config.json`` and ``adapter_model.safetensors``, which holds for
each changed module a matrix A [r, in] and a matrix B [out, r].  The module's weight [out, in] gains

    weight · scale · B A        scale = alpha / r, or alpha / √r for rank-stabilised LoRA (arXiv:2312.03732)

Only what is understood is merged: whatever else an adapter contains or asks for is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.jax_model.config import Config
from diptych.jax_model.families import FAMILIES, Foreign
from diptych.jax_model.families.table import Format, Source, expand, shape_of
from diptych.jax_model.params import arrange, configure, filling_of
from diptych.jax_model.readers import Checkpoint, TensorInfo
from diptych.jax_model.readers.files import hashes, map_rows, read_json
from diptych.jax_model.readers.safetensors_header import CONVERTERS, Stored, read_header
from diptych.jax_model.tokenizers import TokenizerFiles

__all__ = ["Adapted"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
# Keys that are read below, and those that mattered to training only.
_READ = ("peft_type", "r", "lora_alpha", "alpha_pattern", "rank_pattern", "use_rslora", "fan_in_fan_out", "bias")
_TRAINING = (
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("target_modules", "exclude_modules", "lora_dropout", "layers_to_transform", "layers_pattern", "runtime_config"),
    *("init_lora_weights", "eva_config", "megatron_core", "qalora_group_size"),
)
_INITIALISED = (True, False, "gaussian", "eva", "orthogonal")  # others change the weights of the model itself


class Adapted:
    """A checkpoint with adapters merged into what :meth:`read` returns. Otherwise it is the checkpoint itself.

    Raises FileNotFoundError when an adapter's file is missing, and ValueError when an adapter is not plain LoRA, is
    incomplete or does not fit.
    """

    def __init__(self, checkpoint: Checkpoint, adapters: Iterable[tuple[str | Path, float]]) -> None:
        self._checkpoint = checkpoint
        self._adapters = [_Adapter(Path(path), weight) for path, weight in adapters]
        self._changes: dict[str, list[tuple[_Adapter, str, _Target]]] = {}
        targets = _targets(checkpoint)
        for adapter in self._adapters:
            for module in adapter.modules:
                target = adapter.check(module, targets, checkpoint)
                self._changes.setdefault(target.name, []).append((adapter, module, target))

    @property
    def path(self) -> Path:
        return self._checkpoint.path

    @property
    def format(self) -> Format:
        return self._checkpoint.format

    @property
    def family(self) -> str:
        return self._checkpoint.family

    @property
    def config(self) -> Foreign | Config:
        return self._checkpoint.config

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._checkpoint.tensors

    @property
    def tokenizer(self) -> TokenizerFiles:
        return self._checkpoint.tokenizer

    def read(self, name: str, rows: slice | None = None) -> NDArray[np.float32]:
        value = self._checkpoint.read(name, rows)
        for adapter, module, target in self._changes.get(name, ()):
            value += target.arrange(adapter.change(module))[rows or slice(None)]
        return value

    def provenance(self) -> dict[str, Any]:
        return {**self._checkpoint.provenance(), "adapters": [adapter.provenance() for adapter in self._adapters]}


@dataclass(frozen=True)
class _Target:
    """A tensor of the checkpoint, and how it is rearranged from the one of Hugging Face's name."""

    name: str
    shape: tuple[int, ...]  # Hugging Face's
    layouts: tuple[str, ...] = ()  # applied one after the other
    sizes: Mapping[str, int] | None = None

    def arrange(self, change: NDArray[np.float32]) -> NDArray[np.float32]:
        for layout in self.layouts:
            change = arrange(change, layout, self.sizes or {})
        return change


def _targets(checkpoint: Checkpoint) -> dict[str, _Target]:
    """What adapters may change, by Hugging Face's names: every tensor that fills a parameter."""
    config = configure(checkpoint)
    if isinstance(checkpoint.config, Config):
        raise ValueError(
            f"{checkpoint.path}: adapters name the tensors of Hugging Face's layout, which this one no longer has; "
            "name the model that it was made from"
        )
    targets = {}
    for parameter in expand(FAMILIES[config.family].table, config):
        known, stored = parameter.huggingface, filling_of(parameter, checkpoint, config)
        if stored is None or len(stored.sources) != len(known.sources):
            continue  # GGUF stacks experts
        for one, own in zip(known.sources, stored.sources, strict=True):
            if own.name not in checkpoint.tensors:
                continue
            if checkpoint.format == "gguf" and one.layout and own.layout and one.part is None:
                sizes = config.sizes(parameter.layer)
                shape = shape_of(one.layout.split("->")[0], sizes)
                targets[one.name] = _Target(own.name, shape, (one.layout, _backwards(own)), sizes)
            elif checkpoint.format != "gguf":
                targets[one.name] = _Target(own.name, checkpoint.tensors[own.name].shape)
    return targets


def _backwards(source: Source) -> str:
    stored, ours = source.layout.split("->")
    return f"{ours.strip()} -> {stored.strip()}"


class _Adapter:
    """One folder, checked: ``modules`` are what it changes."""

    def __init__(self, path: Path, weight: float) -> None:
        if not math.isfinite(weight):
            raise ValueError(f"{path}: an adapter's weight is a finite number, not {weight}")
        self.path, self.weight = path, weight
        for name in (CONFIG, WEIGHTS):
            if not (path / name).is_file():
                raise FileNotFoundError(f"{path}: no {name}; a LoRA adapter is a folder as PEFT saves it")
        self._config = _read_config(path / CONFIG)
        self._tensors = read_header(path / WEIGHTS)
        self.modules = self._pairs()

    def check(self, module: str, targets: Mapping[str, _Target], checkpoint: Checkpoint) -> _Target:
        """What the module's matrices change. Raises ValueError unless it is there and they fit it."""
        name = f"{module}.weight"
        if name not in targets:
            raise ValueError(f"{self.path}: changes {name!r}, which is no weight of its own in {checkpoint.path}")
        a, b = self._pair(module)
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
            raise ValueError(f"{self.path}: {module}: A {a.shape} and B {b.shape} should be [r, in] and [out, r]")
        rank = self._of("rank_pattern", "r", module)
        if a.shape[0] != rank:
            raise ValueError(f"{self.path}: {module}: {CONFIG} gives rank {rank}, the matrices have {a.shape[0]}")
        self._scale(module)  # says what is wrong with it before anything is read
        changed = (b.shape[0], a.shape[1])
        changed = changed[::-1] if self._config.get("fan_in_fan_out", False) else changed
        if changed != targets[name].shape:
            raise ValueError(f"{self.path}: changes {name!r} in shape {changed}, but it has {targets[name].shape}")
        return targets[name]

    def change(self, module: str) -> NDArray[np.float32]:
        """What is added to the module's weight, in Hugging Face's layout."""
        a, b = (self._read(stored) for stored in self._pair(module))
        change: NDArray[np.float32] = np.float32(self.weight * self._scale(module)) * (b @ a)
        return change.T if self._config.get("fan_in_fan_out", False) else change

    def provenance(self) -> dict[str, Any]:
        files = hashes([self.path / CONFIG, self.path / WEIGHTS])
        return {"name": self.path.resolve().name, "weight": self.weight, "files": files}

    def _pairs(self) -> tuple[str, ...]:
        """The modules, each of which has both matrices. Raises ValueError that names any other tensor."""
        found: dict[str, set[str]] = {}
        for name in self._tensors:
            match = _TENSOR.fullmatch(name)
            if match is None:
                raise ValueError(
                    f"{self.path}: tensor {name!r} is no matrix A or B of plain LoRA, and only those are merged"
                )
            found.setdefault(match[1], set()).add(match[2])
        for module, sides in found.items():
            if sides != {"A", "B"}:
                raise ValueError(f"{self.path}: {module} has a matrix {''.join(sides)} without the other one")
        if not found:
            raise ValueError(f"{self.path}: {WEIGHTS} holds no tensors")
        return tuple(found)

    def _pair(self, module: str) -> tuple[Stored, Stored]:
        prefix = f"base_model.model.{module}.lora_"
        return self._tensors[f"{prefix}A.weight"], self._tensors[f"{prefix}B.weight"]

    def _read(self, stored: Stored) -> NDArray[np.float32]:
        if stored.dtype not in CONVERTERS:
            raise ValueError(f"{self.path / WEIGHTS}: stored as {stored.dtype}; expected {', '.join(CONVERTERS)}")
        convert = CONVERTERS[stored.dtype]
        return map_rows(self.path / WEIGHTS, stored.offset, stored.shape, stored.nbytes, convert, None)

    def _scale(self, module: str) -> float:
        alpha, rank = self._of("alpha_pattern", "lora_alpha", module), self._of("rank_pattern", "r", module)
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora", False) else rank)

    def _of(self, pattern: str, default: str, module: str) -> float:
        """A number for the module: of the first pattern, a regular expression, that the end of its name matches."""
        for key, value in (self._config.find(pattern, dict) or {}).items():
            try:
                matches = re.match(rf"(.*\.)?({key})$", module)
            except re.error as error:
                raise ValueError(f"{self.path / CONFIG}: {pattern!r} has {key!r}, no pattern: {error}") from None
            if matches:
                return float(Foreign({key: value}, f"{self.path / CONFIG}: {pattern}").need(key, float))
        return float(self._config.need(default, float))


def _read_config(path: Path) -> Foreign:
    """Raises ValueError for what is no plain LoRA, by its key."""
    raw = read_json(path)
    config = Foreign(raw, str(path))
    if (kind := config.need("peft_type", str)) != "LORA":
        raise ValueError(f"{path}: this is an adapter of type {kind!r}; only LORA is merged")
    for key in ("r", "lora_alpha"):  # PEFT's own defaults would be a guess about how it was trained
        if config.need(key, float) <= 0:
            raise ValueError(f"{path}: {key!r} should be positive, found {raw[key]}")
    config.expect("bias", "none")
    if raw.get("init_lora_weights") not in (None, *_INITIALISED):
        kind = raw["init_lora_weights"]
        raise ValueError(
            f"{path}: 'init_lora_weights' is {kind!r}, which changes the model's weights; save it as plain LoRA first"
        )
    for key, value in raw.items():
        if value and key not in (*_READ, *_TRAINING):
            raise ValueError(f"{path}: {key!r} is {value!r}: not supported, only plain LoRA is merged")
    return config
