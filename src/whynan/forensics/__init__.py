"""Files already on disk: checkpoints, data sets, training logs. Nothing in a file is ever executed."""
