"""Cost model: arithmetic, HBM traffic, network, and the time estimate made from them."""
