"""Write ``docs/families.md`` from the tables: families, their switches, formats, and the cases that prove them.

python tools/make_families_page.py             # writes the page
python tools/make_families_page.py --check     # says whether it is up to date
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import tiny  # noqa: E402, its folder had to be found first
from diptych.jax_model.config import Config, LatentLayer  # noqa: E402
from diptych.jax_model.families import FAMILIES, MULTIMODAL, Foreign  # noqa: E402
from diptych.jax_model.readers.gguf_metadata import ARCHITECTURES  # noqa: E402
from diptych.jax_model.readers.huggingface import with_defaults  # noqa: E402
from diptych.jax_model.readers.packed import METHODS  # noqa: E402
from reference import families  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
INTRODUCTION = """\
# Families

Written by `python tools/make_families_page.py` from the tables in `jax_model/families/` and `jax_model/readers/`; a
test keeps it up to date. A model of another family, or one that uses a switch its family is not known to have, is
refused by name before any weight is read; `diptych inspect SOURCE` says so before an export is begun.

* **family** is `model_type` in `config.json`, **class** what `architectures` says there, **GGUF** the file's
  `general.architecture`.
* **switches** are those that the family's cases turn on, beyond what Llama is: RMS norms before attention and MLP, a
  gated MLP with SiLU, no biases, rope over whole heads in halves, full attention.
* **cases** are tiny random checkpoints whose logits transformers computed (`tests/reference/`).
  `tests/test_reference.py` compares JAX and the graphs of all three targets with them, `tests/test_family_twins.py`
  GGUF files with Hugging Face folders, bit by bit.
"""
FORMATS = """\
## Formats

* **GGUF**: one file or several parts (`NAME-00001-of-0000N.gguf`; name any of them), every kind of blocks that the
  `gguf` package dequantises.
* **Hugging Face**: a folder, or a repository of the Hub as `owner/name` or `owner/name@revision`; safetensors, sharded
  or not, in float32, float16 or bfloat16, or packed as `quantization_config` says:
  {methods}.
* **Orbax**: checkpoints of ours, of MaxText and of Gemma.

All are computed in float32, from exactly the numbers that they store.
"""
PLACEMENTS = {"around": "norms before and behind", "after": "norms behind", "parallel": "attention and MLP in parallel"}
QK_NORMS = {"head": "norms of heads", "width": "norms over all heads", "head_after_rope": "norms of heads behind rope"}
BIASES = {"qkv_bias": "q k v", "out_bias": "output", "mlp_bias": "MLP", "head_bias": "head"}
CLASSES = {"internlm2": "InternLM2ForCausalLM"}  # those that come with the models, not with transformers
SCALES = ("embed_scale", "residual_scale", "logit_scale")


def configurations(family: str) -> dict[str, Config]:
    """What the reference cases of a family say, by the cases' names."""
    cases = {name: case.config for name, case in families.CASES.items()}
    cases |= {name: variant.config for name, variant in tiny.VARIANTS.items()}
    found = {name: config for name, config in cases.items() if config["model_type"] == family}
    return {
        name: FAMILIES[family].configure(Foreign(with_defaults(family, config, Path(name)), name))
        for name, config in found.items()
    }


def switches(config: Config) -> Iterator[str]:
    """How a configuration differs from a plain Llama's, in the field's words."""
    if config.norm == "layer":
        yield "layer norm"
    if config.norm_placement in PLACEMENTS:
        yield PLACEMENTS[config.norm_placement]
    if config.qk_norm is not None:
        yield QK_NORMS[config.qk_norm]
    if not config.gated:
        yield "plain MLP"
    if config.activation != "silu":
        yield config.activation
    if biases := [name for field, name in BIASES.items() if getattr(config, field)]:
        yield f"biases ({', '.join(biases)})"
    if config.learned_positions:
        yield "learned positions"
    if config.qkv_clip is not None:
        yield "clipped q k v"
    if config.attn_softcap is not None or config.logit_softcap is not None:
        yield "soft caps"
    if any(getattr(config, scale) != 1 for scale in SCALES):
        yield "multipliers"
    yield from _of_layers(config)


def _of_layers(config: Config) -> Iterator[str]:
    ropes = [layer.rope for layer in config.layers if layer.rope is not None]
    if 0 < len(ropes) < config.L:
        yield "layers without rope"
    yield from (f"rope {type(rope.scaling).__name__.lower()}" for rope in ropes if rope.scaling is not None)
    if any(rope.width < config.H for rope in ropes) and not isinstance(config.layers[0], LatentLayer):
        yield "partial rope"
    if any(rope.interleaved for rope in ropes):
        yield "rope of neighbours"
    if len({rope.base for rope in ropes}) > 1:
        yield "rope bases by layer"
    windows = {layer.window for layer in config.layers}
    if windows != {None}:
        yield "windows in some layers" if None in windows else "windows"
    if isinstance(config.layers[0], LatentLayer):
        yield "latent attention"
    if any(parameter.path.endswith("attn.sink") for parameter in FAMILIES[config.family].table):
        yield "attention sinks"
    for layer in config.layers:
        if layer.experts is not None:
            yield "experts"
            if layer.experts.shared_F:
                yield "shared experts"
            if layer.experts.groups > 1:
                yield "groups of experts"


def classes() -> dict[str, str]:
    """Hugging Face's class by ``model_type``."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # PyTorch is not needed here
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def gguf_names(family: str) -> list[str]:
    return sorted(
        name for name, one in ARCHITECTURES.items() if family in (one.family, one.mixture, one.windowed, one.sigmoid)
    )


def page() -> str:
    lines = [INTRODUCTION, "| family | class | GGUF | switches | cases |", "|---|---|---|---|---|"]
    names = classes()
    for family in sorted(FAMILIES):
        cases = configurations(family)
        found = dict.fromkeys(switch for config in cases.values() for switch in switches(config))
        cells = (
            f"`{family}`",
            f"`{names.get(family) or CLASSES[family]}`",
            ", ".join(f"`{name}`" for name in gguf_names(family)) or "–",
            ", ".join(found) or "–",
            ", ".join(f"`{name}`" for name in cases),
        )
        lines.append(f"| {' | '.join(cells)} |")
    wholes = ", ".join(f"`{name}` (as `{whole.family}`)" for name, whole in sorted(MULTIMODAL.items()))
    lines += [
        "",
        f"Of models for several kinds of input, the part for text is read: {wholes}.",
        "",
        FORMATS.format(methods=", ".join(f"`{method}`" for method in sorted(METHODS))),
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/families.md from the tables.")
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == page():
        return 0
    print(f"{PAGE} is not up to date; run: python tools/{Path(__file__).name}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
