"""Random bad calls: each a thunk, and texts of which its error must have one.

Each maker takes a `Bench` (meshes, a compiled program and other expensive objects) and a
`random.Random`, and makes one mistake in an otherwise valid call.
"""
