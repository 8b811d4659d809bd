"""The tests that ship with the package, so that ``dsv4-matrix run`` needs no checkout."""
