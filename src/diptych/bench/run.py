"""Bench runs: artifacts as engines, and rounds that are kept, so that an interrupted run goes on."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diptych.bench.engines import HERE, Spec
from diptych.bench.plan import Plan
from diptych.bench.rounds import Report, Round, measure

if TYPE_CHECKING:
    from diptych.runtime import Manifest

WEIGHTS = "weights.safetensors"
_BYTES = {"float32": 4, "float16": 2, "int32": 4, "int8": 1, "uint8": 1}


def artifacts(
    folders: Sequence[Path], plan: Plan, variants: Mapping[str, Sequence[Any]] | None = None
) -> tuple[list[Spec], Plan, int]:
    """Artifacts as engines, the part of the plan that fits all of them, and the size of their vocabulary.

    ``variants`` are options of the runtime's ``load`` with the values to compare, such as ``{"sessions": ["one",
    "two"]}``: every artifact is an engine with every combination of them.  Raises ValueError for artifacts that do not
    take the same tokens, and what opening a manifest raises.
    """
    from diptych.runtime import Manifest

    manifests = [Manifest.open(folder) for folder in folders]
    sizes = {manifest.vocabulary.size for manifest in manifests}
    if len(sizes) != 1:
        raise ValueError(f"artifacts are compared on the same tokens; these have vocabularies of {sorted(sizes)}")
    longest = min(manifest.max_context for manifest in manifests)
    plan = plan.within(longest)
    if not plan.prompts or not plan.contexts:
        raise ValueError(f"a context of {longest} tokens is too short to measure anything in")
    specs = [
        _spec(manifest, plan, options)
        for manifest in manifests
        for options in _combinations({"threads": [plan.threads], **(variants or {})})
    ]
    return _named_apart(specs), plan, sizes.pop()


def _combinations(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def _spec(manifest: Manifest, plan: Plan, options: Mapping[str, Any]) -> Spec:
    return Spec(
        manifest.folder.name,
        HERE / "artifact.py",
        {"model": str(manifest.folder), "capacity": plan.capacity, **options},
        batches=True,
        weights=manifest.files[WEIGHTS].bytes,
        read=bytes_read(manifest.data),
        operations=operations(manifest.data["config"]),
        model=hashlib.sha256((manifest.folder / "manifest.json").read_bytes()).hexdigest(),
    )


def _named_apart(specs: Sequence[Spec]) -> list[Spec]:
    """A name says what its engine does not have in common with the others."""
    options = {name: {spec.options[name] for spec in specs} for name in specs[0].options}
    alike = len({spec.name for spec in specs}) < len(options["model"])  # folders of one name

    varied = [key for key, found in options.items() if key != "model" and len(found) > 1]

    def name(spec: Spec) -> str:
        differing = [f"{key} {spec.options[key]}" for key in varied]
        return ", ".join([spec.options["model"] if alike else spec.name, *differing])

    return [replace(spec, name=name(spec)) for spec in specs]


def bytes_read(manifest: Mapping[str, Any]) -> int:
    """Bytes of the weights that one decode step reads: all parameters, of an untied embedding next to nothing."""
    tied = manifest["config"]["tied"]
    return sum(
        math.prod(tensor["shape"]) * _BYTES[tensor["dtype"]]
        for path, tensor in manifest["tensors"].items()
        if tensor["sources"] and (tied or not re.match(r"embed\b", path))
    )


def operations(config: Mapping[str, Any]) -> int:
    """Floating-point operations of the matrix products that a prompt's token goes through.

    The head is not among them, because only the last token goes through it, nor are the products of attention, which
    grow with the context.
    """
    matrices = 3 if config.get("gated", True) else 2
    D, heads = config["D"], (2 * config["N"] + 2 * config["K"]) * config["H"]
    widths = (_feed_forward_width(layer.get("experts"), config["F"]) for layer in config["layers"])
    return int(2 * D * sum(heads + matrices * F for F in widths))


def _feed_forward_width(experts: Mapping[str, Any] | None, F: int) -> int:
    """How wide the feed-forward layer is for one token."""
    return F if experts is None else int(experts["top_k"] * experts["F"] + experts.get("shared_F", 0))


def go(
    specs: Sequence[Spec], plan: Plan, vocabulary: int, rounds: int, report: Report, kept: Path | None = None
) -> list[Round]:
    """Rounds until there are ``rounds`` of them, those in the file ``kept`` included, which grows with every one."""
    key = {"plan": plan.to_json(), "engines": {spec.name: [spec.model, dict(spec.options)] for spec in specs}}
    done = _resume(kept, key)
    if done:
        report(f"{len(done)} rounds are in {kept} already")
    if len(done) < rounds:
        for measured in measure(specs, plan, vocabulary, rounds - len(done), report):
            done.append(measured)
            if kept is not None:
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(key | {"rounds": done}), encoding="utf-8")
    return done


def _resume(kept: Path | None, key: Mapping[str, Any]) -> list[Round]:
    """Rounds of the same engines by the same plan; of anything else none."""
    if kept is None or not kept.exists():
        return []
    found = json.loads(kept.read_text(encoding="utf-8"))
    return list(found["rounds"]) if {**found, **key} == found else []
