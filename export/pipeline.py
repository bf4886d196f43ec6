"""A checkpoint in, an artifact out: trace, stream the weights, write the graphs, prove the result, give it its name."""

from __future__ import annotations

import errno
import itertools
import math
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from diptych.export import quality, weights
from diptych.export.accuracy import LEVEL_4, set_accuracy_level, uses_blocks
from diptych.export.artifact import WEIGHTS, assemble, describe_file, manifest, write_manifest, write_text
from diptych.export.calibration import Calibration, calibrate
from diptych.export.certificate import SKIPPED, Certificate, ParityError, Progress, quiet
from diptych.export.costs import against_float, against_float32_cache
from diptych.export.job import DTYPES, Job, check_options
from diptych.export.lowering import Lowered, Program, lower
from diptych.jax_model import params as parameters
from diptych.jax_model.config import Config
from diptych.jax_model.quantize import Recipe
from diptych.jax_model.readers import Checkpoint
from diptych.jax_model.storage import to_json as forms_to_json

__all__ = ["ExportReport", "export"]

PROGRAMS: tuple[Program, ...] = ("prefill", "decode")
LEVEL_TOKENS = 128  # of a text that the accuracy level is chosen on


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
    cache: Mapping[str, Any]  # as the manifest has it
    quantization: Mapping[str, Any] | None = None  # as the manifest has it; None: all parameters are floats

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
            "cache": dict(self.cache),
            "quantization": None if self.quantization is None else dict(self.quantization),
            "verification": dict(self.verification),
        }


def export(
    source: str | Path,
    output: str | Path,
    *,
    target: str = "ort",
    dtype: str = "fp32",
    quantize: str | Recipe | None = None,
    accuracy_level: int | None = None,
    kv_dtype: str = "fp32",
    max_context: int | None = None,
    adapters: Sequence[tuple[str | Path, float]] = (),
    verify: bool = True,
    force: bool = False,
    keep_failed: bool = False,
    name: str | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Export a ``.gguf`` file, a Hugging Face folder or an Orbax checkpoint to the artifact folder ``output``.

    ``quantize`` is ``"keep"`` (the checkpoint's own blocks of integers, exactly), ``"int4"``, ``"int8"``, ``"none"``
    or a :class:`Recipe`; by default ``"keep"`` where there are blocks, else ``"none"``.
    ``accuracy_level`` is that of products with blocks: 1 computes in float32, 4 rounds activations to 8 bits,
    which is faster; by default 4 where that is measured to change next to nothing, else 1 (where nothing is run, 4).
    ``kv_dtype`` is that of the cache's keys and values: ``"fp32"``, ``"fp16"``, or ``"int8"`` in steps that a text of
    ours decides, which takes the model's floats into memory once.
    ``max_context`` is the longest sequence that the artifact serves: by default the model's own, at most 8192 (and for
    LongRoPE at most the original length, see :func:`default_context <diptych.export.job.default_context>`).
    ``adapters`` are LoRA folders and their weights, merged into the model's matrices.
    ``force`` replaces an artifact that is there; ``keep_failed`` keeps one that failed its verification, so marked.
    ``name`` is what the manifest calls it, by default the source's name.

    Whatever is raised, nothing is left behind: FileExistsError and other OSErrors about ``output``, FileNotFoundError
    and ValueError about ``source`` and the options, NotImplementedError for an operation that ``target`` cannot
    express, ParityError when the verification failed.
    """
    check_options(target, dtype, accuracy_level, kv_dtype)
    stages = _Stages(progress or quiet)
    with assemble(output, force=force) as folder:
        job = Job.open(source, adapters, target, dtype, quantize, accuracy_level, kv_dtype, max_context, name)
        content, warnings = _write(folder, job, stages, measure=verify)
        certificate = None
        if verify:
            with stages("verify"):
                certificate = _certify(folder, source, adapters, output, keep_failed, stages.progress)
            content |= {"verification": certificate.to_json()}
            if job.quantization.recipe is not None:
                with stages("quality"):
                    content["quantization"]["quality"]["against_float"] = against_float(folder, job, stages.progress)
            if job.cache_dtype != "float32":
                with stages("cache quality"):
                    content["cache"]["quality"] = against_float32_cache(folder, job, stages.progress)
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
        content["cache"],
        content.get("quantization"),
    )


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


def _write(folder: Path, job: Job, stages: _Stages, *, measure: bool) -> tuple[dict[str, Any], list[str]]:
    """Every file of the artifact; returns the manifest, in which nothing is verified yet, and warnings.

    Without ``measure`` nothing of it is run.
    """
    with stages("trace"):
        lowered: dict[str, Lowered] = {}
        for done, program in enumerate(PROGRAMS):
            stages.progress("trace", done, len(PROGRAMS))
            lowered[program] = lower(
                program,
                job.config,
                job.target,
                job.max_context,
                job.dtype,
                storage=job.quantization.storage,
                cache_dtype=job.cache_dtype,
            )
        stages.progress("trace", len(PROGRAMS), len(PROGRAMS))
    calibration, warnings = Calibration(), list[str]()
    if job.calibrated:
        with stages("calibrate"):
            calibration, warnings = calibrate(job)
    with stages("weights"):
        slots, tensors = _write_weights(folder, job, calibration, _constants(lowered), stages.progress)
    with stages("graphs"):
        programs: dict[str, Any] = {
            program: _write_graph(folder, program, lowered[program], slots) for program in PROGRAMS
        }
    with stages("tokenizer"):
        vocabulary, remarks = _write_tokenizer(folder, job)
    quantization = _describe_quantization(job, tensors)
    if quantization is not None and job.accuracy_level is None and not measure:
        warnings.append(_UNMEASURED)
    if quantization is not None:
        with stages("accuracy level"):
            level, scores = _choose_level(folder, job, lowered, slots, measure=measure)
            quantization |= {"accuracy_level": level, "quality": scores}
    with stages("hashes"):
        content = manifest(
            name=job.name,
            target=job.target,
            device="cpu",
            dtype=job.dtype,
            cache_dtype=job.cache_dtype,
            max_context=job.max_context,
            config=job.config,
            vocabulary=vocabulary,
            programs=programs,
            files={path.name: describe_file(path) for path in folder.iterdir()},
            tensors=tensors,
            quantization=quantization,
            source=job.checkpoint.provenance(),
            verification=SKIPPED,
        )
        write_manifest(folder, content)
    return content, [*warnings, *remarks]


# -------------------------------------------------------------------------------------------------- weights and graphs


def _constants(lowered: Mapping[str, Lowered]) -> dict[str, NDArray[Any]]:
    """The large constants of both programs; one name means the same bytes in both."""
    merged = {name: array for program in lowered.values() for name, array in program.constants.items()}
    return {name: merged[name] for name in sorted(merged)}


def _write_weights(
    folder: Path,
    job: Job,
    calibration: Calibration,
    constants: Mapping[str, NDArray[Any]],
    progress: Progress,
) -> tuple[dict[str, weights.Slot], dict[str, Any]]:
    """Stream parameters and constants into one file; returns where each lies, and where each came from."""
    how = job.quantization
    leaves = parameters.flatten(parameters.abstract(job.config, job.dtype, how.storage, job.cache_dtype))
    specs = {name: weights.Spec(leaf.dtype.name, leaf.shape) for name, leaf in (*leaves.items(), *constants.items())}
    _check_room(folder, sum(spec.nbytes for spec in specs.values()))
    tensors: dict[str, Any] = {}

    def values() -> Iterator[tuple[str, NDArray[Any]]]:
        quantizer = None if how.recipe is None else how.recipe.quantizer(calibration.importance)
        streamed = parameters.stream(job.checkpoint, job.config, how.storage, quantizer)
        scales = ((path, scale, list[str]()) for path, scale in calibration.scales.items())
        for path, value, sources in itertools.chain(streamed, scales):
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


def _describe_quantization(job: Job, tensors: Mapping[str, Any]) -> dict[str, Any] | None:
    """What manifests hold under ``quantization``; None where all parameters are floats."""
    how = job.quantization
    if not how.storage:
        return None
    carried = Counter(
        dtype
        for path in how.storage
        for leaf, entry in tensors.items()
        if leaf in (f"{path}.packed", f"{path}.0.packed")
        for dtype in entry["source_dtypes"]
    )
    return {
        "scheme": how.scheme,
        "recipe": "the checkpoint's own blocks, exactly" if how.recipe is None else how.recipe.name,
        "from": dict(sorted(carried.items())),
        "tensors": forms_to_json(how.storage),
    }


_UNMEASURED = (
    "nothing was run, so what rounding activations to 8 bits costs this model was not measured; "
    "accuracy level 1 computes in float32"
)


def _choose_level(
    folder: Path, job: Job, lowered: Mapping[str, Lowered], slots: Mapping[str, weights.Slot], *, measure: bool
) -> tuple[int, dict[str, Any]]:
    """The accuracy level, and what it costs where that was measured; writes both graphs anew for another than 1.

    The cost of level 4 is measured in the graph of prefill, which reads a text in one go; decode's products are the
    same.
    """
    scores: dict[str, quality.Score] = {}
    level = 1
    if uses_blocks(lowered["decode"].model):
        level = job.accuracy_level or 4
    if level == 4 and job.accuracy_level is None and measure:
        probe = "probe"
        set_accuracy_level(lowered["prefill"].model, 4)
        _write_graph(folder, probe, lowered["prefill"], slots)
        texts = quality.texts(folder, job.config.V, min(job.max_context, LEVEL_TOKENS))
        exact = quality.Recorded(quality.OrtReader(job.config, folder / "prefill.onnx", job.cache_dtype), texts)
        scores = quality.compare(exact, quality.OrtReader(job.config, folder / f"{probe}.onnx", job.cache_dtype), texts)
        (folder / f"{probe}.onnx").unlink()
        level = 4 if max(score.kl for score in scores.values()) <= LEVEL_4.value else 1
    for program, one in lowered.items() if level != 1 else ():
        set_accuracy_level(one.model, level)
        _write_graph(folder, program, one, slots)
    return level, {"level_4_against_1": quality.score_json(scores)} if scores else {}


def _write_graph(folder: Path, program: str, lowered: Lowered, slots: Mapping[str, weights.Slot]) -> dict[str, Any]:
    """Point the graph's initializers into the weights file and save it; returns its entry in the manifest."""
    graph, file = lowered.model.graph, f"{program}.onnx"
    for name, value in graph.initializers.items():
        if value.const_value is None:
            value.const_value = _external(name, value, slots[name.split(":")[0]], folder)  # also ``path:type``, a view
    ir.save(lowered.model, folder / file)
    return {
        "file": file,
        "inputs": list(map(_signature, graph.inputs)),
        "outputs": list(map(_signature, graph.outputs)),
    }


def _external(name: str, value: ir.Value, slot: weights.Slot, folder: Path) -> ir.ExternalTensor:
    assert value.dtype is not None and value.shape is not None, f"initializer {name} has no type"
    size = math.ceil(math.prod(value.shape.numpy()) * value.dtype.itemsize)
    assert size == slot.length, f"initializer {name} should have {slot.length} bytes, has {size}"
    return ir.ExternalTensor(
        WEIGHTS, slot.offset, slot.length, value.dtype, shape=ir.Shape(value.shape), name=name, base_dir=folder
    )


def _signature(value: ir.Value) -> dict[str, Any]:
    assert value.dtype is not None and value.shape is not None, f"{value.name} has no type"
    shape = [dim if isinstance(dim, int) else str(dim.value) for dim in value.shape]
    return {"name": value.name, "dtype": value.dtype.numpy().name, "shape": shape}


# --------------------------------------------------------------------------------------------------------------- text


def _write_tokenizer(folder: Path, job: Job) -> tuple[dict[str, Any], list[str]]:
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
    keep_failed: bool,
    progress: Progress,
) -> Certificate:
    from diptych.export import parity  # compiles and runs the model: an unverified export does without

    certificate = parity.verify(folder, source=source, adapters=adapters, progress=progress)
    if certificate.status == "failed" and not keep_failed:
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
