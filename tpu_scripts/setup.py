"""Removed: prints the replacement."""

from xlashard.cli.cloud.session import removed

if __name__ == "__main__":
    removed("run.py and watch.py install the code, if it has changed")
