"""Random programs, run by pjit over a mesh and by plain `jax.jit` on one device, and compared.

    python -m tests.pjit.random_programs --count 1000 --start 0
    python -m tests.pjit.random_programs --seed 17 --show
    python -m tests.pjit.random_programs --count 1000 --against-jax

With `--against-jax` they run under `xlashard.jit` and `jax.jit` on the same mesh, and what is
accepted, the types and the shardings of results are compared too (`against_jax`).

A program is drawn from its seed as frozen data (`description`), written as Python (`text`), and
what is written is what runs (`running`). One that fails is made smaller before it is shown
(`shrinking`). Those that failed once are kept as they were written, in `kept/`, because
a seed means another program as soon as an operation is added to the grammar.
"""
