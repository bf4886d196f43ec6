"""``diptych inspect``: what an artifact or a checkpoint holds, and what running it takes."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from diptych.cli.console import print_json, show, size, table
from diptych.cli.options import Json
from diptych.cli.parity import cache_table, parity_table, quantization_table

if TYPE_CHECKING:
    from diptych.jax_model.config import Config
    from diptych.jax_model.readers import Checkpoint

Facts = dict[str, Any]


class Special(NamedTuple):
    """The ids that end a text, begin it, and fill rows up."""

    eos: tuple[int, ...]
    bos: int | None
    pad: int | None


_LENGTHS = (1024, 4096, 8192)  # tokens for which the cache's memory is told, besides the longest
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1}


def inspect(
    source: Annotated[
        str, typer.Argument(metavar="DIR|SOURCE", help="An artifact or a checkpoint.", show_default=False)
    ],
    as_json: Json = False,
) -> None:
    """Tell what an artifact or a checkpoint holds, and how much memory it needs."""
    is_artifact = (Path(source) / "manifest.json").is_file()
    facts = describe_artifact(Path(source)) if is_artifact else describe_checkpoint(source)
    if as_json:
        print_json(facts)
    else:
        show(*_render(facts))


def describe_artifact(path: Path) -> Facts:
    """From the manifest, checked as the runtime checks it, and the tokenizer's files. Needs no JAX."""
    from diptych.runtime import Manifest

    manifest = Manifest.open(path)
    data, vocabulary = manifest.data, manifest.vocabulary
    parameters = {path: tensor for path, tensor in data["tensors"].items() if tensor["sources"]}  # and not constants
    quantization = data.get("quantization")
    weights = sum(math.prod(tensor["shape"]) * _BYTES[tensor["dtype"]] for tensor in parameters.values())
    special = Special(vocabulary.eos_token_ids, vocabulary.bos_token_id, vocabulary.pad_token_id)
    texts = {name: (manifest.folder / name).read_text(encoding="utf-8") for name in manifest.files if _is_text(name)}
    return {
        "kind": "artifact",
        "path": str(path),
        "name": manifest.name,
        "built_for": {key: data[key] for key in ("target", "device", "dtype", "max_context")},
        "model": _model(data["config"]),
        "parameters": _parameters(parameters, quantization),
        "source_dtypes": _source_dtypes(parameters),
        "memory": _memory(data["config"], weights, manifest.cache.dtype, manifest.max_context),
        "tokenizer": _tokenizer(texts, special),
        "files": {name: entry.bytes for name, entry in manifest.files.items()},
        "source": data["source"],
        "tools": data["tools"],
        "cache": data["cache"],
        **({} if quantization is None else {"quantization": quantization}),
        "verification": data["verification"],
    }


def _parameters(tensors: Mapping[str, Any], quantization: Mapping[str, Any] | None) -> int:
    """Numbers of the model; what stands beside the integers of blocks is none."""
    count = 0
    for path, tensor in tensors.items():
        bits = _bits(path, {} if quantization is None else quantization["tensors"])
        count += math.prod(tensor["shape"]) * 8 // bits if bits else 0
    return count


def _bits(path: str, forms: Mapping[str, Any]) -> int:
    """By which a byte of ``path`` holds 8 / bits parameters: 8 where it is no part of blocks, 0 for scales and such."""
    parent, _, leaf = path.rpartition(".")
    stem, _, part = parent.rpartition(".")
    for name, i in ((parent, 0), (stem, int(part) if part.isdecimal() else 0)):
        if name in forms:
            return int(forms[name][i]["bits"]) if leaf == "packed" else 0
    return 8


def _source_dtypes(tensors: Mapping[str, Any]) -> dict[str, int]:
    """How many tensors of which type; each counts once, whatever became of it."""
    found = {
        name: dtype for t in tensors.values() for name, dtype in zip(t["sources"], t["source_dtypes"], strict=True)
    }
    return dict(Counter(found.values()))


def describe_checkpoint(source: str) -> Facts:
    """From the checkpoint's own header and configuration, with what an export would refuse. Needs the extra ``export``.

    Raises what opening it raises, and ValueError when its configuration is refused already.
    """
    from diptych.jax_model.params import abstract, configure, flatten
    from diptych.jax_model.readers import open_checkpoint
    from diptych.jax_model.storage import keep

    checkpoint = open_checkpoint(source)
    config = configure(checkpoint)
    shapes = [leaf.shape for leaf in flatten(abstract(config)).values()]
    leaves = flatten(abstract(config, storage=keep(checkpoint, config))).values()  # as an export makes them by default
    weights = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    (texts, special), unusable = _tokenizer_of(checkpoint)
    return {
        "kind": "checkpoint",
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "model": _model(config.to_json()),
        "parameters": sum(map(math.prod, shapes)),
        "source_dtypes": dict(Counter(info.dtype for info in checkpoint.tensors.values())),
        "memory": _memory(config.to_json(), weights, "float32", config.max_positions),
        "tokenizer": _tokenizer(texts, special),
        "refused": [*_refused(checkpoint, config), *unusable],
    }


def _tokenizer_of(checkpoint: Checkpoint) -> tuple[tuple[Mapping[str, str], Special], list[str]]:
    """Texts and ids of the tokenizer; and why there are none, where that would end an export."""
    none: Mapping[str, str] = {}
    try:
        tokenizer = checkpoint.tokenizer
    except FileNotFoundError:  # weights alone can be exported too
        return (none, Special((), None, None)), []
    except ValueError as error:
        return (none, Special((), None, None)), [str(error)]
    ids = Special(tokenizer.eos_token_ids, tokenizer.bos_token_id, tokenizer.pad_token_id)
    return (tokenizer.files, ids), []


def _refused(checkpoint: Checkpoint, config: Config) -> Iterable[str]:
    """What an export would say of the tensors: their names and shapes, and types that cannot be read."""
    from diptych.jax_model.params import stream

    try:
        stream(checkpoint, config)
    except ValueError as error:
        yield str(error)
    examples = {info.dtype: (name, info) for name, info in checkpoint.tensors.items()}
    for name, info in examples.values():
        try:
            checkpoint.read(name, slice(0, 1) if len(info.shape) > 1 else None)
        except ValueError as error:
            yield str(error)


def _is_text(name: str) -> bool:
    return name in ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json")


def _model(config: Mapping[str, Any]) -> Facts:
    """The shape, with the field's words for our letters."""
    windows = Counter(layer["window"] for layer in config["layers"])
    return {
        "family": config["family"],
        "layers": len(config["layers"]),
        "layers_by_window": {"all" if window is None else str(window): count for window, count in windows.items()},
        "width": config["D"],
        "feed_forward_width": config["F"],
        "query_heads": config["N"],
        "key_value_heads": config["K"],
        "head_size": config["H"],
        "vocabulary": config["V"],
        "tied_embedding": config["tied"],
        "max_positions": config["max_positions"],
    }


def _memory(config: Mapping[str, Any], weights: int, cache_dtype: str, longest: int) -> Facts:
    """Bytes of one copy of the weights, and of one row's cache at some lengths."""
    per_token = 2 * len(config["layers"]) * config["K"] * config["H"] * _BYTES[cache_dtype]
    lengths = sorted({length for length in _LENGTHS if length < longest} | {longest})
    return {
        "weights_bytes": weights,
        "cache_dtype": cache_dtype,
        "cache_bytes_per_token": per_token,
        "cache_bytes": {str(length): length * per_token for length in lengths},
    }


def _tokenizer(texts: Mapping[str, str], special: Special) -> Facts | None:
    """What the tokenizer is and adds, and which ids end a text; None where there is no tokenizer."""
    from tokenizers import Tokenizer

    if "tokenizer.json" not in texts:
        return None
    tokenizer = Tokenizer.from_str(texts["tokenizer.json"])

    def named(token_id: int | None) -> Facts | None:
        return None if token_id is None else {"id": token_id, "token": tokenizer.id_to_token(token_id)}

    return {
        "algorithm": type(tokenizer.model).__name__,
        "size": tokenizer.get_vocab_size(),
        "eos": [named(token_id) for token_id in special.eos],
        "bos": named(special.bos),
        "pad": named(special.pad),
        "adds": tokenizer.encode("").tokens,
        "chat_template": "chat_template.jinja" in texts
        or "chat_template" in json.loads(texts.get("tokenizer_config.json", "{}")),
    }


def _render(facts: Facts) -> Iterable[Any]:
    """The facts as tables."""
    model, memory = facts["model"], facts["memory"]
    grid = table("", "", title=f"{facts['kind']} {facts['path']}")
    grid.show_header = False
    for name, value in (
        *facts.get("built_for", {}).items(),
        ("family", model["family"]),
        ("layers", f"{model['layers']} ({_windows(model['layers_by_window'])})"),
        ("shape", "D {width}, F {feed_forward_width}, V {vocabulary}".format_map(model)),
        ("heads", "{query_heads} query, {key_value_heads} key/value, of {head_size}".format_map(model)),
        ("parameters", f"{facts['parameters']:,}{', tied embedding' if model['tied_embedding'] else ''}"),
        ("stored as", ", ".join(f"{dtype} ×{count}" for dtype, count in facts["source_dtypes"].items())),
        ("longest sequence", f"{model['max_positions']:,}"),
        ("weights", size(memory["weights_bytes"])),
        ("cache of a token", f"{memory['cache_bytes_per_token']:,} bytes, {memory['cache_dtype']}"),
        *((f"cache, {int(length):,} tokens", size(count)) for length, count in memory["cache_bytes"].items()),
        *_tokenizer_rows(facts["tokenizer"]),
        *(("refused", problem) for problem in facts.get("refused", ())),
    ):
        grid.add_row(name.replace("_", " "), str(value))
    yield grid
    if "quantization" in facts:
        yield quantization_table(facts["quantization"])
    if facts.get("cache", {}).get("quality"):
        yield cache_table(facts["cache"])
    if "verification" in facts:
        yield parity_table(facts["verification"])


def _tokenizer_rows(tokenizer: Facts | None) -> Iterable[tuple[str, str]]:
    if tokenizer is None:
        return [("tokenizer", "none: token ids only")]
    ends = [f"{entry['token']} ({entry['id']})" for entry in tokenizer["eos"]]
    return [
        ("tokenizer", f"{tokenizer['algorithm']}, {tokenizer['size']:,} tokens"),
        ("text ends at", ", ".join(ends) or "nothing: only limits and stop strings end a text"),
        ("adds by itself", " ".join(tokenizer["adds"]) or "nothing"),
        ("chat template", "yes" if tokenizer["chat_template"] else "no"),
    ]


def _windows(layers_by_window: Mapping[str, int]) -> str:
    return ", ".join(
        f"{count} see everything" if window == "all" else f"{count} see the last {window}"
        for window, count in layers_by_window.items()
    )
