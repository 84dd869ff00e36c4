"""Names of `jax.numpy`, `jax.lax`, `jax.nn`, `jax.ops` and `jax.scipy` that are others today."""

from xlashard.legacy.table.entry import Entry, members

_ERA = "xlashard.legacy.era.numpy"

ENTRIES: tuple[Entry, ...] = (
    *members("jax.numpy", "0.4.9", _ERA, {"msort": "jax.numpy.sort(a, axis=0)"}),
    *members(
        "jax.numpy",
        "0.4.16",
        _ERA,
        {
            "alltrue": "jax.numpy.all",
            "cumproduct": "jax.numpy.cumprod",
            "product": "jax.numpy.prod",
            "sometrue": "jax.numpy.any",
        },
    ),
    *members(
        "jax.numpy",
        "0.4.24",
        _ERA,
        {
            "NINF": "-jax.numpy.inf",
            "NZERO": "-0.0",
            "PZERO": "0.0",
            "in1d": "jax.numpy.isin",
            "issubsctype": "jax.numpy.issubdtype",
            "row_stack": "jax.numpy.vstack",
            "trapz": "jax.numpy.trapezoid",
        },
    ),
    *members("jax.numpy", "0.4.32", _ERA, {"isscalar": "numpy.isscalar(x)"}),
    *members("jax.numpy", "0.5.0", _ERA, {"round_": "jax.numpy.round"}),
    *members("jax.numpy", "0.10.0", _ERA, {"fix": "jax.numpy.trunc"}),
    *members("jax.lax", "0.4.30", _ERA, {"tie_in": "y"}),
    *members("jax.lax", "0.9.0", _ERA, {"zeros_like_array": "jax.numpy.zeros_like"}),
    Entry(
        "jax.lax.xeinsum",
        "0.4.31",
        "refused",
        f"{_ERA}:xeinsum",
        "jax.numpy.einsum",
        "subscripts with names of axes went with xmap",
    ),
    *members("jax.nn", "0.4.30", _ERA, {"normalize": "jax.nn.standardize"}),
    *members(
        "jax.ops",
        "0.3.2",
        _ERA,
        {
            "index": "numpy.index_exp",
            "index_add": "x.at[idx].add(y)",
            "index_max": "x.at[idx].max(y)",
            "index_min": "x.at[idx].min(y)",
            "index_mul": "x.at[idx].multiply(y)",
            "index_update": "x.at[idx].set(y)",
        },
    ),
    *members(
        "jax.scipy.linalg", "0.4.24", _ERA, {"tril": "jax.numpy.tril", "triu": "jax.numpy.triu"}
    ),
)
