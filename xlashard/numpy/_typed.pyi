"""What type checkers know of `xlashard.numpy` where it differs from `jax.numpy`: it gives Arrays.

Functions that give tuples are known by the types of `jax.numpy`. The tests compare the lists with
those of JAX's own stub.
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol, overload

import jax
import jax.numpy as _jnp
from jax.lax import PrecisionLike
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from xlashard.core.array import Array

def _giving_arrays[**P](function: Callable[P, jax.Array], /) -> Callable[P, Array]: ...

class _Binary(Protocol):
    @property
    def nin(self) -> int: ...
    @property
    def nout(self) -> int: ...
    @property
    def nargs(self) -> int: ...
    @property
    def identity(self) -> bool | int | float: ...
    def __call__(self, x: ArrayLike, y: ArrayLike, /) -> Array: ...
    def reduce(
        self,
        a: ArrayLike,
        /,
        *,
        axis: int | None = 0,
        dtype: DTypeLike | None = None,
        out: None = None,
        keepdims: bool = False,
        initial: ArrayLike | None = None,
        where: ArrayLike | None = None,
    ) -> Array: ...
    def accumulate(
        self,
        a: ArrayLike,
        /,
        *,
        axis: int = 0,
        dtype: DTypeLike | None = None,
        out: None = None,
    ) -> Array: ...
    def at(
        self, a: ArrayLike, indices: Any, b: ArrayLike | None = None, /, *, inplace: bool = True
    ) -> Array: ...
    def reduceat(
        self,
        a: ArrayLike,
        indices: Any,
        *,
        axis: int = 0,
        dtype: DTypeLike | None = None,
        out: None = None,
    ) -> Array: ...
    def outer(self, a: ArrayLike, b: ArrayLike, /) -> Array: ...

@overload
def where(condition: ArrayLike, x: ArrayLike, y: ArrayLike, /) -> Array: ...
@overload
def where(
    condition: ArrayLike,
    /,
    *,
    size: int | None = None,
    fill_value: ArrayLike | tuple[ArrayLike, ...] | None = None,
) -> tuple[Array, ...]: ...
def einsum(
    subscripts: Any,
    /,
    *operands: Any,
    out: None = None,
    optimize: str | bool | list[tuple[int, ...]] = "auto",
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> Array: ...
@overload
def atleast_1d(x: ArrayLike, /) -> Array: ...
@overload
def atleast_1d(x: ArrayLike, y: ArrayLike, /, *arys: ArrayLike) -> list[Array]: ...
@overload
def atleast_2d(x: ArrayLike, /) -> Array: ...
@overload
def atleast_2d(x: ArrayLike, y: ArrayLike, /, *arys: ArrayLike) -> list[Array]: ...
@overload
def atleast_3d(x: ArrayLike, /) -> Array: ...
@overload
def atleast_3d(x: ArrayLike, y: ArrayLike, /, *arys: ArrayLike) -> list[Array]: ...
@overload
def linspace(
    start: ArrayLike,
    stop: ArrayLike,
    num: int = 50,
    endpoint: bool = True,
    retstep: Literal[False] = False,
    dtype: DTypeLike | None = None,
    axis: int = 0,
    *,
    device: Any = None,
) -> Array: ...
@overload
def linspace(
    start: ArrayLike,
    stop: ArrayLike,
    num: int = 50,
    endpoint: bool = True,
    *,
    retstep: Literal[True],
    dtype: DTypeLike | None = None,
    axis: int = 0,
    device: Any = None,
) -> tuple[Array, Array]: ...

add: _Binary
bitwise_and: _Binary
bitwise_or: _Binary
bitwise_xor: _Binary
logaddexp: _Binary
logaddexp2: _Binary
logical_and: _Binary
logical_or: _Binary
logical_xor: _Binary
maximum: _Binary
minimum: _Binary
multiply: _Binary
subtract: _Binary

abs = _giving_arrays(_jnp.abs)
absolute = _giving_arrays(_jnp.absolute)
acos = _giving_arrays(_jnp.acos)
acosh = _giving_arrays(_jnp.acosh)
all = _giving_arrays(_jnp.all)
allclose = _giving_arrays(_jnp.allclose)
amax = _giving_arrays(_jnp.amax)
amin = _giving_arrays(_jnp.amin)
angle = _giving_arrays(_jnp.angle)
any = _giving_arrays(_jnp.any)
append = _giving_arrays(_jnp.append)
apply_along_axis = _giving_arrays(_jnp.apply_along_axis)
apply_over_axes = _giving_arrays(_jnp.apply_over_axes)
arange = _giving_arrays(_jnp.arange)
arccos = _giving_arrays(_jnp.arccos)
arccosh = _giving_arrays(_jnp.arccosh)
arcsin = _giving_arrays(_jnp.arcsin)
arcsinh = _giving_arrays(_jnp.arcsinh)
arctan = _giving_arrays(_jnp.arctan)
arctan2 = _giving_arrays(_jnp.arctan2)
arctanh = _giving_arrays(_jnp.arctanh)
argmax = _giving_arrays(_jnp.argmax)
argmin = _giving_arrays(_jnp.argmin)
argpartition = _giving_arrays(_jnp.argpartition)
argsort = _giving_arrays(_jnp.argsort)
argwhere = _giving_arrays(_jnp.argwhere)
around = _giving_arrays(_jnp.around)
array = _giving_arrays(_jnp.array)
array_equal = _giving_arrays(_jnp.array_equal)
array_equiv = _giving_arrays(_jnp.array_equiv)
asarray = _giving_arrays(_jnp.asarray)
asin = _giving_arrays(_jnp.asin)
asinh = _giving_arrays(_jnp.asinh)
astype = _giving_arrays(_jnp.astype)
atan = _giving_arrays(_jnp.atan)
atan2 = _giving_arrays(_jnp.atan2)
atanh = _giving_arrays(_jnp.atanh)
bartlett = _giving_arrays(_jnp.bartlett)
bincount = _giving_arrays(_jnp.bincount)
bitwise_count = _giving_arrays(_jnp.bitwise_count)
bitwise_invert = _giving_arrays(_jnp.bitwise_invert)
bitwise_left_shift = _giving_arrays(_jnp.bitwise_left_shift)
bitwise_not = _giving_arrays(_jnp.bitwise_not)
bitwise_right_shift = _giving_arrays(_jnp.bitwise_right_shift)
blackman = _giving_arrays(_jnp.blackman)
block = _giving_arrays(_jnp.block)
broadcast_to = _giving_arrays(_jnp.broadcast_to)
cbrt = _giving_arrays(_jnp.cbrt)
ceil = _giving_arrays(_jnp.ceil)
choose = _giving_arrays(_jnp.choose)
clip = _giving_arrays(_jnp.clip)
column_stack = _giving_arrays(_jnp.column_stack)
compress = _giving_arrays(_jnp.compress)
concat = _giving_arrays(_jnp.concat)
concatenate = _giving_arrays(_jnp.concatenate)
conj = _giving_arrays(_jnp.conj)
conjugate = _giving_arrays(_jnp.conjugate)
convolve = _giving_arrays(_jnp.convolve)
copy = _giving_arrays(_jnp.copy)
copysign = _giving_arrays(_jnp.copysign)
corrcoef = _giving_arrays(_jnp.corrcoef)
correlate = _giving_arrays(_jnp.correlate)
cos = _giving_arrays(_jnp.cos)
cosh = _giving_arrays(_jnp.cosh)
count_nonzero = _giving_arrays(_jnp.count_nonzero)
cov = _giving_arrays(_jnp.cov)
cross = _giving_arrays(_jnp.cross)
cumprod = _giving_arrays(_jnp.cumprod)
cumsum = _giving_arrays(_jnp.cumsum)
cumulative_prod = _giving_arrays(_jnp.cumulative_prod)
cumulative_sum = _giving_arrays(_jnp.cumulative_sum)
deg2rad = _giving_arrays(_jnp.deg2rad)
degrees = _giving_arrays(_jnp.degrees)
delete = _giving_arrays(_jnp.delete)
diag = _giving_arrays(_jnp.diag)
diagflat = _giving_arrays(_jnp.diagflat)
diff = _giving_arrays(_jnp.diff)
digitize = _giving_arrays(_jnp.digitize)
divide = _giving_arrays(_jnp.divide)
dot = _giving_arrays(_jnp.dot)
dstack = _giving_arrays(_jnp.dstack)
ediff1d = _giving_arrays(_jnp.ediff1d)
empty = _giving_arrays(_jnp.empty)
empty_like = _giving_arrays(_jnp.empty_like)
equal = _giving_arrays(_jnp.equal)
exp = _giving_arrays(_jnp.exp)
exp2 = _giving_arrays(_jnp.exp2)
expand_dims = _giving_arrays(_jnp.expand_dims)
expm1 = _giving_arrays(_jnp.expm1)
extract = _giving_arrays(_jnp.extract)
eye = _giving_arrays(_jnp.eye)
fabs = _giving_arrays(_jnp.fabs)
fill_diagonal = _giving_arrays(_jnp.fill_diagonal)
flatnonzero = _giving_arrays(_jnp.flatnonzero)
flip = _giving_arrays(_jnp.flip)
fliplr = _giving_arrays(_jnp.fliplr)
flipud = _giving_arrays(_jnp.flipud)
float_power = _giving_arrays(_jnp.float_power)
floor = _giving_arrays(_jnp.floor)
floor_divide = _giving_arrays(_jnp.floor_divide)
fmax = _giving_arrays(_jnp.fmax)
fmin = _giving_arrays(_jnp.fmin)
fmod = _giving_arrays(_jnp.fmod)
frombuffer = _giving_arrays(_jnp.frombuffer)
fromfunction = _giving_arrays(_jnp.fromfunction)
fromstring = _giving_arrays(_jnp.fromstring)
full = _giving_arrays(_jnp.full)
full_like = _giving_arrays(_jnp.full_like)
gcd = _giving_arrays(_jnp.gcd)
geomspace = _giving_arrays(_jnp.geomspace)
greater = _giving_arrays(_jnp.greater)
greater_equal = _giving_arrays(_jnp.greater_equal)
hamming = _giving_arrays(_jnp.hamming)
hanning = _giving_arrays(_jnp.hanning)
heaviside = _giving_arrays(_jnp.heaviside)
histogram_bin_edges = _giving_arrays(_jnp.histogram_bin_edges)
hstack = _giving_arrays(_jnp.hstack)
hypot = _giving_arrays(_jnp.hypot)
i0 = _giving_arrays(_jnp.i0)
identity = _giving_arrays(_jnp.identity)
imag = _giving_arrays(_jnp.imag)
inner = _giving_arrays(_jnp.inner)
insert = _giving_arrays(_jnp.insert)
interp = _giving_arrays(_jnp.interp)
invert = _giving_arrays(_jnp.invert)
isclose = _giving_arrays(_jnp.isclose)
iscomplex = _giving_arrays(_jnp.iscomplex)
isfinite = _giving_arrays(_jnp.isfinite)
isin = _giving_arrays(_jnp.isin)
isinf = _giving_arrays(_jnp.isinf)
isnan = _giving_arrays(_jnp.isnan)
isneginf = _giving_arrays(_jnp.isneginf)
isposinf = _giving_arrays(_jnp.isposinf)
isreal = _giving_arrays(_jnp.isreal)
kaiser = _giving_arrays(_jnp.kaiser)
kron = _giving_arrays(_jnp.kron)
lcm = _giving_arrays(_jnp.lcm)
ldexp = _giving_arrays(_jnp.ldexp)
left_shift = _giving_arrays(_jnp.left_shift)
less = _giving_arrays(_jnp.less)
less_equal = _giving_arrays(_jnp.less_equal)
lexsort = _giving_arrays(_jnp.lexsort)
load = _giving_arrays(_jnp.load)
log = _giving_arrays(_jnp.log)
log10 = _giving_arrays(_jnp.log10)
log1p = _giving_arrays(_jnp.log1p)
log2 = _giving_arrays(_jnp.log2)
logical_not = _giving_arrays(_jnp.logical_not)
logspace = _giving_arrays(_jnp.logspace)
matmul = _giving_arrays(_jnp.matmul)
matrix_transpose = _giving_arrays(_jnp.matrix_transpose)
matvec = _giving_arrays(_jnp.matvec)
max = _giving_arrays(_jnp.max)
mean = _giving_arrays(_jnp.mean)
median = _giving_arrays(_jnp.median)
min = _giving_arrays(_jnp.min)
mod = _giving_arrays(_jnp.mod)
moveaxis = _giving_arrays(_jnp.moveaxis)
nan_to_num = _giving_arrays(_jnp.nan_to_num)
nanargmax = _giving_arrays(_jnp.nanargmax)
nanargmin = _giving_arrays(_jnp.nanargmin)
nancumprod = _giving_arrays(_jnp.nancumprod)
nancumsum = _giving_arrays(_jnp.nancumsum)
nanmax = _giving_arrays(_jnp.nanmax)
nanmean = _giving_arrays(_jnp.nanmean)
nanmedian = _giving_arrays(_jnp.nanmedian)
nanmin = _giving_arrays(_jnp.nanmin)
nanpercentile = _giving_arrays(_jnp.nanpercentile)
nanprod = _giving_arrays(_jnp.nanprod)
nanquantile = _giving_arrays(_jnp.nanquantile)
nanstd = _giving_arrays(_jnp.nanstd)
nansum = _giving_arrays(_jnp.nansum)
nanvar = _giving_arrays(_jnp.nanvar)
negative = _giving_arrays(_jnp.negative)
nextafter = _giving_arrays(_jnp.nextafter)
not_equal = _giving_arrays(_jnp.not_equal)
ones = _giving_arrays(_jnp.ones)
ones_like = _giving_arrays(_jnp.ones_like)
outer = _giving_arrays(_jnp.outer)
packbits = _giving_arrays(_jnp.packbits)
pad = _giving_arrays(_jnp.pad)
partition = _giving_arrays(_jnp.partition)
percentile = _giving_arrays(_jnp.percentile)
permute_dims = _giving_arrays(_jnp.permute_dims)
piecewise = _giving_arrays(_jnp.piecewise)
place = _giving_arrays(_jnp.place)
poly = _giving_arrays(_jnp.poly)
polyadd = _giving_arrays(_jnp.polyadd)
polyder = _giving_arrays(_jnp.polyder)
polyint = _giving_arrays(_jnp.polyint)
polymul = _giving_arrays(_jnp.polymul)
polysub = _giving_arrays(_jnp.polysub)
polyval = _giving_arrays(_jnp.polyval)
positive = _giving_arrays(_jnp.positive)
pow = _giving_arrays(_jnp.pow)
power = _giving_arrays(_jnp.power)
prod = _giving_arrays(_jnp.prod)
ptp = _giving_arrays(_jnp.ptp)
put = _giving_arrays(_jnp.put)
put_along_axis = _giving_arrays(_jnp.put_along_axis)
quantile = _giving_arrays(_jnp.quantile)
rad2deg = _giving_arrays(_jnp.rad2deg)
radians = _giving_arrays(_jnp.radians)
ravel = _giving_arrays(_jnp.ravel)
ravel_multi_index = _giving_arrays(_jnp.ravel_multi_index)
real = _giving_arrays(_jnp.real)
reciprocal = _giving_arrays(_jnp.reciprocal)
remainder = _giving_arrays(_jnp.remainder)
repeat = _giving_arrays(_jnp.repeat)
reshape = _giving_arrays(_jnp.reshape)
resize = _giving_arrays(_jnp.resize)
right_shift = _giving_arrays(_jnp.right_shift)
rint = _giving_arrays(_jnp.rint)
roll = _giving_arrays(_jnp.roll)
rollaxis = _giving_arrays(_jnp.rollaxis)
roots = _giving_arrays(_jnp.roots)
rot90 = _giving_arrays(_jnp.rot90)
round = _giving_arrays(_jnp.round)
searchsorted = _giving_arrays(_jnp.searchsorted)
select = _giving_arrays(_jnp.select)
setdiff1d = _giving_arrays(_jnp.setdiff1d)
setxor1d = _giving_arrays(_jnp.setxor1d)
sign = _giving_arrays(_jnp.sign)
signbit = _giving_arrays(_jnp.signbit)
sin = _giving_arrays(_jnp.sin)
sinc = _giving_arrays(_jnp.sinc)
sinh = _giving_arrays(_jnp.sinh)
sort = _giving_arrays(_jnp.sort)
sort_complex = _giving_arrays(_jnp.sort_complex)
spacing = _giving_arrays(_jnp.spacing)
sqrt = _giving_arrays(_jnp.sqrt)
square = _giving_arrays(_jnp.square)
squeeze = _giving_arrays(_jnp.squeeze)
stack = _giving_arrays(_jnp.stack)
std = _giving_arrays(_jnp.std)
sum = _giving_arrays(_jnp.sum)
swapaxes = _giving_arrays(_jnp.swapaxes)
take = _giving_arrays(_jnp.take)
take_along_axis = _giving_arrays(_jnp.take_along_axis)
tan = _giving_arrays(_jnp.tan)
tanh = _giving_arrays(_jnp.tanh)
tensordot = _giving_arrays(_jnp.tensordot)
tile = _giving_arrays(_jnp.tile)
trace = _giving_arrays(_jnp.trace)
transpose = _giving_arrays(_jnp.transpose)
trapezoid = _giving_arrays(_jnp.trapezoid)
tri = _giving_arrays(_jnp.tri)
tril = _giving_arrays(_jnp.tril)
trim_zeros = _giving_arrays(_jnp.trim_zeros)
triu = _giving_arrays(_jnp.triu)
true_divide = _giving_arrays(_jnp.true_divide)
trunc = _giving_arrays(_jnp.trunc)
union1d = _giving_arrays(_jnp.union1d)
unique_values = _giving_arrays(_jnp.unique_values)
unpackbits = _giving_arrays(_jnp.unpackbits)
unwrap = _giving_arrays(_jnp.unwrap)
vander = _giving_arrays(_jnp.vander)
var = _giving_arrays(_jnp.var)
vdot = _giving_arrays(_jnp.vdot)
vecdot = _giving_arrays(_jnp.vecdot)
vecmat = _giving_arrays(_jnp.vecmat)
vstack = _giving_arrays(_jnp.vstack)
zeros = _giving_arrays(_jnp.zeros)
zeros_like = _giving_arrays(_jnp.zeros_like)
