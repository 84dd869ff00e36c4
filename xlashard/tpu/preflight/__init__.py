"""What a program would take, do and cost on a TPU topology, without a TPU."""
