"""The five hunts that whynan grew out of, run end to end: the failing program, its diagnosis, the remedy, the healed program."""
