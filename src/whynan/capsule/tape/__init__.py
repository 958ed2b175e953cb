"""The tape: one step written down as the calls that make it up."""
