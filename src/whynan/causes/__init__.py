"""EXPLAIN and PROVE: the catalogue of causes, one rule per code, and the experiments that decide between them."""
