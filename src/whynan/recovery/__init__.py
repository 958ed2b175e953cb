"""RECOVER: what to do about a bad step, and the state that makes it possible."""
