"""NVIDIA GPUs: `gpu_models` and `gpu_names` have figures and machines, `topologies` devices."""
