"""Random programs, run by pjit over a mesh and by plain `jax.jit` on one device, and compared.

    python -m tests.core.pjit.random_programs --count 1000 --start 0
    python -m tests.core.pjit.random_programs --seed 17 --show
    python -m tests.core.pjit.random_programs --count 1000 --against-jax
    python -m tests.core.pjit.random_programs --count 1000 --layouts

With `--against-jax` they run under `xlashard.jit` and `jax.jit` on the same mesh; refusals, types
and shardings of results are compared too (`against_jax`). With `--layouts` they run under the
layouts that AUTO finds (`tests.auto.random_layouts`).

A program is drawn from its seed as frozen data (`description`) and written as Python (`text`),
which is run (`running`). A failing program is shrunk before it is printed (`shrinking`). Programs
that failed once are kept as texts in `kept/`, because a seed draws another program as soon as an
operation is added to the grammar.
"""
