"""A checkpoint in, an artifact out: trace, stream the weights, write the graphs, prove the result, give it its name."""

from __future__ import annotations

import errno
import math
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from diptych.export import weights
from diptych.export.artifact import WEIGHTS, assemble, describe_file, manifest, write_manifest, write_text
from diptych.export.certificate import SKIPPED, Certificate, ParityError, Progress, quiet
from diptych.export.lowering import TARGETS, Lowered, Program, lower
from diptych.jax_model import params as parameters
from diptych.jax_model.config import Config
from diptych.jax_model.readers import Checkpoint, open_checkpoint

__all__ = ["ExportReport", "export"]

PROGRAMS: tuple[Program, ...] = ("prefill", "decode")
DTYPES = {"fp32": "float32"}
# What other tools offer under this option, and why it is not here.
REFUSED_DTYPES = {
    "bf16": "ONNX Runtime has no bfloat16 matrix product on the CPU",
    "fp16": "float16 graphs are slower than float32 ones on the CPU, and activations overflow",
}
SHORTEST, LONGEST = 16, 8192  # of max_context: the least that parity can fill, and the default for long models
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_QUANTISATION = re.compile(r"[.-](i?q\d\w*|bf16|f16|f32)$")  # what file names add to a model's name


@dataclass(frozen=True)
class ExportReport:
    """What an export made: where, in how many seconds a stage, of how many bytes a file, and what parity found."""

    path: Path
    name: str
    target: str
    dtype: str
    max_context: int
    model: Mapping[str, Any]  # the configuration in a few figures
    seconds: Mapping[str, float]
    bytes: Mapping[str, int]
    warnings: tuple[str, ...]
    certificate: Certificate | None  # None: verification was skipped

    @property
    def verification(self) -> Mapping[str, Any]:
        """The certificate as the manifest holds it."""
        return SKIPPED if self.certificate is None else self.certificate.to_json()

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "name": self.name,
            "target": self.target,
            "dtype": self.dtype,
            "max_context": self.max_context,
            "model": dict(self.model),
            "seconds": dict(self.seconds),
            "bytes": dict(self.bytes),
            "warnings": list(self.warnings),
            "verification": dict(self.verification),
        }


def export(
    source: str | Path,
    output: str | Path,
    *,
    target: str = "ort",
    dtype: str = "fp32",
    max_context: int | None = None,
    adapters: Sequence[tuple[str | Path, float]] = (),
    verify: bool = True,
    force: bool = False,
    name: str | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Export a ``.gguf`` file, a Hugging Face folder or an Orbax checkpoint to the artifact folder ``output``.

    ``max_context`` is the longest sequence that the artifact serves: by default the model's own, at most 8192.
    ``adapters`` are LoRA folders and their weights, merged into the model's matrices.
    ``force`` replaces an artifact that is there, and keeps one that failed its verification, marked as failed.
    ``name`` is what the manifest calls it, by default the source's name.

    Whatever is raised, nothing is left behind: FileExistsError and other OSErrors about ``output``, FileNotFoundError
    and ValueError about ``source`` and the options, NotImplementedError for an operation that ``target`` cannot
    express, ParityError when the verification failed.
    """
    _check_options(target, dtype)
    stages = _Stages(progress or quiet)
    with assemble(output, force=force) as folder:
        job = _Job.open(source, adapters, target, dtype, max_context, name)
        content, warnings = _write(folder, job, stages)
        certificate = None
        if verify:
            with stages("verify"):
                certificate = _certify(folder, source, adapters, output, force, stages.progress)
            content |= {"verification": certificate.to_json()}
            write_manifest(folder, content)
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    return ExportReport(
        Path(output),
        job.name,
        target,
        DTYPES[dtype],
        job.max_context,
        _figures(job.config),
        stages.seconds,
        sizes,
        tuple(warnings),
        certificate,
    )


def slug(path: Path) -> str:
    """A model's name out of a file's: ``SmolLM2-135M-Instruct.Q4_1.gguf`` is ``smollm2-135m-instruct``."""
    name = _QUANTISATION.sub("", _PART.sub("", path.resolve().name.lower().removesuffix(".gguf")))
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "model"


class _Stages:
    """Times the stages of an export: ``with stages("weights"): …``"""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 3)


@dataclass(frozen=True)
class _Job:
    """What is to be exported, checked."""

    checkpoint: Checkpoint
    config: Config
    target: str
    dtype: str
    max_context: int
    name: str

    @classmethod
    def open(
        cls,
        source: str | Path,
        adapters: Sequence[tuple[str | Path, float]],
        target: str,
        dtype: str,
        max_context: int | None,
        name: str | None,
    ) -> _Job:
        checkpoint = open_checkpoint(source, adapters)
        config = parameters.configure(checkpoint)
        longest = config.max_positions
        if max_context is not None and not SHORTEST <= max_context <= longest:
            raise ValueError(f"max_context must be between {SHORTEST} and the model's own {longest}, not {max_context}")
        name = slug(Path(source)) if name is None else name
        return cls(checkpoint, config, target, DTYPES[dtype], max_context or min(longest, LONGEST), name)


def _check_options(target: str, dtype: str) -> None:
    if target not in TARGETS:
        raise ValueError(f"unknown target {target!r}; known targets: {', '.join(TARGETS)}")
    if dtype not in DTYPES:
        reason = REFUSED_DTYPES.get(dtype, "there is no such dtype")
        raise ValueError(f"dtype {dtype!r} is not available for device cpu: {reason}. Use {', '.join(DTYPES)}")


def _write(folder: Path, job: _Job, stages: _Stages) -> tuple[dict[str, Any], list[str]]:
    """Every file of the artifact; returns the manifest, in which nothing is verified yet, and warnings."""
    with stages("trace"):
        lowered: dict[str, Lowered] = {}
        for done, program in enumerate(PROGRAMS):
            stages.progress("trace", done, len(PROGRAMS))
            lowered[program] = lower(program, job.config, job.target, job.max_context, job.dtype)
        stages.progress("trace", len(PROGRAMS), len(PROGRAMS))
    with stages("weights"):
        slots, tensors = _write_weights(folder, job, _constants(lowered), stages.progress)
    with stages("graphs"):
        programs: dict[str, Any] = {
            program: _write_graph(folder, program, lowered[program], slots) for program in PROGRAMS
        }
    with stages("tokenizer"):
        vocabulary, warnings = _write_tokenizer(folder, job)
    with stages("hashes"):
        content = manifest(
            name=job.name,
            target=job.target,
            device="cpu",
            dtype=job.dtype,
            max_context=job.max_context,
            config=job.config,
            vocabulary=vocabulary,
            programs=programs,
            files={path.name: describe_file(path) for path in folder.iterdir()},
            tensors=tensors,
            source=job.checkpoint.provenance(),
            verification=SKIPPED,
        )
        write_manifest(folder, content)
    return content, warnings


# -------------------------------------------------------------------------------------------------- weights and graphs


def _constants(lowered: Mapping[str, Lowered]) -> dict[str, NDArray[Any]]:
    """The large constants of both programs; one name means the same bytes in both."""
    merged = {name: array for program in lowered.values() for name, array in program.constants.items()}
    return {name: merged[name] for name in sorted(merged)}


def _write_weights(
    folder: Path, job: _Job, constants: Mapping[str, NDArray[Any]], progress: Progress
) -> tuple[dict[str, weights.Slot], dict[str, Any]]:
    """Stream parameters and constants into one file; returns where each lies, and where each came from."""
    leaves = parameters.flatten(parameters.abstract(job.config, job.dtype))
    specs = {name: weights.Spec(leaf.dtype.name, leaf.shape) for name, leaf in (*leaves.items(), *constants.items())}
    _check_room(folder, sum(spec.nbytes for spec in specs.values()))
    tensors: dict[str, Any] = {}

    def values() -> Iterator[tuple[str, NDArray[Any]]]:
        for path, value, sources in parameters.stream(job.checkpoint, job.config):
            tensors[path] = _provenance(specs[path], job.checkpoint, sources)
            yield path, value
            del value  # before the next one is read
            progress("weights", len(tensors), len(leaves))
        for name, array in constants.items():
            tensors[name] = _provenance(specs[name], job.checkpoint, [])
            yield name, array

    return weights.write(folder / WEIGHTS, specs, values()), tensors


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"the weights need {needed:,} bytes, {folder.parent} has {free:,} left")


def _provenance(spec: weights.Spec, checkpoint: Checkpoint, sources: list[str]) -> dict[str, Any]:
    dtypes = [checkpoint.tensors[name].dtype for name in sources]
    return {"dtype": spec.dtype, "shape": list(spec.shape), "sources": sources, "source_dtypes": dtypes}


def _write_graph(folder: Path, program: str, lowered: Lowered, slots: Mapping[str, weights.Slot]) -> dict[str, Any]:
    """Point the graph's initializers into the weights file and save it; returns its entry in the manifest."""
    graph, file = lowered.model.graph, f"{program}.onnx"
    for name, value in graph.initializers.items():
        if value.const_value is None:
            value.const_value = _external(name, value, slots[name], folder)
    ir.save(lowered.model, folder / file)
    return {
        "file": file,
        "inputs": list(map(_signature, graph.inputs)),
        "outputs": list(map(_signature, graph.outputs)),
    }


def _external(name: str, value: ir.Value, slot: weights.Slot, folder: Path) -> ir.ExternalTensor:
    assert value.dtype is not None and value.shape is not None, f"initializer {name} has no type"
    size = math.prod(value.shape.numpy()) * value.dtype.itemsize
    assert size == slot.length, f"initializer {name} should have {slot.length} bytes, has {size}"
    return ir.ExternalTensor(
        WEIGHTS, slot.offset, slot.length, value.dtype, shape=ir.Shape(value.shape), name=name, base_dir=folder
    )


def _signature(value: ir.Value) -> dict[str, Any]:
    assert value.dtype is not None and value.shape is not None, f"{value.name} has no type"
    shape = [dim if isinstance(dim, int) else str(dim.value) for dim in value.shape]
    return {"name": value.name, "dtype": value.dtype.numpy().name, "shape": shape}


# --------------------------------------------------------------------------------------------------------------- text


def _write_tokenizer(folder: Path, job: _Job) -> tuple[dict[str, Any], list[str]]:
    """The tokenizer's files; returns the manifest's ``vocabulary``, and what the user should know."""
    V = job.config.V
    try:
        tokenizer = job.checkpoint.tokenizer
    except FileNotFoundError as error:
        nothing = {"size": V, "eos_token_ids": [], "bos_token_id": None, "pad_token_id": None}
        return nothing, [f"{error}; the artifact takes and gives token ids only, and no token ends a text"]
    for name, text in tokenizer.files.items():
        write_text(folder, name, text)
    warnings = []
    if tokenizer.vocabulary_size > V:
        warnings.append(
            f"the tokenizer has ids up to {tokenizer.vocabulary_size - 1}, the model knows {V}, from 0 to {V - 1}: "
            "a prompt that uses another will be refused"
        )
    vocabulary = {
        "size": V,
        "eos_token_ids": [i for i in tokenizer.eos_token_ids if i < V],
        "bos_token_id": _known(tokenizer.bos_token_id, V),
        "pad_token_id": _known(tokenizer.pad_token_id, V),
    }
    return vocabulary, warnings


def _known(token_id: int | None, V: int) -> int | None:
    """An id that the model has no row for can be neither read nor written: as good as none."""
    return token_id if token_id is not None and token_id < V else None


# ------------------------------------------------------------------------------------------------------------- the end


def _certify(
    folder: Path,
    source: str | Path,
    adapters: Sequence[tuple[str | Path, float]],
    output: str | Path,
    force: bool,
    progress: Progress,
) -> Certificate:
    from diptych.export import parity  # compiles and runs the model: an unverified export does without

    certificate = parity.verify(folder, source=source, adapters=adapters, progress=progress)
    if certificate.status == "failed" and not force:
        raise ParityError(output, certificate)
    return certificate


def _figures(config: Config) -> dict[str, Any]:
    leaves = parameters.flatten(parameters.abstract(config))
    return {
        "family": config.family,
        "layers": config.L,
        "width": config.D,
        "heads": config.N,
        "kv_heads": config.K,
        "head_size": config.H,
        "vocabulary": config.V,
        "parameters": sum(math.prod(leaf.shape) for leaf in leaves.values()),
    }
