"""Stages of a pjit-ed function ahead of a call: traced, lowered, compiled, bound, saved."""
