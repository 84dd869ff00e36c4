"""What runs on the workers: it is copied there, and needs nothing but the Python of the VM."""
