"""Removed: prints the replacement."""

from xlashard.cli.cloud.session import removed

if __name__ == "__main__":
    removed("write jobset.py FLAGS | kubectl apply --filename=-, or use xpk (docs/tpu/pods.md)")
