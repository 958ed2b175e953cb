"""Checkpoints of every format: opened without running code, scanned at the speed of reading, judged, compared."""
