"""Measurements of a machine's GPU or TPUs, beside what is predicted for them."""
