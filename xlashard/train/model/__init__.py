"""The transformer, its layout on a mesh, its training step and its compiled programs."""
