"""Makes bad calls at random: each a thunk, and texts of which its error must hold one.

Each maker takes a `Bench` (meshes, a compiled program and what else costs time to make) and a
`random.Random`, and spoils one thing of a call that is right otherwise.
"""
