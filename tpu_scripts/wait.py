"""Removed: prints the replacement."""

from xlashard.cli.cloud.session import removed

if __name__ == "__main__":
    removed("create.py waits until the TPU is ready")
