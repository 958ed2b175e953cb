"""What training frameworks need beyond `whynan run` and `whynan.watch`: one file each, loaded only when its framework is in use."""
