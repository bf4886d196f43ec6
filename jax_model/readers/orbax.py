"""Orbax checkpoints: a tree of parameters of ours, of MaxText's or of Gemma's, saved from any number of devices.

Everything goes through orbax-checkpoint itself: the tree's metadata, and restoring one leaf as a NumPy array.  Leaves
that hold many layers are unpacked into a temporary file first, which is mapped: a layer costs a layer's memory.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from einops import rearrange
from numpy.typing import NDArray

from diptych.jax_model import tokenizers
from diptych.jax_model.config import Config
from diptych.jax_model.families import MULTIMODAL, Foreign
from diptych.jax_model.readers import TensorInfo, supported
from diptych.jax_model.readers.files import hashes, read_json
from diptych.jax_model.readers.huggingface import text_config, with_defaults
from diptych.jax_model.readers.orbax_layouts import EMBEDDINGS, EYES, Piece, pieces, published

__all__ = ["OrbaxCheckpoint", "find_item", "own_config", "own_tokenizer"]

CONFIG = "config.json"
_MARK = "_METADATA"  # what Orbax writes beside the leaves
_ITEMS = ("default", "items", "params", "state")  # what the tree is called among the items of a step
_STEP = re.compile(r"(?:.*_)?(\d+)")
_TRAINING = ("step", "opt_state")  # of a train state; no parameters
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}


class OrbaxCheckpoint:
    """An open Orbax checkpoint. See :class:`diptych.jax_model.readers.Checkpoint`."""

    format: Literal["orbax"] = "orbax"

    def __init__(self, path: Path) -> None:
        item = find_item(path)
        if item is None:
            raise FileNotFoundError(f"{path}: no Orbax checkpoint; expected its folder, a step's, or that of the steps")
        self.path = path
        self._item = item.resolve()  # Orbax itself wants absolute paths
        self._folder = _configured(path, self._item)
        self._tree, self._leaves = _read_tree(path, self._item)
        shapes = {name: tuple(info.shape) for name, (_, info) in self._leaves.items()}
        raw = read_json(self._folder / CONFIG)
        layout = published(shapes)
        self.config: Foreign | Config
        if layout is None:
            self.config = own_config(raw, self._folder / CONFIG)
            self.family = self.config.family
            self._pieces = {name: Piece(name, (), "", shape) for name, shape in shapes.items()}
        else:
            if (whole := MULTIMODAL.get(str(raw.get("model_type")))) is not None:
                raw = raw | text_config(raw, self._folder / CONFIG) | {"model_type": whole.family}
                shapes = {name: shape for name, shape in shapes.items() if not name.startswith(EYES)}
            self.family = supported(raw.get("model_type"), str(self._folder / CONFIG))
            config = _foreign(self.family, raw, shapes[EMBEDDINGS[layout]], self._folder / CONFIG)
            self.config = config
            self._pieces = pieces(layout, shapes, config, self.family)
        self.tensors = {
            name: TensorInfo(piece.shape, _dtype(self._leaves[piece.leaf][1])) for name, piece in self._pieces.items()
        }
        self._unpacked: dict[str, NDArray[Any]] = {}

    @functools.cached_property
    def tokenizer(self) -> tokenizers.TokenizerFiles:
        if isinstance(self.config, Config):
            return own_tokenizer(self._folder)
        return tokenizers.from_folder(self._folder)

    def read(self, name: str, rows: slice | None = None) -> NDArray[np.float32]:
        piece = self._pieces[name]
        if (dtype := self.tensors[name].dtype) not in _DTYPES.values():
            raise ValueError(f"{self.path}: {piece.leaf!r} is of type {dtype}; weights may be {', '.join(_DTYPES)}")
        stored = self._stack(piece.leaf)[piece.index] if piece.index else self._restore(piece.leaf)
        value = np.array(_arranged(stored, piece.layout)[rows or slice(None)], np.float32)
        if piece.factor != 1.0:
            value *= np.float32(piece.factor)
        if piece.offset:
            value += np.float32(piece.offset)
        return value

    def provenance(self) -> dict[str, Any]:
        files = hashes(path for path in self._folder.glob("*.json") if path.is_file())
        for path in sorted(path for path in self._item.rglob("*") if path.is_file()):
            (described,) = hashes([path]).values()
            files[path.relative_to(self._item.parent).as_posix()] = described
        return {"format": self.format, "files": files}

    def _stack(self, leaf: str) -> NDArray[Any]:
        """A leaf that is read piece by piece, mapped from a file that has no name and goes with this object."""
        if leaf not in self._unpacked:
            whole = self._restore(leaf)
            with tempfile.TemporaryFile() as file:
                mapped: NDArray[Any] = np.memmap(file, whole.dtype, "w+", shape=whole.shape)
            mapped[...] = whole
            self._unpacked[leaf] = mapped
        return self._unpacked[leaf]

    def _restore(self, leaf: str) -> NDArray[Any]:
        """One leaf; the others are asked for as placeholders, which cost nothing."""
        import orbax.checkpoint as ocp

        key, _ = self._leaves[leaf]
        wanted = jax.tree_util.tree_map_with_path(lambda at, _: 0 if at == key else ocp.PLACEHOLDER, self._tree)
        types = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), self._tree)
        with _quiet_orbax():
            tree = ocp.PyTreeCheckpointer().restore(
                self._item, args=ocp.args.PyTreeRestore(item=wanted, restore_args=types)
            )
        (value,) = (value for value in jax.tree.leaves(tree) if value is not ocp.PLACEHOLDER)
        return np.asarray(value)


def find_item(path: Path) -> Path | None:
    """The folder that holds a tree: ``path``, an item in it, or an item of the last step in it. None: there is none."""
    steps = [
        (int(found[1]), folder)
        for folder in (path.iterdir() if path.is_dir() else ())
        if folder.is_dir() and (found := _STEP.fullmatch(folder.name))
    ]
    for folder in (path, *(folder for _, folder in sorted(steps, reverse=True))):
        for item in (folder, *(folder / name for name in _ITEMS)):
            if (item / _MARK).is_file():
                return item
    return None


def own_config(raw: dict[str, Any], origin: Path) -> Config:
    """Our configuration out of ``Config.to_json``. Raises ValueError when it is none."""
    if "family" not in raw:
        raise ValueError(
            f"{origin}: this is not the configuration that 'diptych convert' writes, and the parameters are in no tree "
            "that is known with another's configuration (MaxText's has 'token_embedder', Gemma's 'embedder')"
        )
    supported(raw["family"], str(origin))
    try:
        return Config.from_json(raw)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"{origin}: not a configuration of this version ({error}): export or convert the model again"
        ) from None


def own_tokenizer(folder: Path) -> tokenizers.TokenizerFiles:
    """The tokenizer files that we wrote, as they are. Raises FileNotFoundError when there are none."""
    if not (folder / tokenizers.TOKENIZER).is_file():
        raise FileNotFoundError(f"{folder}: no {tokenizers.TOKENIZER}")
    names = (tokenizers.TOKENIZER, tokenizers.CONFIG, tokenizers.GENERATION, tokenizers.TEMPLATE)
    return tokenizers.TokenizerFiles(
        {name: (folder / name).read_text(encoding="utf-8") for name in names if (folder / name).is_file()}
    )


def _configured(path: Path, item: Path) -> Path:
    """The folder with the configuration: the tree's own, or one of the two above it."""
    for folder in (item, item.parent, item.parent.parent):
        if (folder / CONFIG).is_file():
            return folder
    raise FileNotFoundError(
        f"{path}: no {CONFIG} in {item} or the two folders above; expected what 'diptych convert' writes or, "
        "for a tree of MaxText or Gemma, the model's from Hugging Face (with its tokenizer files)"
    )


def _foreign(family: str, raw: dict[str, Any], embedding: tuple[int, ...], path: Path) -> Foreign:
    """Hugging Face's configuration; its vocabulary ends where the tree's does, which has not been padded yet."""
    V = raw.get("vocab_size")
    if isinstance(V, int) and embedding and embedding[0] < V:
        raw = raw | {"vocab_size": embedding[0]}
    return Foreign(with_defaults(family, raw, path), str(path))


def _read_tree(path: Path, item: Path) -> tuple[Any, dict[str, tuple[Any, Any]]]:
    """The tree of metadata, and its parameters by name: (place in the tree, metadata)."""
    import orbax.checkpoint as ocp

    try:
        with _quiet_orbax():
            found = ocp.PyTreeCheckpointer().metadata(item)
        tree = found.item_metadata.tree
    except Exception as error:  # whatever Orbax and TensorStore raise
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{path}: orbax-checkpoint cannot read the metadata of {item}: {reason}") from error
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {".".join(_key(part) for part in key).replace("/", "."): (key, info) for key, info in leaves}
    if any(name.startswith("params.") for name in named):
        named = {name: leaf for name, leaf in named.items() if name.partition(".")[0] not in _TRAINING}
    for _ in range(2):  # flax calls its collection "params", and a train state what holds the collections
        if all(name.startswith("params.") for name in named):
            named = {name.removeprefix("params."): leaf for name, leaf in named.items()}
    named = {name.removeprefix("transformer."): leaf for name, leaf in named.items()}  # Gemma's, beside its eyes
    if not named:
        raise ValueError(f"{path}: the tree in {item} has no leaves")
    return tree, named


def _key(part: Any) -> str:
    """A step of a path: a dict's key, a list's index or an object's attribute."""
    return str(jax.tree_util.keystr((part,), simple=True))


def _dtype(info: Any) -> str:
    name = str(info.dtype)
    return _DTYPES.get(name, name)


def _arranged(stored: NDArray[Any], layout: str) -> NDArray[Any]:
    arranged: NDArray[Any] = rearrange(stored, layout, **({"two": 2} if "two" in layout else {})) if layout else stored
    return arranged


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
    """Without its warnings about files that older versions did not write."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
