"""Every family knows every tensor of its checkpoints: one that is missing, extra, misnamed or misshapen is named.

Checkpoints here are names and shapes only, as all planning is done before the first weight is read.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.jax_model.families import FAMILIES, Foreign
from diptych.jax_model.params import configure, stream
from diptych.jax_model.readers import TensorInfo
from diptych.jax_model.readers.huggingface import with_defaults
from diptych.jax_model.tokenizers import TokenizerFiles
from reference import families

PATH = Path("model")
Shapes = Mapping[str, tuple[int, ...]]
FEW = settings(max_examples=20)


class Headers:
    """A checkpoint whose weights nobody may read."""

    path = PATH
    format: Literal["huggingface"] = "huggingface"

    def __init__(self, family: str, config: Foreign, shapes: Shapes) -> None:
        self.family, self.config = family, config
        self.tensors = {name: TensorInfo(shape, "F32") for name, shape in shapes.items()}

    @property
    def tokenizer(self) -> TokenizerFiles:
        raise AssertionError("a plan needs no tokenizer")

    def read(self, name: str, rows: slice | None = None) -> NoReturn:
        raise AssertionError(f"{name} should not be read")

    def provenance(self) -> dict[str, Any]:
        raise AssertionError("a plan needs no provenance")


@functools.cache
def known(name: str) -> tuple[str, Foreign, Shapes]:
    tiny = families.load(name)
    family = tiny.config["model_type"]
    return family, Foreign(with_defaults(family, tiny.config, PATH), str(PATH)), tiny.shapes


def needed(family: str, shapes: Shapes) -> list[str]:
    return [name for name in shapes if not any(fnmatch.fnmatchcase(name, one) for one in FAMILIES[family].ignored)]


def plan(family: str, config: Foreign, shapes: Shapes) -> None:
    """Everything that is checked before the first tensor is read."""
    checkpoint = Headers(family, config, shapes)
    stream(checkpoint, configure(checkpoint))


@pytest.mark.parametrize("name", families.CASES)
def test_as_published(name: str) -> None:
    plan(*known(name))


@pytest.mark.parametrize("name", families.CASES)
@FEW
@given(data=st.data())
def test_a_missing_tensor_is_named(name: str, data: st.DataObject) -> None:
    family, config, shapes = known(name)
    gone = data.draw(st.sampled_from(needed(family, shapes)))
    with pytest.raises(ValueError, match=r"model does not fit the family.*missing tensors") as raised:
        plan(family, config, {key: shape for key, shape in shapes.items() if key != gone})
    assert repr(gone) in str(raised.value)


@pytest.mark.parametrize("name", families.CASES)
@FEW
@given(data=st.data())
def test_an_extra_tensor_is_named(name: str, data: st.DataObject) -> None:
    """Beside another, as biases and further norms would be, and in a layer that should not be there."""
    family, config, shapes = known(name)
    beside = data.draw(st.sampled_from(needed(family, shapes)))
    extra = data.draw(st.sampled_from([f"{beside}.bias", f"{beside}_2", beside.replace(".0.", ".7.") + ".x"]))
    with pytest.raises(ValueError, match="tensors that no parameter uses") as raised:
        plan(family, config, {**shapes, extra: shapes[beside]})
    assert repr(extra) in str(raised.value)


@pytest.mark.parametrize("name", families.CASES)
@FEW
@given(data=st.data())
def test_a_renamed_tensor_is_named_twice(name: str, data: st.DataObject) -> None:
    family, config, shapes = known(name)
    old = data.draw(st.sampled_from(needed(family, shapes)))
    new = data.draw(st.sampled_from([f"{old}_", f"{old[:-1]}", old.upper()]))
    with pytest.raises(ValueError, match=r"missing tensors.*no parameter uses") as raised:
        plan(family, config, {new if key == old else key: shape for key, shape in shapes.items()})
    assert repr(old) in str(raised.value) and repr(new) in str(raised.value)


@pytest.mark.parametrize("name", families.CASES)
@FEW
@given(data=st.data())
def test_a_misshapen_tensor_is_named_with_both_shapes(name: str, data: st.DataObject) -> None:
    family, config, shapes = known(name)
    one = data.draw(st.sampled_from(needed(family, shapes)))
    axis = data.draw(st.integers(0, len(shapes[one]) - 1))
    wrong = tuple(size + (i == axis) for i, size in enumerate(shapes[one]))
    with pytest.raises(ValueError, match="tensors of the wrong shape") as raised:
        plan(family, config, {**shapes, one: wrong})
    assert f"{one!r} {wrong}, expected {shapes[one]}" in str(raised.value)
