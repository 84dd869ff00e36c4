"""Tests of programs: annotated modules, compiled, that take and return buffer handles."""
