"""Programs as reports take them, made from functions, stages, recorded calls and modules."""
