"""An artifact's graphs, opened in ONNX Runtime: on which provider, with how many threads, one session or two."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import onnxruntime as ort

from diptych.runtime.manifest import FILE, Manifest, Signature
from diptych.runtime.settings import Settings

_ELEMENT_TYPES = {"float": "float32", "double": "float64"}  # ONNX Runtime's names where they are not NumPy's


@dataclass(frozen=True)
class Programs:
    """Both programs, ready to run from any thread. ``decode`` is None where prefill with one token serves for it."""

    manifest: Manifest
    prefill: ort.InferenceSession
    decode: ort.InferenceSession | None
    provider: str
    settings: Settings


def open_programs(manifest: Manifest, settings: Settings, *, provider: str = "cpu") -> Programs:
    """Open the graphs.

    Raises ValueError for a provider that is not there, or a graph that does not load or does not have the inputs and
    outputs that the manifest promises.
    """
    chosen = _find_provider(provider)
    prefill = _open(manifest, "prefill", settings, chosen)
    decode = _open(manifest, "decode", settings, chosen) if settings.sessions == "two" else None
    return Programs(manifest, prefill, decode, short_name(provider), settings)


def _open(manifest: Manifest, name: str, settings: Settings, provider: str) -> ort.InferenceSession:
    path = manifest.folder / manifest.programs[name].file
    options = ort.SessionOptions()
    options.intra_op_num_threads = settings.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors come as exceptions; the log would repeat them on stderr
    options.enable_mem_pattern = False  # plans memory once per shape, and prompts come in every length
    entries = _ENTRIES | {"session.intra_op.allow_spinning": str(int(settings.spinning))}
    if settings.float32_prefill and name == "prefill":
        entries["mlas.qnbit.force_fp32"] = "1"
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    try:
        session = ort.InferenceSession(_as_utf8(path), options, providers=[provider], enable_fallback=0)
    except Exception as error:  # ONNX Runtime's errors share no class
        made_with = manifest.data.get("tools", {}).get("onnxruntime", "an unknown version")
        raise ValueError(
            f"ONNX Runtime {ort.__version__} cannot open {path}: {_one_line(error)} "
            f"(the artifact was made with {made_with}; export it again if it is damaged or too new)"
        ) from error
    if provider != "CPUExecutionProvider":
        _check_provider(session, provider, path)
    _check_signatures(session, manifest, name)
    return session


_ENTRIES = {
    "session.load_model_format": "ONNX",  # the one format that we looked through
    "session.record_ep_graph_assignment_info": "1",
    "session.intra_op.spin_duration_us": "1000",  # between two nodes, and not while the application does something else
}


def _as_utf8(path: Path) -> str:
    """ONNX Runtime takes names as UTF-8, whatever the locale made of the bytes that they are."""
    return os.fsencode(path).decode("utf-8")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _find_provider(name: str) -> str:
    """``cuda`` -> ``CUDAExecutionProvider``. Raises ValueError when this ONNX Runtime does not have it."""
    known: dict[str, str] = {short_name(provider): provider for provider in ort.get_all_providers()}
    available = [short_name(provider) for provider in ort.get_available_providers()]
    short = short_name(name)
    if short not in known:
        close = get_close_matches(short, known, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(sorted(known))}"
        raise ValueError(f"there is no provider {name!r}; {hint}")
    if short not in available:
        raise ValueError(
            f"provider {name!r} is not in this onnxruntime {ort.__version__}, which has: {', '.join(available)}. "
            "Install the onnxruntime package for it, or choose one of these"
        )
    return known[short]


def short_name(provider: str) -> str:
    """``CUDAExecutionProvider`` -> ``cuda``."""
    return provider.lower().removesuffix("executionprovider")


def _check_provider(session: ort.InferenceSession, provider: str, path: Path) -> None:
    """ONNX Runtime falls back to the CPU quietly; we do not."""
    used = {subgraph.ep_name for subgraph in session.get_provider_graph_assignment_info()}
    if provider not in used:
        raise ValueError(
            f"{path}: no part of the graph runs on {short_name(provider)!r}, only on "
            f"{', '.join(map(short_name, sorted(used)))}: the provider did not start, or has none of the operators"
        )


def _check_signatures(session: ort.InferenceSession, manifest: Manifest, name: str) -> None:
    """The graph, the manifest and this runtime mean the same inputs and outputs."""
    program = manifest.programs[name]
    if manifest.cache.layers > len(program.inputs):
        raise ValueError(f"{manifest.folder / FILE}: {manifest.cache.layers} layers cannot be, with so few inputs")
    inputs, outputs = _expected(manifest, name)
    for expected, promised, actual in (
        (inputs, program.inputs, _signatures(session.get_inputs())),
        (outputs, program.outputs, _signatures(session.get_outputs())),
    ):
        for found, whose in ((promised, manifest.folder / FILE), (actual, manifest.folder / program.file)):
            differing = sorted(_described(expected) ^ _described(found))
            if differing:
                raise ValueError(
                    f"{whose}: the inputs and outputs of {name} are not those that this version of diptych runs "
                    f"({differing[0]} is on one side only). Export the artifact again"
                )


def _expected(manifest: Manifest, name: str) -> tuple[Sequence[Signature], Sequence[Signature]]:
    """What the runtime feeds to a program, and what it wants back."""
    cache, V = manifest.cache, manifest.vocabulary.size
    parts = [f"{layer}.{part}" for layer in range(cache.layers) for part in ("key", "value")]
    memory: tuple[int | str, ...] = ("B", cache.heads, "S", cache.head_size)
    pasts = [Signature(f"past_key_values.{part}", cache.dtype, memory) for part in parts]
    inputs = [Signature("past_length", "int32", ("B",)), *pasts]
    outputs = [Signature("present_length", "int32", ("B",))]
    outputs += [Signature(f"present.{part}", cache.dtype, memory) for part in parts]
    if name == "decode":
        inputs.append(Signature("input_ids", "int32", ("B", 1)))
        outputs.append(Signature("logits", "float32", ("B", V)))
    else:
        inputs.append(Signature("input_ids", "int32", ("B", "T")))
        inputs.append(Signature("num_tokens", "int32", ("B",)))
        inputs.append(Signature("logit_positions", "int32", ("B", "P")))
        outputs.append(Signature("logits", "float32", ("B", "P", V)))
    return inputs, outputs


def _signatures(arguments: Sequence[ort.NodeArg]) -> Sequence[Signature]:
    return [Signature(argument.name, _dtype(argument.type), tuple(argument.shape)) for argument in arguments]


def _dtype(ort_type: str) -> str:
    """``tensor(float)`` -> ``float32``."""
    name = ort_type.removeprefix("tensor(").removesuffix(")")
    return _ELEMENT_TYPES.get(name, name)


def _described(signatures: Sequence[Signature]) -> set[str]:
    """Names of symbolic dimensions are for people: two writers may choose different ones."""
    return {
        f"{s.name} {s.dtype}[{', '.join(str(size) if isinstance(size, int) else '·' for size in s.shape)}]"
        for s in signatures
    }
