"""Random specs on random grids, for hypothesis."""

from hypothesis import strategies as st

from xlashard.geometry import MeshGrid, Spec


@st.composite
def specs(draw):
    """Draw a grid of up to 64 devices and a spec on it for up to five dimensions."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    names = tuple("abcd"[: len(sizes)])
    ndim = draw(st.integers(0, 5))
    dims = [()] * ndim
    for name in draw(st.permutations(names)):
        dim = draw(st.integers(0, ndim))
        if dim < ndim:
            dims[dim] += (name,)
    return MeshGrid(names, tuple(sizes)), Spec(tuple(dims)), ndim
