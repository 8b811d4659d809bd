"""The pytest plugin: options, generated cells, and the report. Imports neither torch nor triton at load."""
