"""Tests of programs: annotated modules, compiled, that take and give buffer handles."""
