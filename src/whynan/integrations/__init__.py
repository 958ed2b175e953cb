"""Where people look: trackers, notebooks, test runs, progress bars and the frameworks that own the loop."""
