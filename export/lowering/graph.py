"""Building an ONNX graph: named values, shared constants, symbolic shapes.

Two habits keep graphs small.  A value may be *narrower* than the JAX value it stands for, as long as it broadcasts to
it, so broadcasts cost nothing until an operator needs the full shape.  And every operator is pure, so asking twice
for the same operator on the same inputs gives the same node: there are no common subexpressions to eliminate
afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from diptych.export.tracing import Aval, Dim, dim_expression, is_static

__all__ = ["GraphBuilder", "Operand", "shape_of"]

Operand = ir.Value | np.ndarray
LARGE = 1024  # bytes from which a constant goes to the weights file, under a name


class GraphBuilder:
    """A graph under construction. ``scope`` prefixes the names of new nodes, as in ``layers.0/attn/MatMul``."""

    def __init__(self, name: str, opset: int) -> None:
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name=name)
        self.large_constants: dict[str, np.ndarray] = {}
        self.scope = ""
        self._constants: dict[tuple[Any, ...], ir.Value] = {}
        self._nodes: dict[tuple[Any, ...], tuple[ir.Value, ...]] = {}
        self._dims: dict[str, ir.Value] = {}
        self._reshaped: dict[ir.Value, tuple[ir.Value, tuple[Dim, ...]]] = {}
        self._names: dict[str, int] = {}

    # Values that enter and leave.

    def add_input(self, name: str, aval: Aval) -> ir.Value:
        """A graph input; its plain symbolic dimensions become readable."""
        value = _value(name, aval)
        self.graph.inputs.append(value)
        for axis, dim in enumerate(aval.shape):
            if not is_static(dim) and str(dim).isidentifier() and str(dim) not in self._dims:
                with self.shared():
                    self._dims[str(dim)] = self.op("Shape", value, like=_INT64_1, start=axis, end=axis + 1)
        return value

    def add_parameter(self, name: str, aval: Aval) -> ir.Value:
        """An initializer without data: whoever saves the graph says where its bytes are."""
        value = _value(name, aval)
        self.graph.initializers[name] = value
        return value

    def view(self, value: Operand, aval: Aval) -> ir.Value:
        """The same bytes of a parameter as another type; named ``path:type`` for whoever saves the graph."""
        assert isinstance(value, ir.Value) and value.name in self.graph.initializers, "only parameters have other views"
        name = f"{value.name}:{aval.dtype.name}"
        return self.graph.initializers[name] if name in self.graph.initializers else self.add_parameter(name, aval)

    def add_output(self, name: str, value: Operand, aval: Aval) -> None:
        """Name ``value`` as a graph output; an input or initializer is passed on by an Identity."""
        full = self.full(value, aval)
        if full.producer() is None or full.is_graph_output():
            full = self._node("Identity", (full,), "", {}, [aval])[0]
        full.name = name
        self.graph.outputs.append(full)

    # Operators.

    def op(self, op_type: str, *inputs: Operand | None, like: Aval, domain: str = "", **attributes: Any) -> ir.Value:
        """One operator with one output of shape and dtype ``like``; arrays become constants."""
        return self.ops(op_type, *inputs, like=[like], domain=domain, **attributes)[0]

    def ops(
        self, op_type: str, *inputs: Operand | None, like: Sequence[Aval | None], domain: str = "", **attributes: Any
    ) -> tuple[ir.Value, ...]:
        """One operator with several outputs; None in ``like`` is an output that nobody asked for."""
        values = tuple(self.constant(x) if isinstance(x, np.ndarray) else x for x in inputs)
        key = (domain, op_type, tuple(map(id, values)), repr(sorted(attributes.items())))
        if key not in self._nodes:
            self._nodes[key] = self._node(op_type, values, domain, attributes, like)
        return self._nodes[key]

    def _node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        domain: str,
        attributes: dict[str, Any],
        like: Sequence[Aval | None],
    ) -> tuple[ir.Value, ...]:
        name = self._unique(f"{self.scope}/{op_type}" if self.scope else op_type)
        outputs = [
            ir.Value(name="") if aval is None else _value(name if i == 0 else f"{name}:{i}", aval)
            for i, aval in enumerate(like)
        ]
        self.graph.append(ir.node(op_type, inputs, attributes, domain=domain, outputs=outputs, name=name))
        if domain:
            self.graph.opset_imports.setdefault(domain, 1)
        return tuple(outputs)

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Nodes outside all scopes: what every layer asks for belongs to the graph, not to the first that asked."""
        scope, self.scope = self.scope, "shared"
        try:
            yield
        finally:
            self.scope = scope

    def _unique(self, name: str) -> str:
        n = self._names[name] = self._names.get(name, -1) + 1
        return f"{name}.{n}" if n else name

    # Constants.

    def constant(self, array: np.ndarray, name: str = "") -> ir.Value:
        """An initializer; equal arrays are one. Large ones are named after their content and go to the weights file."""
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self._new_constant(np.ascontiguousarray(array).reshape(array.shape), name)
        return self._constants[key]

    def _new_constant(self, array: np.ndarray, name: str) -> ir.Value:
        if array.nbytes >= LARGE:
            digest = hashlib.sha256(f"{array.dtype} {array.shape} ".encode() + array.tobytes()).hexdigest()[:12]
            name = f"constants.{name or 'array'}.{digest}"
            self.large_constants[name] = array
            return self.add_parameter(name, Aval(array.shape, array.dtype))
        value = _value(self._unique(name or "constant"), Aval(array.shape, array.dtype))
        value.const_value = ir.Tensor(array, name=value.name)
        self.graph.initializers[str(value.name)] = value
        return value

    # Shapes.

    def full(self, x: Operand, aval: Aval) -> ir.Value:
        """``x`` in the full shape of ``aval``."""
        value = self.constant(x) if isinstance(x, np.ndarray) else x
        if _same(shape_of(value), aval.shape):
            return value
        return self.op("Expand", value, self.shape(aval.shape), like=aval)

    def dim(self, dim: Dim) -> ir.Value:
        """A dimension as an int64 [1] value."""
        if is_static(dim):
            return self.constant(np.array([dim], np.int64))
        if str(dim) not in self._dims:
            with self.shared():
                self._dims[str(dim)] = dim_expression(dim, lambda name: _DimValue(self, self._dims[name])).value
        return self._dims[str(dim)]

    def shape(self, dims: Sequence[Dim]) -> ir.Value:
        """Several dimensions as one int64 vector."""
        if all(map(is_static, dims)):
            return self.constant(np.array(dims, np.int64))
        with self.shared():
            return self.op("Concat", *map(self.dim, dims), like=Aval((len(dims),), np.dtype(np.int64)), axis=0)

    def cast(self, x: Operand, dtype: Any) -> Operand:
        """``x`` in another dtype; free when it has it already or is a constant."""
        if isinstance(x, np.ndarray):
            return x.astype(dtype)
        if x.dtype == ir.DataType.from_numpy(np.dtype(dtype)):
            return x
        return self.op(
            "Cast", x, like=Aval(shape_of(x), np.dtype(dtype)), to=int(ir.DataType.from_numpy(np.dtype(dtype)))
        )

    def reshape(self, x: Operand, old: Sequence[Dim], new: Sequence[Dim]) -> Operand:
        """Reshape without shape arithmetic where 0 (same as the input's) and one -1 can say it."""
        if isinstance(x, np.ndarray) and all(map(is_static, new)):
            return x.reshape(tuple(new))
        value = self.constant(x) if isinstance(x, np.ndarray) else x
        value, old = self._reshaped.get(value, (value, tuple(old)))
        if _same(old, new):
            return value
        result = self.op("Reshape", value, self._target(old, new), like=Aval(tuple(new), _dtype(value)))
        self._reshaped[result] = (value, tuple(old))
        return result

    def _target(self, old: Sequence[Dim], new: Sequence[Dim]) -> ir.Value:
        unknown = [
            i for i, dim in enumerate(new) if not is_static(dim) and not (i < len(old) and _same(old[i : i + 1], [dim]))
        ]
        if len(unknown) > 1:
            return self.shape(new)
        spec = [int(dim) if is_static(dim) else 0 for dim in new]
        for i in unknown:
            spec[i] = -1
        return self.constant(np.array(spec, np.int64))

    def transpose(self, x: Operand, old: Sequence[Dim], permutation: Sequence[int]) -> Operand:
        """Transpose; a Reshape, or nothing, when only axes of size one change places."""
        if isinstance(x, np.ndarray):
            return x.transpose(tuple(permutation))
        new = [old[i] for i in permutation]
        moved = [i for i in permutation if not (is_static(old[i]) and old[i] == 1)]
        if moved == sorted(moved):
            return self.reshape(x, old, new)
        return self.op("Transpose", x, like=Aval(tuple(new), _dtype(x)), perm=list(permutation))

    def unsqueeze(self, x: Operand, axes: Sequence[int]) -> Operand:
        """Insert axes of size one; ``axes`` count in the result."""
        if isinstance(x, np.ndarray):
            return np.expand_dims(x, tuple(axes))
        if not axes:
            return x
        shape = list(shape_of(x))
        for axis in sorted(axes):
            shape.insert(axis, 1)
        if x in self._reshaped and _same(self._reshaped[x][1], shape):
            return self._reshaped[x][0]
        return self.op("Unsqueeze", x, np.array(axes, np.int64), like=Aval(tuple(shape), _dtype(x)))

    def finish(self, metadata: dict[str, str] | None = None) -> ir.Model:
        """The model, without nodes and initializers that nothing reads."""
        for node in reversed(list(self.graph)):
            if not any(out.uses() or out.is_graph_output() for out in node.outputs):
                self.graph.remove(node, safe=True)
        for name, value in list(self.graph.initializers.items()):
            if not value.uses() and not value.is_graph_output():
                del self.graph.initializers[name]
                self.large_constants.pop(name, None)
        return ir.Model(self.graph, ir_version=10, producer_name="diptych", metadata_props=metadata or {})


class _DimValue:
    """Integer arithmetic on dimensions, emitted as nodes."""

    def __init__(self, builder: GraphBuilder, value: ir.Value) -> None:
        self.builder, self.value = builder, value

    def _apply(self, op_type: str, other: Any, *, swapped: bool = False) -> _DimValue:
        value = other.value if isinstance(other, _DimValue) else self.builder.constant(np.array([int(other)], np.int64))
        operands = (value, self.value) if swapped else (self.value, value)
        return _DimValue(self.builder, self.builder.op(op_type, *operands, like=_INT64_1))

    def __add__(self, other: Any) -> _DimValue:
        return self._apply("Add", other)

    def __sub__(self, other: Any) -> _DimValue:
        return self._apply("Sub", other)

    def __rsub__(self, other: Any) -> _DimValue:
        return self._apply("Sub", other, swapped=True)

    def __mul__(self, other: Any) -> _DimValue:
        return self._apply("Mul", other)

    def __floordiv__(self, other: Any) -> _DimValue:  # dimensions are not negative: Div truncates to the same
        return self._apply("Div", other)

    def __mod__(self, other: Any) -> _DimValue:
        return self._apply("Mod", other)

    def __divmod__(self, other: Any) -> tuple[_DimValue, _DimValue]:
        return self // other, self % other

    __radd__, __rmul__ = __add__, __mul__


_INT64_1 = Aval((1,), np.dtype(np.int64))


def _value(name: str, aval: Aval) -> ir.Value:
    shape = ir.Shape([int(dim) if is_static(dim) else str(dim) for dim in aval.shape])
    return ir.Value(name=name, shape=shape, type=ir.TensorType(ir.DataType.from_numpy(aval.dtype)))


def shape_of(x: Operand) -> tuple[Dim, ...]:
    """The shape that an operand has in the graph, which may be narrower than its aval; symbolic ones are strings."""
    assert x.shape is not None, f"{x!r} has no shape"
    return tuple(dim if isinstance(dim, int) else str(dim.value) for dim in x.shape)


def _dtype(value: ir.Value) -> np.dtype[Any]:
    assert value.dtype is not None, f"{value.name} has no dtype"
    return np.dtype(value.dtype.numpy())


def _same(one: Sequence[Dim], other: Sequence[Dim]) -> bool:
    return len(one) == len(other) and all(str(a) == str(b) for a, b in zip(one, other, strict=True))
