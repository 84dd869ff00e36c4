"""Removed: prints the replacement."""

from xlashard.cli.cloud.session import removed

if __name__ == "__main__":
    removed("write gcloud compute tpus tpu-vm ssh NAME --worker=NUMBER --zone=ZONE")
