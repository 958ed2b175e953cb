"""REPLAY: everything needed to run one step again, and the running of it."""
