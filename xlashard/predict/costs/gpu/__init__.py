"""Cost model of NVIDIA GPUs: rates, operations of NVIDIA's libraries, collectives of NCCL."""
