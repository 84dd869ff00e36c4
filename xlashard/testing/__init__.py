"""Emulated devices and pods for tests."""
