"""How parameters are stored: which stay arrays of floats and which become blocks of integers, by whose rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
from einops import rearrange
from numpy.typing import NDArray

from diptych.jax_model import blocks
from diptych.jax_model.blocks import Blocks
from diptych.jax_model.config import Config
from diptych.jax_model.families import FAMILIES
from diptych.jax_model.families.table import Parameter, Source, expand
from diptych.jax_model.readers import Checkpoint, StoresBlocks

__all__ = ["Form", "Quantizer", "Storage", "from_json", "keep", "kept", "matrices", "to_json"]


@dataclass(frozen=True)
class Form:
    """Blocks without their numbers: bits of an integer, integers of a block, and what stands beside the scales."""

    bits: int
    block: int
    shifted: bool = False
    zero_points: bool = False

    def abstract(self, outputs: int, inputs: int) -> Blocks:
        """The shapes of a matrix stored so."""
        return blocks.abstract(
            outputs, inputs, self.bits, self.block, shifted=self.shifted, zero_points=self.zero_points
        )


# Parameters that are blocks, by path: one form, or one for each of several parts that cannot be one matrix.
Storage: TypeAlias = Mapping[str, tuple[Form, ...]]

# What makes blocks of a parameter's matrix of floats [out, in].
Quantizer: TypeAlias = Callable[[str, NDArray[np.float32], Form], Blocks]

# What the model applies or looks up through blocks: a parameter of the model or of a layer, and the matrices in it.
_MATRICES = {
    "embed": ("embed",),
    "head": ("head",),
    "attn.qkv": ("attn.q", "attn.k", "attn.v"),
    "attn.out": ("attn.out",),
    "mlp.gate_up": ("mlp.gate", "mlp.up"),
    "mlp.up": ("mlp.up",),
    "mlp.down": ("mlp.down",),
}


def matrices(path: str) -> list[str]:
    """The matrices in a parameter that may be blocks, by names of their own: ``layers.0.attn.q`` and so on.

    In any other there are none: the model has no operation on blocks where it uses it.
    """
    *layer, name = path.split(".", 2)
    return [".".join((*layer, part)) for part in _MATRICES.get(name, ())]


def to_json(storage: Storage) -> dict[str, Any]:
    """As manifests hold it: the forms of each parameter."""
    return {path: [asdict(form) for form in forms] for path, forms in storage.items()}


def from_json(data: Any) -> Storage:
    """Inverse of :func:`to_json`. Raises ValueError when it is malformed."""
    try:
        return {str(path): tuple(Form(**form) for form in forms) for path, forms in data.items()}
    except (AttributeError, TypeError) as error:
        raise ValueError(f"forms of blocks are malformed: {error}") from None


def keep(checkpoint: Checkpoint, config: Config) -> Storage:
    """The storage that carries the checkpoint's own blocks with nothing lost; what has none stays float."""
    storage: dict[str, tuple[Form, ...]] = {}
    if not isinstance(checkpoint, StoresBlocks):
        return storage
    for parameter in expand(FAMILIES[config.family].table, config):
        forms = _own_forms(parameter, checkpoint, config)
        if forms and matrices(parameter.path):
            storage[parameter.path] = forms
    return storage


def _own_forms(parameter: Parameter, checkpoint: Checkpoint, config: Config) -> tuple[Form, ...]:
    filling = parameter.filling(checkpoint.format)
    if filling is None or filling.join is not None:
        return ()
    forms = []
    for source in filling.sources:
        info = checkpoint.tensors.get(source.name)
        order = row_order(source.layout, config.sizes(parameter.layer))
        whole = source.part is None and not source.offset
        if info is None or info.dtype not in blocks.FORMATS or order is None or not whole:
            return ()
        form = blocks.FORMATS[info.dtype]
        forms.append(Form(form.bits, form.block, form.shifted))
    if len({(form.bits, form.block) for form in forms}) == 1:
        return (Form(forms[0].bits, forms[0].block, any(form.shifted for form in forms)),)
    return tuple(forms)


def kept(
    checkpoint: Checkpoint, sources: tuple[Source, ...], forms: tuple[Form, ...], sizes: Mapping[str, int]
) -> Iterator[Blocks]:
    """The checkpoint's blocks of one parameter, one for each form."""
    assert isinstance(checkpoint, StoresBlocks), f"{checkpoint.path} holds no blocks"
    parts = []
    for source in sources:
        order = row_order(source.layout, sizes)
        raw = checkpoint.raw(source.name)
        parts.append(blocks.from_gguf(raw if order is None else raw[order], checkpoint.tensors[source.name].dtype))
    if len(forms) == len(parts):
        yield from parts
    else:
        yield blocks.concatenate(parts)


def row_order(layout: str, sizes: Mapping[str, int]) -> NDArray[np.int64] | None:
    """Which stored row is which of ours, where a layout moves whole rows of a stored matrix [out, in].

    None for a layout that does anything else: blocks lie along the inputs and cannot be taken apart.
    """
    left, right = (_groups(side) for side in layout.split("->"))
    if len(left) != 2 or len(right) != 2:
        return None
    outputs = right[1] if right[0] == left[1] else right[0] if right[1] == left[1] else None
    if outputs is None or sorted(outputs.split()) != sorted(left[0].split()):
        return None
    letters = {letter: sizes[letter] for letter in left[0].split()}
    rows = np.arange(np.prod(list(letters.values())))
    ordered: NDArray[np.int64] = rearrange(rows, f"({left[0]}) -> ({outputs})", **letters)
    return ordered


def _groups(side: str) -> list[str]:
    """The axes of one side of a layout: ``"d (n h)"`` gives ``["d", "n h"]``."""
    groups, inside = [], False
    for word in side.replace("(", " ( ").replace(")", " ) ").split():
        if word in "()":
            inside = word == "("
            if inside:
                groups.append("")
        elif inside:
            groups[-1] = f"{groups[-1]} {word}".strip()
        else:
            groups.append(word)
    return groups
