"""Entries of the names of functions of arrays, and of the keys of `jax.random`."""

from xlashard.legacy.entries.entry import EntryTable, moved, refused, works

ENTRIES: EntryTable = {
    "jax.numpy": {
        "msort": works("0.4.9", "jax.numpy.sort(a, axis=0)"),
        "alltrue": works("0.4.16", "jax.numpy.all"),
        "cumproduct": works("0.4.16", "jax.numpy.cumprod"),
        "product": works("0.4.16", "jax.numpy.prod"),
        "sometrue": works("0.4.16", "jax.numpy.any"),
        "NINF": works("0.4.24", "-jax.numpy.inf"),
        "NZERO": works("0.4.24", "-0.0"),
        "PZERO": works("0.4.24", "0.0"),
        "in1d": works("0.4.24", "jax.numpy.isin"),
        "issubsctype": works("0.4.24", "jax.numpy.issubdtype"),
        "row_stack": works("0.4.24", "jax.numpy.vstack"),
        "trapz": works("0.4.24", "jax.numpy.trapezoid"),
        "isscalar": works("0.4.32", "numpy.isscalar(x)"),
        "round_": works("0.5.0", "jax.numpy.round"),
        "fix": works("0.10.0", "jax.numpy.trunc"),
    },
    "jax.lax": {
        "tie_in": works("0.4.30", "y"),
        "zeros_like_array": works("0.9.0", "jax.numpy.zeros_like"),
        "pvary": works("0.10.0", "jax.lax.pcast(x, axis_name, to='varying')"),
        "all_gather_invariant": works("0.9.0", "jax.lax.all_gather(x, axis_name, to='invarying')"),
        **dict.fromkeys(
            ("infeed", "outfeed"),
            refused("0.7.0", "jax.pure_callback(f, result, x)").because(
                "programs exchange data with the host by callbacks"
            ),
        ),
        "xeinsum": refused("0.4.31", "jax.numpy.einsum").because(
            "subscripts with named axes were removed with xmap"
        ),
    },
    "jax._src.numpy.lax_numpy": {
        "isin": works("0.3.15", "jax.numpy.isin"),
        "_ScalarMeta": works("0.6.0", "type(jax.numpy.float32)"),
    },
    "jax.nn": {"normalize": works("0.4.30", "jax.nn.standardize")},
    "jax.ops": {
        "index": works("0.3.2", "numpy.index_exp"),
        "index_add": works("0.3.2", "x.at[idx].add(y)"),
        "index_max": works("0.3.2", "x.at[idx].max(y)"),
        "index_min": works("0.3.2", "x.at[idx].min(y)"),
        "index_mul": works("0.3.2", "x.at[idx].multiply(y)"),
        "index_update": works("0.3.2", "x.at[idx].set(y)"),
    },
    "jax.scipy.special": {
        "sph_harm": works("0.10.0", "jax.scipy.special.sph_harm_y(n, m, theta, phi)").noting(
            "The order of both pairs of arguments is the other one today"
        )
    },
    "jax.scipy.linalg": {
        "tril": works("0.4.24", "jax.numpy.tril"),
        "triu": works("0.4.24", "jax.numpy.triu"),
    },
    "jax.random": {
        "KeyArray": works("0.4.24", "jax.Array"),
        "PRNGKeyArray": works("0.4.24", "jax.Array"),
        "rbg_key": works("0.4.24", "jax.random.key(seed, impl='rbg')"),
        "shuffle": works("0.4.31", "jax.random.permutation(key, x, independent=True)"),
        "threefry2x32_key": works("0.4.24", "jax.random.key(seed, impl='threefry2x32')"),
        "unsafe_rbg_key": works("0.4.24", "jax.random.key(seed, impl='unsafe_rbg')"),
        "default_prng_impl": works(
            "0.4.24", "jax.random.key_impl(jax.random.key(0))", "xlashard._jax.legacy_api:random."
        ),
        "threefry_2x32": works("0.4.24", "jax.extend.random.threefry_2x32"),
    },
    "jax._src.random.prng.PRNGKeyArray": {
        "unsafe_raw_array": works("0.4.24", "jax.random.key_data(keys)")
    },
    "jax._src.prng": {"": works("0.11.0", "import jax.extend.random")},
    "jax.prng": {
        "": works("0.4.24", "import jax.extend.random"),
        "PRNGKeyArray": works("0.4.24", "jax.Array"),
        **moved(
            "0.4.24",
            "jax.extend.random",
            *("rbg_prng_impl", "seed_with_impl", "threefry_2x32", "threefry_prng_impl"),
            "unsafe_rbg_prng_impl",
        ),
    },
}
