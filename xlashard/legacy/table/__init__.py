"""The names of the era, one entry each: what the installer installs and the page shows."""
