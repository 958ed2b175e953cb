"""TRACE: follow a replayed step value by value to the place where the damage was born."""
