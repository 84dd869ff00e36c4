"""Tests of the built site, which `make docs` runs; `make test` leaves them out."""
