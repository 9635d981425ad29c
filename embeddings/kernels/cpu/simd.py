"""Row arithmetic for compiled kernels: vector instructions and prefetch, which Numba does not emit by itself.

Numba must assume that two slices overlap and that a loop may be short, so a row of 16 floats costs it a scalar loop.
The intrinsics here load whole vectors before they store, so rows of an output must not overlap their inputs. Arrays are
flat and contiguous; ``at`` arguments are element numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_VECTOR_BYTES = 64
_CONTRACT = ("contract",)
_FLOAT, _HALF = ir.FloatType(), ir.HalfType()
# Arrays whose elements are converted when they are loaded: bfloat16 comes as uint16, float16 as int16.
STORED = (types.uint16, types.int16, types.float32, types.float64)
_BYTES = {"i16": 2, "half": 2, "float": 4, "double": 8}


def _make_prefetch(write: int) -> Any:
    @intrinsic
    def prefetch(typingctx, array, at, count):  # type: ignore[no-untyped-def]
        def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            at, count = arguments[1:]
            byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
            function = builder.module.globals.get("llvm.prefetch.p0")
            if function is None:
                kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
                function = ir.Function(builder.module, kind, "llvm.prefetch.p0")
            step = at.type(_VECTOR_BYTES * 8 // signature.args[0].dtype.bitwidth)
            with cgutils.for_range_slice(builder, at.type(0), count, step, at.type) as (i, _):
                pointer = builder.bitcast(builder.gep(data, [builder.add(at, i)]), byte)
                builder.call(function, [pointer, word(write), word(3), word(1)])
            return context.get_dummy_value()

        return types.void(array, types.int64, types.int64), emit

    return prefetch


prefetch_read = _make_prefetch(0)
"""prefetch_read(array, at, count): the cache lines of array[at : at + count] will be read soon."""
prefetch_write = _make_prefetch(1)
"""As prefetch_read; they will be written."""


class _Lanes:
    """Arithmetic on one vector of a row, or on one element of its tail."""

    def __init__(self, builder: ir.IRBuilder, real: ir.Type, width: int, index: ir.Value, dim: ir.Value) -> None:
        self.builder, self.real, self.width, self.index, self.dim = builder, real, width, index, dim
        self.kind = ir.VectorType(real, width) if width > 1 else real
        self.bytes = 4 if isinstance(real, ir.FloatType) else 8

    def _pointer(self, data: ir.Value, at: ir.Value) -> ir.Value:
        pointer = self.builder.gep(data, [self.builder.add(at, self.index)])
        return self.builder.bitcast(pointer, self._of(data.type.pointee).as_pointer())

    def _of(self, element: ir.Type) -> ir.Type:
        return ir.VectorType(element, self.width) if self.width > 1 else element

    def load(self, data: ir.Value, at: ir.Value) -> ir.Value:
        """In the type of the arithmetic, whatever is stored."""
        stored = data.type.pointee
        value = self.builder.load(self._pointer(data, at), align=_BYTES[str(stored)])
        if stored == self.real:
            return value
        if isinstance(stored, ir.IntType):
            # A bfloat16 is the upper half of a float32.
            bits = self._of(ir.IntType(32))
            shift = ir.Constant(bits, [16] * self.width if self.width > 1 else 16)
            value = self.builder.bitcast(self.builder.shl(self.builder.zext(value, bits), shift), self._of(_FLOAT))
            stored = _FLOAT
        if stored == self.real:
            return value
        wider = _BYTES[str(stored)] < self.bytes
        return (self.builder.fpext if wider else self.builder.fptrunc)(value, self.kind)

    def store(self, value: ir.Value, data: ir.Value, at: ir.Value) -> None:
        """In the type of the array, rounded to the nearest."""
        stored = data.type.pointee
        if isinstance(stored, ir.IntType):
            bits = self.builder.bitcast(self._to_float(value), self._of(ir.IntType(32)))
            odd = self.builder.and_(self.builder.lshr(bits, self._constant(16)), self._constant(1))
            self._store_upper(self.builder.add(bits, self.builder.add(odd, self._constant(0x7FFF))), data, at)
            return
        if stored != self.real:
            wider = _BYTES[str(stored)] > self.bytes
            value = (self.builder.fpext if wider else self.builder.fptrunc)(value, self._of(stored))
        self.builder.store(value, self._pointer(data, at), align=_BYTES[str(stored)])

    def store_row(self, value: ir.Value, data: ir.Value, at: ir.Value, words: ir.Value, words_at: ir.Value) -> None:
        """As :meth:`store`, but halves are rounded by the words: see embeddings.rounding."""
        stored = data.type.pointee
        if stored != _HALF and not isinstance(stored, ir.IntType):
            self.store(value, data, at)
            return
        word = self.builder.load(self._pointer(words, words_at), align=4)
        value = self._to_float(value)
        if stored == _HALF:
            self.store(self._rounded_to_half(value, word), data, at)
            return
        bits = self.builder.bitcast(value, self._of(ir.IntType(32)))
        self._store_upper(self.builder.add(bits, self.builder.and_(word, self._constant(0xFFFF))), data, at)

    def _rounded_to_half(self, value: ir.Value, word: ir.Value) -> ir.Value:
        """embeddings.rounding.to_float16, still as float32."""
        b, whole = self.builder, self._of(ir.IntType(32))
        bits = b.bitcast(value, whole)
        sign, size_bits = b.and_(bits, self._constant(0x80000000)), b.and_(bits, self._constant(0x7FFFFFFF))
        size, exponent = b.bitcast(size_bits, self.kind), b.lshr(size_bits, self._constant(23))
        exponent = b.select(b.icmp_unsigned("<", exponent, self._constant(113)), self._constant(113), exponent)
        unit = b.bitcast(b.shl(b.sub(exponent, self._constant(10)), self._constant(23)), self.kind)
        units = b.fdiv(size, unit)
        below = self.call("floor", units)
        place = b.fmul(b.fsub(units, below), ir.Constant(self.kind, self._repeated(float(2**32))))
        up = b.icmp_unsigned(">", b.fptoui(place, whole), word)
        rounded = b.fmul(b.fadd(below, b.uitofp(up, self.kind)), unit)
        finite = b.icmp_unsigned("<", size_bits, self._constant(0x7F800000))
        return b.select(finite, b.bitcast(b.or_(b.bitcast(rounded, whole), sign), self.kind), value)

    def _to_float(self, value: ir.Value) -> ir.Value:
        return value if self.real == _FLOAT else self.builder.fptrunc(value, self._of(_FLOAT))

    def _store_upper(self, bits: ir.Value, data: ir.Value, at: ir.Value) -> None:
        upper = self.builder.trunc(self.builder.lshr(bits, self._constant(16)), self._of(ir.IntType(16)))
        self.builder.store(upper, self._pointer(data, at), align=2)

    def _constant(self, number: int) -> ir.Value:
        return ir.Constant(self._of(ir.IntType(32)), self._repeated(number))

    def _repeated(self, number: float) -> Any:
        return [number] * self.width if self.width > 1 else number

    def spread(self, scalar: ir.Value) -> ir.Value:
        if self.width == 1:
            return scalar
        one = self.builder.insert_element(ir.Constant(self.kind, ir.Undefined), scalar, ir.IntType(32)(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), self.width), [0] * self.width)
        return self.builder.shuffle_vector(one, ir.Constant(self.kind, ir.Undefined), zeros)

    def add(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.fadd(a, b, flags=_CONTRACT)

    def sub(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.fsub(a, b, flags=_CONTRACT)

    def mul(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.fmul(a, b, flags=_CONTRACT)

    def div(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.fdiv(a, b)

    def sqrt(self, a: ir.Value) -> ir.Value:
        return self.call("sqrt", a)

    def sqrt_unless_same(self, known: ir.Value, a: ir.Value, b: ir.Value, v: ir.Value) -> ir.Value:
        """sqrt(v + b), given ``known`` = sqrt(v + a): where spread scalars a and b are equal, without another root."""
        first = [each if self.width == 1 else self.builder.extract_element(each, ir.IntType(32)(0)) for each in (a, b)]
        found = cgutils.alloca_once_value(self.builder, known)
        with self.builder.if_then(self.builder.fcmp_unordered("!=", *first), likely=False):
            self.builder.store(self.sqrt(self.add(v, b)), found)
        return self.builder.load(found)

    def call(self, operation: str, a: ir.Value) -> ir.Value:
        """LLVM's intrinsic of a floating-point operation."""
        name = f"llvm.{operation}.{f'v{self.width}' if self.width > 1 else ''}f{8 * self.bytes}"
        function = self.builder.module.globals.get(name)
        if function is None:
            function = ir.Function(self.builder.module, ir.FunctionType(self.kind, [self.kind]), name)
        return self.builder.call(function, [a])


def _for_row(builder: ir.IRBuilder, real: ir.Type, dim: ir.Value, emit: Callable[[_Lanes], None]) -> None:
    """Emits the arithmetic for each whole vector of [0, dim) and for each element after them."""
    width = _VECTOR_BYTES // (4 if isinstance(real, ir.FloatType) else 8)
    whole = builder.and_(dim, dim.type(-width))
    with cgutils.for_range_slice(builder, dim.type(0), whole, dim.type(width), dim.type) as (i, _):
        emit(_Lanes(builder, real, width, i, dim))
    with cgutils.for_range_slice(builder, whole, dim, dim.type(1), dim.type) as (i, _):
        emit(_Lanes(builder, real, 1, i, dim))


Body = Callable[[_Lanes, Sequence[tuple[ir.Value, ir.Value]], Sequence[ir.Value]], None]


def _emitter(num_arrays: int, body: Body) -> Any:
    """Code of ``f(array, at, array, at, ..., scalars, dim)``: ``body`` on each vector of the row."""

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        places = [
            (_data(context, builder, signature.args[2 * i], arguments[2 * i]), arguments[2 * i + 1])
            for i in range(num_arrays)
        ]
        scalars = cgutils.unpack_tuple(builder, arguments[-2])
        real = context.get_data_type(signature.args[-2][0])
        _for_row(builder, real, arguments[-1], lambda row: body(row, places, [row.spread(each) for each in scalars]))
        return context.get_dummy_value()

    return emit


def _data(context: Any, builder: ir.IRBuilder, kind: Any, array: ir.Value) -> ir.Value:
    """Where an array's elements start; Numba has no float16 to compute with, so int16 stands for it."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(data, _HALF.as_pointer()) if kind.dtype == types.int16 else data


def _one_row(body: Body) -> Any:
    @intrinsic
    def operation(typingctx, a, a_at, dim):  # type: ignore[no-untyped-def]
        assert (a.ndim, a.layout) == (1, "C"), a

        def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            place = _data(context, builder, signature.args[0], arguments[0]), arguments[1]
            real = context.get_data_type(signature.args[0].dtype)
            _for_row(builder, real, arguments[2], lambda row: body(row, [place], []))
            return context.get_dummy_value()

        return types.void(a, types.int64, types.int64), emit

    return operation


def _two_rows(body: Body) -> Any:
    @intrinsic
    def operation(typingctx, a, a_at, b, b_at, scalars, dim):  # type: ignore[no-untyped-def]
        _check(scalars, a, b)
        return types.void(a, types.int64, b, types.int64, scalars, types.int64), _emitter(2, body)

    return operation


def _three_rows(body: Body) -> Any:
    @intrinsic
    def operation(typingctx, a, a_at, b, b_at, c, c_at, scalars, dim):  # type: ignore[no-untyped-def]
        _check(scalars, a, b, c)
        signature = types.void(a, types.int64, b, types.int64, c, types.int64, scalars, types.int64)
        return signature, _emitter(3, body)

    return operation


def _update_of_row(body: Body) -> Any:
    """Of a weight, its state and its gradient; ``words`` round a weight of a half type, else nobody reads them."""

    @intrinsic
    def operation(typingctx, a, a_at, b, b_at, c, c_at, words, words_at, scalars, dim):  # type: ignore[no-untyped-def]
        _check(scalars, a, b, c)
        assert words.dtype == types.uint32, words
        signature = types.void(
            a, types.int64, b, types.int64, c, types.int64, words, types.int64, scalars, types.int64
        )  # fmt: skip
        return signature, _emitter(4, body)

    return operation


def _check(scalars: Any, *arrays: Any) -> None:
    real = scalars[0]
    assert all(array.ndim == 1 and array.layout == "C" for array in arrays), arrays
    assert all(array.dtype in (real, *STORED) for array in arrays), arrays
    assert all(scalar == real for scalar in scalars), scalars


def _clear(row: _Lanes, places: Any, scalars: Any) -> None:
    row.store(ir.Constant(row.kind, None), *places[0])


def _put_scaled(row: _Lanes, places: Any, scalars: Any) -> None:
    row.store(row.mul(scalars[0], row.load(*places[1])), *places[0])


def _add_scaled(row: _Lanes, places: Any, scalars: Any) -> None:
    row.store(row.add(row.load(*places[0]), row.mul(scalars[0], row.load(*places[1]))), *places[0])


def _as_of_now(
    row: _Lanes, weight: Any, moments: Any, factor: Any, moved: Any, within: Any, beside: Any,
    taken: Any, taken_within: Any, taken_beside: Any,
) -> ir.Value:  # fmt: skip
    data, at = moments
    m, v = row.load(data, at), row.load(data, row.builder.add(at, row.dim))
    bare = row.sqrt(row.add(v, within))
    root = row.add(bare, beside)
    taken_root = row.add(row.sqrt_unless_same(bare, within, taken_within, v), taken_beside)
    # moved / root - taken / taken_root in one division.
    share = row.div(row.sub(row.mul(moved, taken_root), row.mul(taken, root)), row.mul(root, taken_root))
    return row.sub(row.mul(factor, row.load(*weight)), row.mul(share, m))


def _put_moved(row: _Lanes, places: Any, scalars: Any) -> None:
    row.store(_as_of_now(row, places[1], places[2], *scalars), *places[0])


def _add_moved(row: _Lanes, places: Any, scalars: Any) -> None:
    row.store(row.add(row.load(*places[0]), _as_of_now(row, places[1], places[2], *scalars)), *places[0])


def _shifted(row: _Lanes, places: Any, scalars: Any) -> ir.Value:
    factor, share = scalars
    return row.sub(row.mul(factor, row.load(*places[1])), row.mul(share, row.load(*places[2])))


def _put_shifted(row: _Lanes, places: Any, scalars: Any) -> None:
    row.store(_shifted(row, places, scalars), *places[0])


def _add_shifted(row: _Lanes, places: Any, scalars: Any) -> None:
    row.store(row.add(row.load(*places[0]), _shifted(row, places, scalars)), *places[0])


def _descend(row: _Lanes, places: Any, scalars: Any) -> None:
    keep, rate = scalars
    theta = row.sub(row.mul(keep, row.load(*places[0])), row.mul(rate, row.load(*places[2])))
    row.store_row(theta, *places[0], *places[3])


def _adagrad(row: _Lanes, places: Any, scalars: Any) -> None:
    keep, rate, within, beside = scalars
    g = row.load(*places[2])
    total = row.add(row.load(*places[1]), row.mul(g, g))
    row.store(total, *places[1])
    step = row.div(row.mul(rate, g), row.add(row.sqrt(row.add(total, within)), beside))
    row.store_row(row.sub(row.mul(keep, row.load(*places[0])), step), *places[0], *places[3])


def _rmsprop(row: _Lanes, places: Any, scalars: Any) -> None:
    keep, keep2, gain2, rate, within, beside = scalars
    g = row.load(*places[2])
    v = row.add(row.mul(keep2, row.load(*places[1])), row.mul(row.mul(gain2, g), g))
    row.store(v, *places[1])
    step = row.div(row.mul(rate, g), row.add(row.sqrt(row.add(v, within)), beside))
    row.store_row(row.sub(row.mul(keep, row.load(*places[0])), step), *places[0], *places[3])


def _rowwise_adam(row: _Lanes, places: Any, scalars: Any) -> None:
    factor, share, keep1, gain1, pace = scalars
    before, g = row.load(*places[1]), row.load(*places[2])
    m = row.add(row.mul(keep1, before), row.mul(gain1, g))
    row.store(m, *places[1])
    theta = row.sub(row.mul(factor, row.load(*places[0])), row.mul(share, before))
    row.store_row(row.sub(theta, row.mul(pace, m)), *places[0], *places[3])


def _adam(row: _Lanes, places: Any, scalars: Any) -> None:
    _adam_step(row, places, _as_of_now(row, places[0], places[1], *scalars[:7]), *scalars[7:])


def _adam_cold(row: _Lanes, places: Any, scalars: Any) -> None:
    _adam_step(row, places, row.mul(scalars[0], row.load(*places[0])), *scalars[7:])


def _adam_lazy(row: _Lanes, places: Any, scalars: Any) -> None:
    _adam_step(row, places, row.mul(scalars[0], row.load(*places[0])), *scalars[7:15])


def _adam_step(
    row: _Lanes, places: Any, theta: Any, keep1: Any, keep2: Any, gain1: Any, gain2: Any, rate: Any, root: Any,
    within: Any, beside: Any, lead: Any = None, lead_within: Any = None, lead_beside: Any = None,
) -> None:  # fmt: skip
    (data, at), g = places[1], row.load(*places[2])
    v_at = row.builder.add(at, row.dim)
    m = row.add(row.mul(keep1, row.load(data, at)), row.mul(gain1, g))
    v = row.add(row.mul(keep2, row.load(data, v_at)), row.mul(row.mul(gain2, g), g))
    row.store(m, data, at)
    row.store(v, data, v_at)
    theta = row.sub(theta, row.div(row.mul(rate, m), row.add(row.mul(row.sqrt(row.add(v, within)), root), beside)))
    if lead is not None:
        ahead = row.div(row.mul(lead, m), row.add(row.sqrt(row.add(v, lead_within)), lead_beside))
        theta = row.sub(theta, ahead)
    row.store_row(theta, *places[0], *places[3])


def _sum_of_squares(builder: ir.IRBuilder, real: ir.Type, data: ir.Value, at: ir.Value, dim: ir.Value) -> ir.Value:
    """In lanes of their own, added up pairwise: float64 whatever the row is."""
    wide = ir.DoubleType()
    lanes = _VECTOR_BYTES // 8
    kind = ir.VectorType(wide, lanes)
    sums = cgutils.alloca_once_value(builder, ir.Constant(kind, [0.0] * lanes))
    rest = cgutils.alloca_once_value(builder, ir.Constant(wide, 0.0))
    whole = builder.and_(dim, dim.type(-lanes))
    with cgutils.for_range_slice(builder, dim.type(0), whole, dim.type(lanes), dim.type) as (i, _):
        row = _Lanes(builder, real, lanes, i, dim)
        value = row.load(data, at)
        value = value if real == wide else builder.fpext(value, kind)
        builder.store(builder.fadd(builder.load(sums), builder.fmul(value, value)), sums)
    with cgutils.for_range_slice(builder, whole, dim, dim.type(1), dim.type) as (i, _):
        value = builder.load(builder.gep(data, [builder.add(at, i)]))
        value = value if real == wide else builder.fpext(value, wide)
        builder.store(builder.fadd(builder.load(rest), builder.fmul(value, value)), rest)
    parts = [builder.extract_element(builder.load(sums), ir.IntType(32)(i)) for i in range(lanes)]
    while len(parts) > 1:
        parts = [builder.fadd(parts[i], parts[i + len(parts) // 2]) for i in range(len(parts) // 2)]
    return builder.fadd(parts[0], builder.load(rest))


@intrinsic
def sum_of_squares(typingctx, array, at, dim):  # type: ignore[no-untyped-def]
    """sum_of_squares(row, at, dim): |row|^2 in float64."""

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        real = context.get_data_type(signature.args[0].dtype)
        return _sum_of_squares(builder, real, data, arguments[1], arguments[2])

    return types.float64(array, types.int64, types.int64), emit


def _single(builder: ir.IRBuilder, real: ir.Type) -> _Lanes:
    """One element, at the place that it is given."""
    index = ir.IntType(64)
    return _Lanes(builder, real, 1, index(0), index(1))


@intrinsic
def load_one(typingctx, array, at, like):  # type: ignore[no-untyped-def]
    """load_one(array, at, like): array[at] in the type of ``like``, whatever is stored."""

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        place = _data(context, builder, signature.args[0], arguments[0]), arguments[1]
        return _single(builder, context.get_data_type(like)).load(*place)

    return like(array, types.int64, like), emit


@intrinsic
def store_one(typingctx, array, at, value):  # type: ignore[no-untyped-def]
    """store_one(array, at, value): array[at] = value, rounded to the nearest."""

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        place = _data(context, builder, signature.args[0], arguments[0]), arguments[1]
        _single(builder, context.get_data_type(value)).store(arguments[2], *place)
        return context.get_dummy_value()

    return types.void(array, types.int64, value), emit


clear = _one_row(_clear)
"""clear(out, at, dim): out = 0."""
put_scaled, add_scaled = _two_rows(_put_scaled), _two_rows(_add_scaled)
"""put_scaled(out, at, row, at, (factor,), dim): out = factor row; add_scaled: out += factor row."""
put_moved, add_moved = _three_rows(_put_moved), _three_rows(_add_moved)
"""put_moved(out, at, weight, at, [m | v], at, (factor, moved, within, beside, taken, taken_within,
taken_beside), dim):

out = factor w - moved m / (sqrt(v + within) + beside) + taken m / (sqrt(v + taken_within) + taken_beside).
add_moved: out += that.
"""
put_shifted, add_shifted = _three_rows(_put_shifted), _three_rows(_add_shifted)
"""put_shifted(out, at, weight, at, m, at, (factor, share), dim): out = factor w - share m; add_shifted: out += that."""
descend = _update_of_row(_descend)
"""descend(weight, at, weight, at, grad, at, words, at, (keep, rate), dim): w = keep w - rate g."""
adagrad = _update_of_row(_adagrad)
"""adagrad(weight, at, sum, at, grad, at, words, at, (keep, rate, within, beside), dim):

sum += g^2; w = keep w - rate g / (sqrt(sum + within) + beside).
"""
rmsprop = _update_of_row(_rmsprop)
"""rmsprop(weight, at, v, at, grad, at, words, at, (keep, keep2, gain2, rate, within, beside), dim):

v = keep2 v + gain2 g^2; w = keep w - rate g / (sqrt(v + within) + beside).
"""
rowwise_adam = _update_of_row(_rowwise_adam)
"""rowwise_adam(weight, at, m, at, grad, at, words, at, (factor, share, keep1, gain1, pace), dim):

theta = factor w - share m; m = keep1 m + gain1 g; w = theta - pace m.
"""
adam, adam_cold, adam_lazy = _update_of_row(_adam), _update_of_row(_adam_cold), _update_of_row(_adam_lazy)
"""adam(weight, at, [m | v], at, grad, at, words, at, (factor, moved, idle_within, idle_beside, taken, taken_within,
taken_beside, keep1, keep2, gain1, gain2, rate, root, within, beside, lead, lead_within, lead_beside), dim):

theta = factor w - moved m / (sqrt(v + idle_within) + idle_beside) + taken m / (sqrt(v + taken_within) + taken_beside);
m = keep1 m + gain1 g; v = keep2 v + gain2 g^2;
w = theta - rate m / (root sqrt(v + within) + beside) - lead m / (sqrt(v + lead_within) + lead_beside).
adam_cold: moved = taken = 0. adam_lazy: lead = 0, too.
"""
