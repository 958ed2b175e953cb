"""PROBE: edge cases, search and ranges for a model and a loss before the first step."""
