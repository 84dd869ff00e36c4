"""At home with the libraries that people use with JAX."""
