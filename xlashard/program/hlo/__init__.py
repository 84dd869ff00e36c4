"""Analysis of the HLO text of compiled modules."""
