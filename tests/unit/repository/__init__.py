"""Tests of the repository around the package: tools, examples, docs, Makefile, packaging."""
