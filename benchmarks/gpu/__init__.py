"""Measurements on one GPU, beside the predictions for it."""
